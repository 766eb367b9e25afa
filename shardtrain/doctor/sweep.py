"""The measurement `--sweep`: collective operations over many sizes, by the bridge and by MPI alone.

Both run on the same ranks in the same rounds, so other load slows both. Next: `sweep_sides.py`, which has
the operations, and `sweep_table.py`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, rate_text, time_text
from shardtrain.doctor.sweep_sizes import LARGEST_BYTES, sizes
from shardtrain.report.quantities import bytes_text

WARM_UP_ROUNDS = 2
FEWEST_ROUNDS, MOST_ROUNDS = 7, 30
BUDGET_SECONDS = 0.5
"""One operation at one size is repeated as often as fits into this time, within these limits."""


def num_rounds(round_seconds: float) -> int:
    """Return how often to repeat a round of this duration.

    >>> num_rounds(1e-4), num_rounds(0.025), num_rounds(2.0)
    (30, 20, 7)
    """
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, int(BUDGET_SECONDS / round_seconds)))


def sweep_check(largest_bytes: int) -> Check:
    """Return the sweep as a check, which the doctor runs with its time limit."""
    return Check(
        about="collective operations over sizes, by the bridge and by MPI alone",
        collect=partial(collect, largest_bytes=largest_bytes),
        evaluate=evaluate,
        limit_seconds=900.0,
        if_it_hangs="messages do not pass: run `shardtrain doctor` on the same ranks, without --sweep",
    )


def collect(context: RankContext, largest_bytes: int = LARGEST_BYTES) -> Facts:
    """Measure every operation at every size; all ranks together.

    Returns:
      `measurements`, on rank 0 only: the durations are those of the slowest rank, so all ranks have the same.
    """
    from shardtrain.doctor.sweep_sides import SweepSides

    # a communicator of its own, so that no other message interferes
    comm = context.comm.Dup()
    sides = SweepSides(comm)
    measurements = [
        measure(comm, operation, num_bytes, make(num_bytes))
        for operation, make in sides.operations.items()
        for num_bytes in sizes(largest_bytes)
    ]
    comm.Barrier()
    sides.close()
    return {"measurements": measurements if context.rank == 0 else []}


def measure(comm: Any, operation: str, num_bytes: int, sides: Any) -> Facts:
    """Measure one operation at one size, by MPI alone and, if it has one, by the bridge.

    Args:
      comm: the ranks.
      operation: its name in the table.
      num_bytes: the size that was asked for.
      sides: from `SweepSides.operations`.

    Returns:
      `operation`, `asked_bytes`, `bytes` (size of the array that a rank ends up with), `rounds`,
      `mpi_seconds`, `bridge_seconds` and `ratio` (medians over rounds; None without a bridge).

    Raises:
      RuntimeError: the bridge, or MPI, returned wrong values on a rank.
    """
    calls = {"mpi": sides.mpi} if sides.bridge is None else {"mpi": sides.mpi, "bridge": sides.bridge}
    # 1. every rank knows of a wrong result on any: none continues alone
    if wrong := comm.allreduce([side for side, call in calls.items() if not sides.is_right(call())]):
        raise RuntimeError(
            f"{operation} of {num_bytes} bytes: wrong values by {', '.join(sorted(set(wrong)))}"
        )
    # 2. warm up, and choose a number of rounds that is the same on all ranks
    warm_up = [one_round(comm, calls, turn) for turn in range(WARM_UP_ROUNDS)]
    rounds = num_rounds(max(sum(found.values()) for found in warm_up))
    # 3. both sides in every round, in turns first
    found = [one_round(comm, calls, turn) for turn in range(rounds)]
    has_bridge = sides.bridge is not None
    return {
        "operation": operation,
        "asked_bytes": num_bytes,
        "bytes": sides.num_bytes,
        "rounds": rounds,
        "mpi_seconds": median(one["mpi"] for one in found),
        "bridge_seconds": median(one["bridge"] for one in found) if has_bridge else None,
        "ratio": median(one["bridge"] / one["mpi"] for one in found) if has_bridge else None,
    }


def one_round(comm: Any, calls: Mapping[str, Callable[[], Any]], turn: int) -> dict[str, float]:
    """Return side -> the seconds of one call, from a barrier to the end on the last rank."""
    order = list(calls)[:: 1 if turn % 2 == 0 else -1]
    return {side: _timed(comm, calls[side]) for side in order}


def _timed(comm: Any, call: Callable[[], Any]) -> float:
    from shardtrain.islands.bridge import MPI

    comm.Barrier()
    began = time.perf_counter()
    call()
    return comm.allreduce(time.perf_counter() - began, MPI.MAX)


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return a row for each operation: the smallest and the largest array."""
    measurements = [one for rank in all_facts for one in rank.facts["measurements"]]
    by_operation: dict[str, list[Facts]] = {}
    for one in measurements:
        by_operation.setdefault(one["operation"], []).append(one)
    return [
        Row(check="sweep", item=operation, finding=f"{_finding(found[0])}; {_finding(found[-1])}")
        for operation, found in by_operation.items()
    ]


def _finding(one: Facts) -> str:
    seconds = one["mpi_seconds"]
    text = f"{bytes_text(one['bytes'])} by MPI in {time_text(seconds)} ({rate_text(one['bytes'] / seconds)})"
    if one["ratio"] is None:
        return text
    return f"{text}, by the bridge in {time_text(one['bridge_seconds'])} ({one['ratio']:.2f} times)"
