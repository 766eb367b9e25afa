"""A model that does not fit the memory limit of one process trains in stages under the same limit.

    python benchmarks/memory_limit.py [--limit-gib 2.2]

The model says no blocks: it is cut by tracing. The limit is that of the kernel on the writable memory of each
process (RLIMIT_DATA), which every rank inherits. The file is a run file too.
"""

import argparse
import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from flax import nnx

from shardtrain import Run, Text
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.report.sinks.json_lines import read_jsonl

WIDTH, NUM_LAYERS, SEQ, STEPS = 2048, 14, 16, 3


class Wide(nnx.Module):
    """Layers of 2048 x 2048 weights with skips, as anybody would write them."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Embed(256, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(NUM_LAYERS)])
        self.head = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.table(tokens)
        for layer in self.layers:
            x = x + nnx.gelu(layer(x)) / NUM_LAYERS
        return self.head(x)


def run() -> Run:
    """The run of every row of the table."""
    checkpoints = CheckpointPolicy(every_steps=None, every_minutes=None)
    return Run(
        model=Wide, data=Text(seq=SEQ), batch=8, steps=STEPS, log_every=1, seed=1, checkpoints=checkpoints
    )


def train(words: list[str], folder: Path, limit_bytes: int | None) -> tuple[str, list[float]]:
    """Run a command under the limit; return the end of what it printed, and its losses."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    command = [str(Path(sys.executable).parent / "shardtrain"), *words, "--run-dir", str(folder)]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, env=environ, preexec_fn=limit, capture_output=True, text=True, check=False, timeout=500
    )
    peak = re.search(r"peak memory of .*", done.stdout)
    metrics = folder / "metrics.jsonl"
    losses = [x["train/loss"] for x in read_jsonl(metrics)] if metrics.exists() else []
    if done.returncode == 0 and peak is not None:
        return peak[0], losses
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    why = next((line for line in lines if re.search("alloc|memory|RESOURCE|MemoryError", line)), lines[-1])
    return f"ends with code {done.returncode}: {why[:100]}", losses


def main() -> None:
    """Print the table, and fail where a row is not what its name says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit-gib", type=float, default=2.2)
    limit_bytes = int(parser.parse_args().limit_gib * 2**30)
    file, rows = str(Path(__file__).resolve()), {}
    stages = ["launch", "--islands", "2", "--", "train", file, "--across", "pipeline", "--accumulate", "2"]
    ways = {
        "one device, no limit": (["train", file, "--accumulate", "2"], None),
        "one device": (["train", file, "--accumulate", "2"], limit_bytes),
        "two stages": (stages, limit_bytes),
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (words, limit)) in enumerate(ways.items()):
            rows[name] = train(words, Path(folder) / str(number), limit)
            losses = ", ".join(f"{loss:.6f}" for loss in rows[name][1])
            print(f"| {name} | {rows[name][0]} | {losses} |", flush=True)
    whole, alone, staged = (losses for _, losses in rows.values())
    same = len(staged) == STEPS and all(abs(a / b - 1) < 1e-5 for a, b in zip(staged, whole, strict=True))
    if len(alone) == STEPS or not same:
        raise SystemExit("under this limit one device should not train, and two stages should as without it")


if __name__ == "__main__":
    main()
