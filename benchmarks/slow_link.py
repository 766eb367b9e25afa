"""Ways to add up the gradients of four islands on two hosts, over a slow link between them (S-Caffe).

    python benchmarks/slow_link.py [--steps 40]

Hosts are network namespaces of this machine (tests/faults/network.py), whose links traffic control limits;
both train the model of examples/gpt_text.py. Needs Linux, and root or user namespaces.
"""

import sys
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import tyro
from paired import markdown, take_turns
from ranks import ROOT, train

sys.path.insert(0, str(ROOT / "tests" / "faults"))
from network import Hosts  # pyright: ignore[reportMissingImports]

WAYS = ("root", "all_reduce", "hierarchical")
"""Values of --reduce."""

NOT_STEPS = ("seconds/save", "seconds/evaluation")
MEGABITS, ROUNDS = "100", 3
"""What the link of a host lets through in a second; in each round all ways run in turn."""


def measure(hosts: Any, reduce: str, steps: int, root: str) -> tuple[float, float, float]:
    """Return the median seconds of a step, the part that waits for other islands, and the last loss."""
    fixed = "--log-every 1 --evaluate-every None --sinks jsonl --cpu-devices 1"
    words = ("--reduce", reduce, "--steps", steps, *fixed.split())
    _, lines = train(
        "examples/gpt_text.py",
        Path(mkdtemp(dir=root)),
        *words,
        launch=("--hosts", ",".join(f"{name}:2" for name in hosts.names)),
        before=hosts.command(0, []),
        HYDRA_LAUNCHER="ssh",
        HYDRA_LAUNCHER_EXEC=str(hosts.remote),
        # the hosts share one machine's memory, which MPI may use within a host only
        UCX_TLS="tcp,self",
        UCX_NET_DEVICES="eth0",
    )
    timed = [line for line in lines if line["step"] > 10]
    kinds = [name for name in timed[0] if name.startswith("seconds/") and name not in NOT_STEPS]
    seconds = median(sum(line[kind] for kind in kinds) for line in timed)
    return seconds, median(line["seconds/islands"] for line in timed) / seconds, lines[-1]["train/loss"]


def main(steps: int = 40) -> None:
    """Print a row for each way; the first ten steps of a run do not count."""
    with TemporaryDirectory() as name, Hosts(2, Path(name)) as hosts:
        if hosts.forbidden:
            raise SystemExit(f"network namespaces cannot be made here: {hosts.forbidden}")
        for host in range(2):
            hosts.turn(host, "limit", MEGABITS)
        found = take_turns({way: partial(measure, hosts, way, steps, name) for way in WAYS}, ROUNDS, 0)
    rows = []
    for way, runs in found.items():
        of_rounds = [run[0] / first[0] for run, first in zip(runs, found[WAYS[0]], strict=True)]
        ratios = ", ".join(f"{ratio:.2f}" for ratio in of_rounds)
        seconds, waiting, loss = (median(values) for values in zip(*runs, strict=True))
        rows.append((way, f"{seconds:.3f}", ratios, f"{waiting:.0%}", f"{loss:.5f}"))
    print(markdown(["--reduce", "s a step", "ratio in each round", "waiting", "last loss"], rows))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
