"""Plan unequal islands: the share of the batch of each, and the best layout for its devices.

Next: `search.py`, the layouts of one kind of islands; `report/plan.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.options import Across
from shardtrain.plan.devices import GB
from shardtrain.plan.island_exchange import (
    EXTRA_SHARE,
    NUMS_PROGRAMS,
    EarlyGradients,
    IslandStepTimes,
    MergeBytes,
    SyncCosts,
    choose_fastest,
    compute_join,
    make_merge_bytes,
    own_copies,
    plan_early,
)
from shardtrain.plan.machine import Machine, make_machine
from shardtrain.plan.predict import steps
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import Plan, RankedChoice, plan_named_layouts, search
from shardtrain.plan.space import Space, nearest_text
from shardtrain.plan.step_times import StepTimes, compute_step_times
from shardtrain.plan.subject import Subject
from shardtrain.sharding.shares import shares

ROUNDS = 4
"""Number of times that rows are split by the speeds that were predicted for the last split."""


@dataclass(frozen=True, kw_only=True)
class KindPlan:
    """The plan of the islands of one kind.

    Args:
      kind: the kind.
      subject: the subject, with the rows of one of its islands.
      machine: its devices.
      rows: rows of the batch for each of its islands.
      plan: the ranked choices for one island.
      named: name of a published method -> its choice, or None if it cannot run.
    """

    kind: IslandKind
    subject: Subject
    machine: Machine
    rows: int
    plan: Plan
    named: Mapping[str, RankedChoice | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The plan of a cluster.

    Args:
      kinds: the plan of each kind of islands.
      shares: rows of each island.
      join_seconds: mean seconds that a step waits until islands are synchronised.
      synchronisation: how islands are synchronised.
      link_bytes_per_second: rate at which an island sends to others. inf means that no link is given.
      merges: synchronisation -> bytes that an island sends. None means that there is one island.
      early: steps with gradients in one program and in several, for a mean of gradients over a link; () if
        several programs cost more than sending, or if there is no link.
      given_programs: number of these programs that the run sets. None means that it is chosen.
    """

    kinds: tuple[KindPlan, ...]
    shares: tuple[int, ...]
    join_seconds: float
    synchronisation: Synchronisation = Synchronisation()
    link_bytes_per_second: float = math.inf
    merges: Callable[[Synchronisation], MergeBytes] | None = None
    early: tuple[EarlyGradients, ...] = ()
    given_programs: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the best choice fits on every kind of islands."""
        return all(each.plan.ranked and each.plan.ranked[0].fits for each in self.kinds)

    @property
    def seconds(self) -> float:
        """Seconds of a step: of the slowest island, and until islands are synchronised."""
        return self.island_seconds + self.join_seconds

    @property
    def island_seconds(self) -> float:
        """Seconds of a step of the slowest island, without synchronisation."""
        return self.slowest.plan.ranked[0].prediction.seconds.total

    @property
    def slowest(self) -> KindPlan:
        """The slowest kind of islands, for which the others wait."""
        with_rows = (each for each in self.kinds if each.rows)
        return max(with_rows, key=lambda each: each.plan.ranked[0].prediction.seconds.total)

    @property
    def num_programs(self) -> int:
        """Largest number of programs in which islands compute their gradients."""
        return choose_fastest(self.early).num_programs if self.early else self.given_programs or 1

    def estimate_join(self, synchronisation: Synchronisation) -> SyncCosts:
        """Return the costs of another synchronisation, with the same layouts."""
        assert self.merges is not None
        merges, rate = self.merges(synchronisation), self.link_bytes_per_second
        found = compute_join(synchronisation, merges, rate, self.island_seconds)
        if not (self.early and synchronisation.is_mean):
            return found
        # sending while later programs compute, minus the costs of several programs
        return found._replace(seconds=choose_fastest(self.early).seconds - self.island_seconds)


class ReplicaPlanner:
    """Plans islands of a cluster as replicas; each number of rows on a kind of islands is searched once.

    Args:
      subjects: the model, its loss, optimizer and batch, for each kind of islands.
      cluster: the islands; each kind names its devices.
      space: the choices to search. None means all.
      most: number of choices to return for each kind.
      synchronisation: how islands are synchronised.
      across: dtype and buckets of what they send.

    Raises:
      ValueError: a kind names no devices or unknown ones.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        cluster: Cluster,
        space: Space | None = None,
        most: int = 20,
        synchronisation: Synchronisation = Synchronisation(),
        across: Across = Across(),
    ) -> None:
        self.subjects, self.cluster, self.space = subjects, cluster, space or Space()
        self.synchronisation, self._most, self._across = synchronisation, most, across
        self.machines = [
            _make_machine(kind, subject.in_float32)
            for kind, subject in zip(cluster.islands, subjects, strict=True)
        ]
        link = cluster.link_gb_per_second
        self.link_bytes_per_second = math.inf if link is None else link * GB
        self._search = cache(self._search_kind)
        self._merges = cache(lambda number: make_merge_bytes(subjects[0], number, across))

    @property
    def speeds(self) -> list[float]:
        """Flops per second of an island of each kind."""
        kinds = zip(self.cluster.islands, self.machines, strict=True)
        return [machine.rates.flops_per_second * (kind.devices or 1) for kind, machine in kinds]

    def plan(self, counts: Sequence[int]) -> ClusterPlan:
        """Return the plan of some islands, without early gradients and published methods.

        Args:
          counts: number of islands of each kind, from 0.

        Raises:
          ValueError: several islands are planned, and nothing runs on one of them.
        """
        rows, speeds = self.subjects[0].batch_rows, self.speeds
        used = [kind for kind, count in enumerate(counts) if count]
        if sum(counts) == 1:
            kinds = (self._plan_kind(used[0], 1, rows, several=False),)
            return ClusterPlan(kinds=kinds, shares=(rows,), join_seconds=0.0)
        plans: list[ClusterPlan] = []
        for _ in range(ROUNDS):
            split = shares(rows, [speeds[kind] for kind in used for _ in range(counts[kind])])
            firsts = accumulate((counts[kind] for kind in used), initial=0)
            kinds = tuple(
                # islands of a kind may differ by one row; the plan is for the most rows
                self._plan_kind(kind, counts[kind], max(split[first : first + counts[kind]]), several=True)
                for kind, first in zip(used, firsts, strict=False)
            )
            found = ClusterPlan(
                kinds=kinds,
                shares=tuple(split),
                join_seconds=0.0,
                synchronisation=self.synchronisation,
                link_bytes_per_second=self.link_bytes_per_second,
                merges=self._merges(sum(counts)),
            )
            join_seconds = found.estimate_join(self.synchronisation).seconds
            plans.append(replace(found, join_seconds=join_seconds))
            for kind, speed in zip(used, _update_speeds(kinds, [speeds[kind] for kind in used]), strict=True):
                speeds[kind] = speed
        return min(plans, key=lambda each: (not each.fits, each.seconds))

    def plan_all(self) -> ClusterPlan:
        """Return the finished plan of all islands.

        Raises:
          ValueError: nothing runs on one of several kinds.
        """
        return self.finish(self.plan([kind.count for kind in self.cluster.islands]))

    def finish(self, plan: ClusterPlan) -> ClusterPlan:
        """Return a plan with the steps of early gradients, and the choices of published methods."""
        if len(plan.shares) > 1:
            plan = _add_early(plan, self.subjects[0], self._across)
        space, kinds = self._space(len(plan.shares) > 1), []
        for each in plan.kinds:
            named = plan_named_layouts(each.subject, each.machine, each.kind.devices or 1, space)
            kinds.append(replace(each, named=named))
        return replace(plan, kinds=tuple(kinds))

    def _space(self, several: bool) -> Space:
        if not several:
            return self.space
        # sections of a strategy have no schedule of their own
        copies = own_copies(self.synchronisation)
        return replace(self.space, schedules=self.space.schedules[:1], own_copies=copies)

    def _plan_kind(self, number: int, count: int, rows: int, *, several: bool) -> KindPlan:
        kind = replace(self.cluster.islands[number], count=count)
        subject, plan = self._search(number, rows, several)
        if several and not plan.ranked:
            raise ValueError(
                f"nothing runs on islands of kind {kind.kind!r}: {next(iter(plan.refused.values()))}\n"
                + plan.nearest
            )
        return KindPlan(kind=kind, subject=subject, machine=self.machines[number], rows=rows, plan=plan)

    def _search_kind(self, number: int, rows: int, several: bool) -> tuple[Subject, Plan]:
        subject, devices = self.subjects[number], self.cluster.islands[number].devices or 1
        subject, space = subject.share(rows) if several else subject, self._space(several)
        plan = search(subject, self.machines[number], devices, space, self._most)
        nearest = "" if plan.ranked else nearest_text(subject, devices, space)
        return subject, replace(plan, nearest=nearest)


def _add_early(plan: ClusterPlan, subject: Subject, across: Across) -> ClusterPlan:
    """Add steps with gradients in several programs, or in the given number of them, and use the fastest."""
    sending, alone, given = plan.join_seconds, plan.island_seconds, across.gradient_parts
    plan = replace(plan, given_programs=given)
    if not plan.synchronisation.is_mean or math.isinf(plan.link_bytes_per_second):
        return plan
    if given is None and sending <= EXTRA_SHARE * alone:
        return plan
    first, slowest = plan.kinds[0], plan.slowest.plan.ranked[0]
    update = slowest.prediction.seconds.update
    step = IslandStepTimes(alone - update, update, slowest.choice.accumulate)
    choice = first.plan.ranked[0].choice
    nums = NUMS_PROGRAMS if given is None else (given,)
    early = plan_early(subject, choice, first.kind.devices or 1, across, step, sending, nums)
    return replace(plan, early=early, join_seconds=choose_fastest(early).seconds - alone)


def estimate_times(plan: ClusterPlan, choices: Sequence[Choice] | None = None) -> list[StepTimes]:
    """Return the durations of the parts of a step, for each kind of islands with rows.

    Args:
      plan: the plan.
      choices: the choice for each kind. None means the best ones.

    Raises:
      ValueError: a choice does not fit the model or the devices.
    """
    if choices is None:
        choices = [each.plan.ranked[0].choice for each in plan.kinds]
    found = []
    for each, choice in zip(plan.kinds, choices, strict=True):
        if not each.rows:
            continue
        (step,) = steps(each.subject, each.machine, each.kind.devices or 1, [choice])
        found.append(compute_step_times(step, each.machine))
    return found


def _update_speeds(kinds: Sequence[KindPlan], before: Sequence[float]) -> list[float]:
    """Return rows per second of each kind; kinds without rows keep their ratio to the others."""
    new = [each.rows / each.plan.ranked[0].prediction.seconds.total for each in kinds]
    ratio = sum(new) / sum(speed for speed, each in zip(before, kinds, strict=True) if each.rows)
    return [rows or ratio * speed for rows, speed in zip(new, before, strict=True)]


def _make_machine(kind: IslandKind, in_float32: bool) -> Machine:
    if kind.device is None or kind.devices is None:
        raise ValueError(
            f"islands of kind {kind.kind!r} do not name their devices; give devices = NUMBER and"
            ' device = { name = "NVIDIA A100-SXM4-80GB" }, or measured rates (shardtrain calibrate)'
        )
    return make_machine(kind.device, kind.devices, in_float32=in_float32, nodes=kind.nodes)
