"""The presets of HetSeq and HetPipe, as launched, with one island on a part of a core: rows, losses, seconds.

    python benchmarks/presets.py [--presets images bert] [--slow 2] [--steps 60] [--beside]

Needs root, for a control group (`cpu_quota.py`). Every island has the cores that `launch` gives it; the last
one is slowed as soon as its process is known. Figures: docs/presets.md.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from cpu_quota import CpuQuota

from shardtrain.report.sinks.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
HETSEQ, HETPIPE = (["--strategy", f"meshes/{name}.toml"] for name in ("hetseq", "hetpipe"))
SMALL = ["--model.filters", "4", "--model.hidden", "16", "--batch", "32"]
"""Eight islands on two cores compile for long: the pipelines have fewer channels than the example."""
IN_FLIGHT = ["--in-flight", "4", "--accumulate", "1"]
PRESETS = {
    "images": (2, "digits_resnet", HETSEQ),
    "bert": (2, "bert_text", HETSEQ),
    "translation": (2, "translation_text", HETSEQ),
    "pipelines": (8, "digits_vgg", [*HETPIPE, *SMALL]),
    "pipelines in flight": (8, "digits_vgg", [*HETPIPE, *SMALL, *IN_FLIGHT]),
}
"""Name -> (islands, example, options)."""

PROGRAM = str(Path(sys.executable).parent / "shardtrain")
ENVIRON = os.environ | {"JAX_PLATFORMS": "cpu"}


def train_command(name: str, options: list[str], steps: int, folder: Path) -> list[str]:
    """Return the words that train the example of a preset."""
    command = ["train", f"examples/{PRESETS[name][1]}.py", *options, "--steps", str(steps)]
    return [*command, "--log-every", "1", "--evaluate-every", str(steps), "--run-dir", str(folder)]


def one_device(name: str, steps: int, folder: Path) -> list[float]:
    """Train the example of a preset on one device without islands; return its losses by step."""
    options = SMALL if PRESETS[name][2][: len(HETPIPE)] == HETPIPE else []
    command = [PROGRAM, *train_command(name, ["--cpu-devices", "1", *options], steps, folder)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRON, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} on one device ended with code {done.returncode}:\n{done.stderr[-3000:]}")
    return [line["train/loss"] for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]


def difference(losses: list[float], alone: list[float]) -> str:
    """Format the largest relative difference of losses to those of one device, and the last one there.

    In waves there is a line for some steps, with the mean of those since the last: so it is of one device.

    >>> difference([1.0, 2.02], [0.5, 1.5, 1.0, 3.0])
    '1.0e-02; last loss 2.000'
    """
    size = len(alone) // len(losses)
    means = [mean(alone[i * size : (i + 1) * size]) for i in range(len(losses))]
    most = max(abs(a / b - 1) for a, b in zip(losses, means, strict=True))
    return f"{most:.1e}; last loss {means[-1]:.3f}"


def run(name: str, steps: int, slow: int, folder: Path, *, beside: bool) -> list[str]:
    """Train a preset with its last island slowed; return the cells of its row.

    Args:
      name: of the preset.
      steps: of the run.
      slow: the last island has this part of its core: 1 / slow.
      folder: of the run, its logs, and the run of one device.
      beside: train the example on one device too, and compare losses.
    """
    num_islands, _, options = PRESETS[name]
    command = [PROGRAM, "launch", "--islands", str(num_islands), "--logs", str(folder / "logs"), "--"]
    command += train_command(name, options, steps, folder / "run")
    # the last row of the table of ranks: rank, island, host, pid
    row = re.compile(rf"^ +{num_islands - 1} +{num_islands - 1} +\S+ +(\d+) ")
    quota, printed, started = None, [], time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                printed.append(line)
                if quota is None and (found := row.match(line)):
                    quota = CpuQuota(1 / slow, int(found[1]))
                    quota.begin()
        finally:
            if quota is not None:
                quota.end()
    if process.returncode or quota is None:
        raise SystemExit(f"{name} ended with code {process.returncode}:\n{''.join(printed[-60:])}")
    lines = read_jsonl(folder / "run" / "metrics.jsonl")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    text = "".join(printed)
    rows = re.findall(r"after step (\d+): rows of the islands from now on: ([\d, ]+)", text)
    changes = "; ".join(f"{each} after step {step}" for step, each in rows) or "as at the start"
    staleness = max((line.get("staleness", -1) for line in lines), default=-1)
    return [
        changes if staleness < 0 else f"staleness up to {staleness:.0f}",
        f"{losses[0]:.3f}",
        f"{losses[-1]:.3f}",
        f"{lines[-1]['heldout/loss']:.3f}",
        f"{time.monotonic() - started:.0f}",
        difference(losses, one_device(name, steps, folder / "alone")) if beside else "",
    ]


def main() -> None:
    """Print a row for each preset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", type=int, default=2)
    parser.add_argument("--beside", action="store_true", help="train on one device too, and compare losses")
    options = parser.parse_args()
    print(
        "| preset | rows of the islands | first loss | last loss | held-out loss | s in all | to one device |"
    )
    print("|---|---|--:|--:|--:|--:|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.presets):
            cells = run(name, options.steps, options.slow, Path(folder) / str(number), beside=options.beside)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
