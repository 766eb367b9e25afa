"""Islands in float32, bfloat16 and float16 in one run beside the same islands in float32: held-out loss.

uv run python benchmarks/mixed_islands.py [--steps 300] [--folder runs/mixed_islands]

Three islands of one CPU device each train a small decoder on real text. The mixed run has a section of its
strategy for islands 1 and 2, and a loss scale for each. Runs that --folder has from before are not repeated.
Figures: docs/benchmarks/mixed_islands.md.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]

MIXED = """
[islands.1]
compute_dtype = "bfloat16"

[islands.2]
compute_dtype = "float16"
accumulate = 2
"""

WAYS: Mapping[str, str] = {
    "float32": "",
    "float32, bfloat16, float16": MIXED,
    "float16": 'compute_dtype = "float16"',
}
"""Name -> strategy file."""

MODEL = ("--model.embed", "64", "--model.num-layers", "2", "--model.num-heads", "4")


def trained(folder: Path, name: str, strategy: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """Train on three islands unless the folder has the run, and return its metrics."""
    from shardtrain.report.sinks.json_lines import read_jsonl

    where = folder / name.replace(", ", "-")
    metrics = where / "run" / "metrics.jsonl"
    lines = read_jsonl(metrics) if metrics.is_file() else []
    if not lines or lines[-1]["step"] != options.steps or "heldout/loss" not in lines[-1]:
        where.mkdir(parents=True, exist_ok=True)
        (where / "strategy.toml").write_text(strategy)
        words = [
            sys.executable,
            "-m",
            "shardtrain",
            "launch",
            "--islands",
            "3",
            "--logs",
            str(where / "logs"),
        ]
        words += ["--", "train", str(ROOT / "examples" / "gpt_text.py"), "--run-dir", str(where / "run")]
        words += ["--cpu-devices", "1", "--strategy", str(where / "strategy.toml"), *MODEL]
        words += ["--steps", str(options.steps), "--batch", str(options.batch), "--seed", str(options.seed)]
        words += ["--log-every", "1", "--evaluate-every", "None", "--sinks", "jsonl"]
        subprocess.run(words, check=True, stdout=sys.stderr)
        lines = read_jsonl(metrics)
    return lines


def table(runs: Mapping[str, list[dict[str, float]]]) -> str:
    """Format the runs as a table beside the first."""
    base = next(iter(runs.values()))[-1]["heldout/loss"]
    text = "| islands | steps | skipped | held-out loss | ratio |\n| --- | --: | --: | --: | --: |\n"
    for name, lines in runs.items():
        loss = lines[-1]["heldout/loss"]
        skipped = sum(line["skipped"] for line in lines)
        text += f"| {name} | {len(lines)} | {skipped:.0f} | {loss:.4f} | {loss / base:.4f} |\n"
    return text


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=12, help="rows in a step, over all islands")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data")
    parser.add_argument("--folder", type=Path, help="keeps the runs; default: a temporary folder")
    options = parser.parse_args(arguments)
    with TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        runs = {name: trained(folder, name, strategy, options) for name, strategy in WAYS.items()}
    sys.stdout.write(table(runs))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
