"""Cut a model for stages of unequal speed and memory, with the shortest possible step. No jax.

Sources: Narayanan et al. 2019, PipeDream, section 3.1 (the slowest stage or link decides, by dynamic
programming); Park et al. 2020, HetPipe (memory by the number of microbatches in flight).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from operator import add

from shardtrain.errors.messages import problems_error
from shardtrain.pipeline.partition import counts as cut_by
from shardtrain.pipeline.partition import join_least
from shardtrain.pipeline.simulate import SimulatedTimes
from shardtrain.pipeline.stage_costs import StageCosts

MOST_CUTS = 3000
"""Up to this number all cuts are simulated; of more cuts only those that dynamic programming finds."""

SLACKS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5)
"""Factors by which the slowest stage may exceed the least possible time, for less time through all stages."""

GB = 10**9


class NoCut(ValueError):
    """No cut fits the memory of the stages; the message has the numbers of the nearest cut."""


@dataclass(frozen=True, kw_only=True)
class StageCut:
    """A cut and its predicted costs.

    Args:
      counts: blocks of each stage.
      simulated: the simulation of a step.
      busy_seconds: seconds of work of each stage, for one microbatch.
      memory_bytes: bytes of each device of each stage.
    """

    counts: tuple[int, ...]
    simulated: SimulatedTimes
    busy_seconds: tuple[float, ...]
    memory_bytes: tuple[float, ...]


def best_cut(costs: StageCosts) -> StageCut:
    """Return the cut with the shortest simulated step, among cuts that fit the memory.

    Up to `MOST_CUTS` cuts are all compared. Of more it compares the equal cut, and for each factor of
    `SLACKS` the cut with the least time of one microbatch through all stages, among cuts whose slowest stage
    or link takes at most this factor of the least possible time.

    Args:
      costs: the costs of blocks on these stages.

    Raises:
      NoCut: no cut fits the memory; the message has the numbers of the nearest cut.

    >>> from shardtrain.pipeline.schedule import make_table
    >>> from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts, StageDevices
    >>> blocks = [BlockCost(forward_flops=1, backward_flops=2)] * 8
    >>> devices = [StageDevices(flops_per_second=speed) for speed in (3, 1)]
    >>> table = make_table("1f1b", 2, 16)
    >>> best_cut(StageCosts(model=ModelCosts(blocks=blocks), devices=devices, table=table)).counts
    (6, 2)
    """
    sizes = (costs.num_blocks, costs.num_stages)
    if math.comb(sizes[0] - 1, sizes[1] - 1) <= MOST_CUTS:
        found = [counts for counts in _list_cuts(*sizes) if fits(costs, counts)]
    else:
        equal = tuple(cut_by("equal", *sizes))
        found = [*list_front_cuts(costs), *([equal] if fits(costs, equal) else [])]
    if not found:
        raise _make_no_fit_error(costs)
    return shortest_cut(costs, found)


def shortest_cut(costs: StageCosts, cuts: Iterable[tuple[int, ...]]) -> StageCut:
    """Return the cut with the shortest simulated step, whether it fits the memory or not."""
    best: tuple[float, SimulatedTimes, tuple[int, ...]] | None = None
    # the smallest bounds first, which end the search early
    for bound, counts in sorted((bound_seconds(costs, counts), counts) for counts in set(cuts)):
        if best is not None and bound >= best[0]:
            break
        found = costs.simulated(counts)
        if best is None or found.makespan < best[0]:
            best = found.makespan, found, counts
    assert best is not None
    _, simulated, counts = best
    groups = list(_iterate_groups(counts))
    return StageCut(
        counts=counts,
        simulated=simulated,
        busy_seconds=tuple(costs.busy_seconds(*group) for group in groups),
        memory_bytes=tuple(costs.memory_bytes(*group) for group in groups),
    )


def bound_seconds(costs: StageCosts, counts: Sequence[int]) -> float:
    """Return a lower bound of a step's seconds.

    A stage begins after a microbatch has passed all earlier stages, which do their backwards after its last
    one.
    """
    bound = ahead = 0.0
    for stage, begin, end in _iterate_groups(counts):
        times = costs.seconds(stage, begin, end)
        ahead += 2 * costs.transfer_seconds(begin, stage)
        own = costs.table.num_microbatches * sum(times.values())
        # all weight tasks of a stage may come before its last backward
        own -= (costs.table.num_microbatches * times["weight"]) if costs.table.has_weight else 0.0
        bound = max(bound, ahead + own)
        ahead += times["forward"] + times["backward"]
    return bound * (1 - 1e-12)


def _iterate_groups(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (stage, begin, end)."""
    ends = accumulate(counts, initial=0)
    return ((stage, begin, end) for stage, (begin, end) in enumerate(pairwise(ends)))


def _list_cuts(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *inner, num_blocks)))


def fits(costs: StageCosts, counts: Sequence[int]) -> bool:
    """Return whether a cut fits the memory of all stages."""
    return all(
        costs.memory_bytes(*group) <= costs.devices[group[0]].memory_bytes
        for group in _iterate_groups(counts)
    )


def list_front_cuts(costs: StageCosts) -> list[tuple[int, ...]]:
    """Return cuts that fit the memory, with a slower slowest stage but less time through all stages each.

    The first cut has the fastest possible slowest stage or link, by dynamic programming.
    """

    def slowest(stage: int, begin: int, end: int) -> float:
        if costs.memory_bytes(stage, begin, end) > costs.devices[stage].memory_bytes:
            return math.inf
        return max(costs.busy_seconds(stage, begin, end), costs.transfer_seconds(begin, stage))

    def through(limit: float) -> Callable[[int, int, int], float]:
        def seconds(stage: int, begin: int, end: int) -> float:
            if slowest(stage, begin, end) > limit:
                return math.inf
            return costs.busy_seconds(stage, begin, end) + 2 * costs.transfer_seconds(begin, stage)

        return seconds

    sizes = (costs.num_blocks, costs.num_stages)
    least, _ = join_least(*sizes, slowest, max)
    if math.isinf(least):
        return []
    return [join_least(*sizes, through(least * slack), add)[1] for slack in SLACKS]


def _make_no_fit_error(costs: StageCosts) -> NoCut:
    """Return the error for the cut that comes nearest to fitting the memory."""

    def ratio(stage: int, begin: int, end: int) -> float:
        return costs.memory_bytes(stage, begin, end) / costs.devices[stage].memory_bytes

    most, counts = join_least(costs.num_blocks, costs.num_stages, ratio, max)
    problems = []
    for stage, begin, end in _iterate_groups(counts):
        needs, has = costs.memory_bytes(stage, begin, end), costs.devices[stage].memory_bytes
        if needs > has:
            problems.append(
                f"stage {stage} has {has / GB:.3g} GB a device and needs {needs / GB:.3g} GB"
                f" ({_format_count(end - begin, 'block')},"
                f" {_format_count(costs.live[stage], 'microbatch')} in flight)"
            )
    problems.append(
        f"the cut that comes nearest is {','.join(map(str, counts))}, which needs {most:.2f} times the"
        " memory; use more stages, devices with more memory, or smaller microbatches (a larger accumulate)"
    )
    asked = f"no cut of {costs.num_blocks} blocks fits {costs.num_stages} stages"
    return NoCut(str(problems_error(asked, problems)))


def _format_count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
