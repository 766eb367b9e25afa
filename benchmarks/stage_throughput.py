"""Updates per second of pipeline stages across islands, over one device and over islands that are replicas.

    python benchmarks/stage_throughput.py [--steps 60] [--models gpt_text own_model]

Each row is a whole run, whose last line of metrics has the rate of the last 50 steps. An island has one core;
"one device" is measured on one core and on two.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shardtrain.report.sinks.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
MODELS = {"gpt_text": "examples/gpt_text.py", "own_model": "examples/own_model.py"}
"""Name -> run file; the first one says its blocks, the second is cut by tracing."""
STAGES = ["--across", "pipeline"]
WAYS = {
    "one device, one core": ("0", []),
    "one device, two cores": ("0,1", []),
    "2 data islands": ("", []),
    "2 stages, 4 microbatches": ("", [*STAGES, "--accumulate", "4"]),
    "2 stages, 16 microbatches": ("", [*STAGES, "--accumulate", "16"]),
}
"""Name -> (cores of the one process; "": two islands by the launcher, options)."""


def updates_per_second(file: str, way: str, steps: int, folder: Path) -> float:
    """Run an example, and return the rate of its last steps."""
    cores, options = WAYS[way]
    program = str(Path(sys.executable).parent / "shardtrain")
    start = ["taskset", "-c", cores, program] if cores else [program, "launch", "--islands", "2", "--"]
    command = [*start, "train", file, *options, "--steps", str(steps), "--log-every", "10", "--batch", "32"]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [*command, "--evaluate-every", "None", "--run-dir", str(folder)],
        cwd=ROOT,
        env=environ,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return read_jsonl(folder / "metrics.jsonl")[-1]["updates_per_second"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    steps = options.steps
    print(f"| | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            file = MODELS[name]
            found = {
                way: updates_per_second(file, way, steps, Path(folder) / f"{Path(file).stem}{number}")
                for number, way in enumerate(WAYS)
            }
            one = found["one device, one core"]
            cells = [f"{rate:.2f} ({rate / one:.2f}x)" for rate in found.values()]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
