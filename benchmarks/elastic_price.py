"""The price of a step of elastic islands: the same toy step, its gradients summed by them and by MPI.

    python benchmarks/elastic_price.py [--megabytes 1 4 16] [--milliseconds 5 50]

Three processes on this host. A step waits for some time, as if a device computed; then gradients are
summed. One row of a batch is a slot, one for each island. Each round launches all
sides in another order. Islands: by TLS over TCP, as on several hosts, also in 8 bits, and by local sockets.
MPI: an allreduce of MPICH over TCP (`UCX_TLS=tcp`) and through shared memory, and nothing else of a step of
`train`, so the ratio is an upper bound. With fewer cores than islands they wait for each other's encryption
too. Figures: docs/elastic.md. Over a slow link that the islands share, as root:

    unshare --net sh -c 'ip link set lo up; tc qdisc add dev lo root tbf rate 3gbit burst 1mb latency 100ms;
        python benchmarks/elastic_price.py --no-mpi --megabytes 4'
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import tyro
from paired import markdown, spread, take_turns

ISLANDS, STEPS, FIRST, ROUNDS = 3, 40, 10, 5
"""Islands; steps of a launch, and the first ones, which are not measured; launches of each side."""
ISLAND_SIDES = {"islands, TLS": "tls", "islands, TLS, int8": "int8", "islands, local": "islands"}
TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}


class Toy:
    """A step that takes some time."""

    def __init__(self, megabytes: str, milliseconds: str, codecs: str = "") -> None:
        self._seconds = float(milliseconds) / 1000
        self.gradients = np.ones(round(float(megabytes) * (1 << 18)), np.float32)
        self.state = np.zeros((), np.int64)
        self.codecs = codecs
        self.began: list[float] = []

    def compute(self, step: int, slots: Sequence[int]) -> np.ndarray:
        self.began.append(time.perf_counter())
        time.sleep(self._seconds * len(slots))
        return self.gradients * np.float32(len(slots))

    def apply(self, step: int, total: np.ndarray) -> None:
        # 8 bits round
        np.testing.assert_allclose(total[[0, -1]], ISLANDS, rtol=0.02 if self.codecs else 0)
        self.state = np.int64(step + 1)

    def save(self, folder: Path) -> None:
        np.save(folder / "state", self.state)

    def restore(self, folder: Path) -> None:
        self.state = np.load(folder / "state.npy")


def run_elastic(side: str, folder: str, megabytes: str, milliseconds: str) -> None:
    """Be one island; all wait for the others, and then take equal shares."""
    from shardtrain.elastic import sockets
    from shardtrain.elastic.island import ElasticIsland
    from shardtrain.elastic.member import Membership

    if side in ("tls", "int8"):
        sockets.listen_local = lambda name: None
    toy = Toy(megabytes, milliseconds, "int8" if side == "int8" else "")
    membership = Membership(num_slots=ISLANDS, num_steps=STEPS, min_members=ISLANDS)
    island = ElasticIsland(Path(folder), toy, membership, host="127.0.0.1", report=lambda line: None)
    # as MPI has it: one slot each, whatever is measured
    island._measure = lambda slots_per_second: None
    with island:
        for _ in island:
            pass
    show(toy)


def run_mpi(megabytes: str, milliseconds: str) -> None:
    """Be one rank."""
    from mpi4py import MPI

    toy = Toy(megabytes, milliseconds)
    for step in range(STEPS):
        total = toy.compute(step, (0,))
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, total)
        toy.apply(step, total)
    show(toy)


def show(toy: Toy) -> None:
    steps = [end - begin for begin, end in pairwise(toy.began)][FIRST:]
    print(median(steps))


def launch(side: str, megabytes: float, milliseconds: float) -> float:
    """Return the median seconds of a step of a launch."""
    sizes, this = (str(megabytes), str(milliseconds)), (sys.executable, __file__)
    if side in ISLAND_SIDES:
        with TemporaryDirectory() as folder:
            words = [*this, "island", ISLAND_SIDES[side], folder, *sizes]
            islands = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(ISLANDS)]
            lines = [island.communicate()[0] for island in islands]
    else:
        env = os.environ | {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"} | (TCP if side == "MPI, TCP" else {})
        words = ["mpiexec", "-n", str(ISLANDS), *this, "rank", *sizes]
        lines = subprocess.check_output(words, env=env, text=True).splitlines()
    return median(map(float, lines))


def main(
    megabytes: tuple[float, ...] = (1, 4, 16), milliseconds: tuple[float, ...] = (5, 50), mpi: bool = True
) -> None:
    """Print a row for each size of gradients and time of a step's computation.

    Args:
      mpi: measure MPI too, for which a network namespace of its own has no device.
    """
    pairs = {"islands, TLS": "MPI, TCP", "islands, local": "MPI, memory"}
    pairs, rows = pairs if mpi else {"islands, TLS, int8": "islands, TLS"}, []
    sides = list(dict.fromkeys([*ISLAND_SIDES, *pairs.values()]))
    for computed, size in product(milliseconds, megabytes):
        calls = {side: partial(launch, side, size, computed) for side in sides}
        seconds = take_turns(calls, ROUNDS, 0)
        shown = [f"{1000 * median(seconds[side]):.1f}" for side in sides]
        for side, other in pairs.items():
            shown.append(str(spread([x / y for x, y in zip(seconds[side], seconds[other], strict=True)])))
        rows.append([f"{computed:g}", f"{size:g}", *shown])
    ratios = [f"{side} / {other}" for side, other in pairs.items()]
    print(markdown(["ms computed", "MB", *[f"{side}, ms" for side in sides], *ratios], rows))


if __name__ == "__main__":
    roles = {"island": run_elastic, "rank": run_mpi}
    if sys.argv[1:] and sys.argv[1] in roles:
        roles[sys.argv[1]](*sys.argv[2:])
    else:
        tyro.cli(main, description=__doc__)
