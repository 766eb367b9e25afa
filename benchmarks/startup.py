"""How long the main job takes from the start of its process to the end of its first step.

Each start is a process of its own: cold without compiled programs, then warm with those of the start before.
Figures: docs/speed.md.

uv run python benchmarks/startup.py
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import tyro

FEW_STEPS = "--steps 6 --log-every 1 --evaluate-every None --sinks jsonl"
"""A line is written a few steps late, and that of the last step after the evaluation."""


def start(run: str | Path, folder: Path, name: str) -> tuple[float, str]:
    """Train a few steps in a process of its own.

    Args:
      run: the run file.
      folder: of all starts, with the programs that they compile.
      name: of this start.

    Returns:
      Seconds until the loss of the first step is written, and what the run printed.
    """
    words = ("train", run, *FEW_STEPS.split(), "--run-dir", folder / name)
    command = [sys.executable, "-m", "shardtrain", *map(str, words)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    metrics, began = folder / name / "metrics.jsonl", time.monotonic()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
            time.sleep(0.005)
        seconds = time.monotonic() - began
        printed, _ = process.communicate()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{printed}")
    return seconds, printed


def main(starts: int = 5) -> None:
    """Print the seconds of a cold start, and the median of some warm ones."""
    with TemporaryDirectory() as folder:
        cold, *warm = [start("examples/gpt_text.py", Path(folder), str(i))[0] for i in range(1 + starts)]
    print(f"start to the end of the first step: cold {cold:.2f} s, warm {median(warm):.2f} s")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
