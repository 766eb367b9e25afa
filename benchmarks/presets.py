"""The presets of HetSeq and HetPipe, as launched, with one island on a part of a core: rows, losses, seconds.

    python benchmarks/presets.py [--presets images bert translation pipelines] [--slow 2] [--steps 60]

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

from cpu_quota import CpuQuota

from shardtrain.report.sinks.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
HETSEQ, HETPIPE = (["--strategy", f"meshes/{name}.toml"] for name in ("hetseq", "hetpipe"))
SMALL = ["--model.filters", "2", "--model.hidden", "16", "--batch", "32"]
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


def run(name: str, steps: int, slow: int, folder: Path) -> list[str]:
    """Train a preset with its last island slowed; return the cells of its row."""
    num_islands, example, options = PRESETS[name]
    program = str(Path(sys.executable).parent / "shardtrain")
    command = [program, "launch", "--islands", str(num_islands), "--logs", str(folder / "logs"), "--"]
    command += ["train", f"examples/{example}.py", *options, "--steps", str(steps), "--log-every", "1"]
    command += ["--evaluate-every", str(steps), "--run-dir", str(folder / "run")]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    # the last row of the table of ranks: rank, island, host, pid
    row = re.compile(rf"^ +{num_islands - 1} +{num_islands - 1} +\S+ +(\d+) ")
    quota, printed, started = None, [], time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
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
    ]


def main() -> None:
    """Print a row for each preset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow", type=int, default=2)
    options = parser.parse_args()
    print("| preset | rows of the islands | first loss | last loss | held-out loss | s in all |")
    print("|---|---|--:|--:|--:|--:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(options.presets):
            cells = run(name, options.steps, options.slow, Path(folder) / str(number))
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
