"""Ways to add up the gradients of four islands on two hosts, over a slow link between them (S-Caffe).

    python benchmarks/slow_link.py [--megabits 100] [--steps 40]

Hosts are network namespaces of this machine (tests/faults/network.py), whose links traffic control limits;
both train the model of examples/gpt_text.py. Needs Linux, and root or user namespaces.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import tyro
from paired import markdown
from ranks import ROOT, run_command

from shardtrain.report.sinks.json_lines import read_jsonl

sys.path.insert(0, str(ROOT / "tests" / "faults"))
from network import Hosts  # pyright: ignore[reportMissingImports]

WAYS = ("root", "all_reduce", "hierarchical")
"""Values of --reduce."""

NOT_STEPS = ("seconds/save", "seconds/evaluation")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      megabits: that the link of a host lets through in a second.
      steps: of each run; the first ten do not count.
      rounds: in each all ways run in turn.
    """

    megabits: int = 100
    steps: int = 40
    rounds: int = 3


def train(hosts: Any, reduce: str, steps: int, folder: Path) -> tuple[float, float, float]:
    """Return the median seconds of a step, the part that waits for other islands, and the last loss."""
    places = ",".join(f"{name}:2" for name in hosts.names)
    fixed = {"reduce": reduce, "steps": steps, "log-every": 1, "evaluate-every": None, "sinks": "jsonl"}
    run_command(
        *("launch", "--hosts", places, "--", "train", "examples/gpt_text.py", "--cpu-devices", 1),
        *(word for name, value in fixed.items() for word in (f"--{name}", value)),
        *("--run-dir", folder),
        before=hosts.command(0, []),
        HYDRA_LAUNCHER="ssh",
        HYDRA_LAUNCHER_EXEC=str(hosts.remote),
        # the hosts share one machine's memory, which MPI may use within a host only
        UCX_TLS="tcp,self",
        UCX_NET_DEVICES="eth0",
    )
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "train/loss" in line]
    timed = [line for line in lines if line["step"] > 10]
    kinds = [name for name in timed[0] if name.startswith("seconds/") and name not in NOT_STEPS]
    seconds = median(sum(line[kind] for kind in kinds) for line in timed)
    return seconds, median(line["seconds/islands"] for line in timed) / seconds, lines[-1]["train/loss"]


def main(options: Options) -> None:
    """Print a row for each way."""
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with TemporaryDirectory() as name, Hosts(2, Path(name)) as hosts:
        if hosts.forbidden:
            raise SystemExit(f"network namespaces cannot be made here: {hosts.forbidden}")
        for host in range(2):
            hosts.turn(host, "limit", str(options.megabits))
        for number in range(options.rounds):
            for way in WAYS:
                found[way].append(train(hosts, way, options.steps, Path(name) / f"{way}{number}"))
                print(way, *found[way][-1], flush=True)
    rows = []
    for way, runs in found.items():
        of_rounds = [run[0] / first[0] for run, first in zip(runs, found[WAYS[0]], strict=True)]
        ratios = ", ".join(f"{ratio:.2f}" for ratio in of_rounds)
        seconds, waiting, loss = (median(values) for values in zip(*runs, strict=True))
        rows.append((way, f"{seconds:.3f}", ratios, f"{waiting:.0%}", f"{loss:.5f}"))
    print(markdown(["--reduce", "s a step", "ratio in each round", "waiting", "last loss"], rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
