"""A deep ResNet-v2 on one device and as pipelines across islands: losses, time to the first step, memory.

    python benchmarks/resnet_depth.py [--depth 1001] [--stack 11] [--steps 5] [--ways one 2x2 3x2]

Runs examples/digits_resnet.py with its equal blocks in stacks, each way a run of its own.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shardtrain.report.sinks.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
STAGES = ["--across", "pipeline", "--stages", "flops", "--partitions"]
WAYS = {"one": (1, []), "2x2": (4, [*STAGES, "2"]), "3x2": (6, [*STAGES, "3"]), "2 islands": (2, [])}
"""Name -> (islands, options); "2x2" are 2 stages x 2 replicas."""
BATCH, MICROBATCHES = 32, 4


def run(way: str, depth: int, stack: int, steps: int, folder: Path) -> tuple[list[float], float, float, str]:
    """Return the losses, seconds to the end, seconds of the fastest step, and the line of peak memory."""
    num_islands, options = WAYS[way]
    program = str(Path(sys.executable).parent / "shardtrain")
    start = [program] if num_islands == 1 else [program, "launch", "--islands", str(num_islands), "--"]
    model = {"depth": depth, "filters": 4, "num-groups": 2, "stack": stack}
    command = [*start, "train", "examples/digits_resnet.py", "--batch", str(BATCH), "--steps", str(steps)]
    command += [word for name, value in model.items() for word in (f"--model.{name}", str(value))]
    command += ["--accumulate", str(MICROBATCHES), "--log-every", "1", "--evaluate-every", "None", *options]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, "--run-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=False,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - begin
    if done.returncode:
        raise SystemExit(
            f"{way} ended with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]
    peak = re.search(r"peak memory of .*", done.stdout)
    fastest = min(1 / line["updates_per_second"] for line in lines if line.get("updates_per_second"))
    return [line["train/loss"] for line in lines], seconds, fastest, peak[0] if peak else ""


def main() -> None:
    """Print a row for each way, and fail where a loss is not that of the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("depth", 1001), ("stack", 11), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["one", "2x2", "3x2"])
    options = parser.parse_args()
    print("| way | losses | s in all | s of a step | memory |\n|---|---|--:|--:|---|", flush=True)
    reference: list[float] = []
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways:
            losses, seconds, step, peak = run(
                way, options.depth, options.stack, options.steps, Path(folder) / way.replace(" ", "_")
            )
            reference = reference or losses
            worst = max(worst, *(abs(a / b - 1) for a, b in zip(losses, reference, strict=True)))
            text = ", ".join(f"{loss:.6f}" for loss in losses)
            print(f"| {way} | {text} | {seconds:.0f} | {step:.2f} | {peak} |", flush=True)
    print(f"\nlargest relative difference from the first: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the losses are not those of the first")


if __name__ == "__main__":
    main()
