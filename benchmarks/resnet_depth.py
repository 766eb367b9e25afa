"""A deep ResNet-v2 through pipelines across islands: the losses of one device, step by step.

    python benchmarks/resnet_depth.py [--depth 110] [--steps 5]

Runs examples/digits_resnet.py under mpiexec as one process, as 2 stages x 2 pipelines and as 3 stages,
and prints the losses side by side. Programs are compiled without LLVM's optimisations, which take
long on a network of many blocks; the optimizer is SGD.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from shardtrain.metrics import read_jsonl

ROOT = Path(__file__).parents[1]
WAYS = {
    "one device": (1, []),
    "2 stages x 2": (4, ["--across", "pipeline", "--partitions", "2"]),
    "3 stages": (3, ["--across", "pipeline", "--stages", "params"]),
}
FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def losses(num_ranks: int, options: list[str], depth: int, steps: int, folder: Path) -> dict[int, float]:
    """Step -> its loss."""
    beside = Path(sys.executable).parent
    command = [str(beside / "mpiexec"), "-n", str(num_ranks), str(beside / "shardtrain"), "train"]
    command += ["examples/digits_resnet.py", "--model.depth", str(depth), "--model.filters", "4"]
    command += ["--model.num-groups", "2", "--batch", "32", "--accumulate", "4", "--log-every", "1"]
    # of thousands of arrays: XLA takes very long to compile as many updates by AdamW
    command += ["--optimizer.name", "sgd", "--optimizer.b1", "0", "--optimizer.learning-rate.warmup", "0"]
    command += ["--optimizer.learning-rate.peak", "0.02"]
    command += ["--steps", str(steps), "--run-dir", str(folder), *options]
    environ = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}",
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run(command, cwd=ROOT, env=environ, check=True, stdout=subprocess.DEVNULL)
    lines = read_jsonl(folder / "metrics.jsonl")
    return {int(line["step"]): line["train/loss"] for line in lines if "train/loss" in line}


def main() -> None:
    """Print the table, and fail where a loss is not that of one device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--depth", type=int, default=110)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (num_ranks, words) in WAYS.items():
            found[name] = losses(num_ranks, words, options.depth, options.steps, Path(folder) / name)
    print(f"| step | {' | '.join(found)} |\n|{'---|' * (len(found) + 1)}")
    reference = found["one device"]
    for step in reference:
        print(f"| {step} | {' | '.join(f'{each[step]:.6f}' for each in found.values())} |")
    assert len(reference) >= options.steps - 1
    worst = max(abs(each[step] / reference[step] - 1) for each in found.values() for step in reference)
    print(f"\nlargest relative difference from one device: {worst:.1e}")
    if worst > 1e-4:
        raise SystemExit("the losses are not those of one device")


if __name__ == "__main__":
    main()
