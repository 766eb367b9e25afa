"""Plan unequal islands: the rows of each, and the layout that suits its devices. Next: `report/plan.py`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.options import Across
from shardtrain.plan.devices import GB
from shardtrain.plan.island_exchange import (
    EXTRA_SHARE,
    NUMS_PROGRAMS,
    EarlyGradients,
    Join,
    MergeBytes,
    StepOfIsland,
    fastest,
    join,
    make_merge_bytes,
    own_copies,
    plan_early,
)
from shardtrain.plan.machine import Machine, make_machine
from shardtrain.plan.predict import steps
from shardtrain.plan.prediction import Choice
from shardtrain.plan.search import Plan, Ranked, plan_named_layouts, search
from shardtrain.plan.space import Space, nearest_text
from shardtrain.plan.step_times import StepTimes, step_times
from shardtrain.plan.subject import Subject
from shardtrain.sharding.shares import shares

ROUNDS = 4
"""How often rows are given anew by the speeds that were predicted for those of the last round."""


@dataclass(frozen=True, kw_only=True)
class KindPlan:
    """The plan of the islands of one kind.

    Args:
      kind: the kind.
      machine: its devices.
      rows: of the batch, for each of its islands.
      plan: the ways to run a step on one of them.
      named: name -> the layout that others would take there; None: it cannot run.
    """

    kind: IslandKind
    machine: Machine
    rows: int
    plan: Plan
    named: Mapping[str, Ranked | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """The plan of a cluster.

    Args:
      kinds: of each kind of islands.
      shares: rows of each island.
      join_seconds: that a step waits, on average, until islands are joined.
      synchronisation: how they are joined.
      link_bytes_per_second: that an island sends to others; inf: no link is given.
      merges: synchronisation -> what an island sends by it; None: there is one island.
      early: of a mean of gradients over a link, the step with them in one program and in several; () where
        sending takes less than several programs cost, or there is no link.
      given_programs: the number of these programs that the run gives, which stands; None: it is chosen.
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
        """Whether something runs on every kind, and the best fits its devices."""
        return all(each.plan.ranked and each.plan.ranked[0].fits for each in self.kinds)

    @property
    def seconds(self) -> float:
        """Seconds of a step: of the slowest island, and until islands are joined."""
        return self.island_seconds + self.join_seconds

    @property
    def island_seconds(self) -> float:
        """Seconds of a step of the slowest island alone."""
        return max(each.plan.ranked[0].prediction.seconds.total for each in self.kinds if each.rows)

    @property
    def slowest(self) -> KindPlan:
        """The kind of the islands for which the others wait."""
        with_rows = (each for each in self.kinds if each.rows)
        return max(with_rows, key=lambda each: each.plan.ranked[0].prediction.seconds.total)

    @property
    def num_programs(self) -> int:
        """Programs in which islands compute their gradients, at most."""
        return fastest(self.early).num_programs if self.early else self.given_programs or 1

    def planned(self, subjects: Sequence[Subject]) -> list[tuple[KindPlan, Subject]]:
        """Return each kind with what was planned for it: the subject with the rows of one of its islands."""
        several = len(self.shares) > 1
        kinds = zip(self.kinds, subjects, strict=True)
        return [(each, subject.share(each.rows) if several else subject) for each, subject in kinds]

    def estimate_join(self, synchronisation: Synchronisation) -> Join:
        """Return what another way of joining the islands would cost; layouts stay."""
        assert self.merges is not None
        merges, rate = self.merges(synchronisation), self.link_bytes_per_second
        found = join(synchronisation, merges, rate, self.island_seconds)
        if not (self.early and synchronisation.is_mean):
            return found
        # what is sent while later programs compute, less what these programs cost
        waited = fastest(self.early).seconds - self.island_seconds
        return found._replace(seconds=waited, hidden_seconds=found.seconds - waited)


def plan_cluster(
    subjects: Sequence[Subject],
    cluster: Cluster,
    space: Space | None = None,
    most: int = 20,
    synchronisation: Synchronisation = Synchronisation(),
    across: Across = Across(),
) -> ClusterPlan:
    """Plan the islands of a cluster, each a replica with its share of the batch.

    Args:
      subjects: of each kind of islands the model, its loss, optimizer and batch.
      cluster: the islands; each kind says its devices.
      space: what may be chosen; None: everything.
      most: how many ways of each kind to return.
      synchronisation: how islands are joined.
      across: dtype and buckets of what they send.

    Raises:
      ValueError: a kind does not say its devices, they are not known, or nothing can run on one.
    """
    machines = [
        _machine(kind, subject.in_float32) for kind, subject in zip(cluster.islands, subjects, strict=True)
    ]
    space = space or Space()
    if len(cluster.of_islands) > 1:
        # sections of a strategy have no schedule of their own
        space = replace(space, schedules=space.schedules[:1], own_copies=own_copies(synchronisation))
    subject, islands = subjects[0], cluster.of_islands
    if len(islands) == 1:
        devices = islands[0].devices or 1
        plan = search(subject, machines[0], devices, space, most)
        if not plan.ranked:
            plan = replace(plan, nearest=nearest_text(subject, devices, space))
        kind = KindPlan(kind=islands[0], machine=machines[0], rows=subject.batch_rows, plan=plan)
        one = ClusterPlan(kinds=(kind,), shares=(subject.batch_rows,), join_seconds=0.0)
        return _add_named(one, subjects, space)
    speeds = [
        machine.rates.flops_per_second * (kind.devices or 1)
        for kind, machine in zip(cluster.islands, machines, strict=True)
    ]
    best: ClusterPlan | None = None
    joined = _Joined(synchronisation, make_merge_bytes(subject, len(islands), across))
    for _ in range(ROUNDS):
        found = _apply_speeds(subjects, cluster, machines, speeds, space, most, joined)
        if best is None or (not found.fits, found.seconds) < (not best.fits, best.seconds):
            best = found
        speeds = _speeds(found, speeds)
    assert best is not None
    return _add_named(_add_early(best, subject, across), subjects, space)


class _Joined(NamedTuple):
    """How islands are joined, and what they send by each way."""

    by: Synchronisation
    merges: Callable[[Synchronisation], MergeBytes]


def _add_early(plan: ClusterPlan, subject: Subject, across: Across) -> ClusterPlan:
    """Add the step with gradients in the given number of programs, or in several, and take the fastest."""
    sending, alone, given = plan.join_seconds, plan.island_seconds, across.gradient_parts
    plan = replace(plan, given_programs=given)
    if not plan.synchronisation.is_mean or math.isinf(plan.link_bytes_per_second):
        return plan
    if given is None and sending <= EXTRA_SHARE * alone:
        return plan
    first, slowest = plan.kinds[0], plan.slowest.plan.ranked[0]
    update = slowest.prediction.seconds.update
    step = StepOfIsland(alone - update, update, slowest.choice.accumulate)
    choice = first.plan.ranked[0].choice
    nums = NUMS_PROGRAMS if given is None else (given,)
    early = plan_early(subject, choice, first.kind.devices or 1, across, step, sending, nums)
    return replace(plan, early=early, join_seconds=fastest(early).seconds - alone)


def _add_named(plan: ClusterPlan, subjects: Sequence[Subject], space: Space) -> ClusterPlan:
    """Add the layouts of others for the rows of each kind."""
    kinds = []
    for each, subject in plan.planned(subjects):
        named = plan_named_layouts(subject, each.machine, each.kind.devices or 1, space)
        kinds.append(replace(each, named=named))
    return replace(plan, kinds=tuple(kinds))


def estimate_times(
    plan: ClusterPlan, subjects: Sequence[Subject], choices: Sequence[Choice] | None = None
) -> list[StepTimes]:
    """Return the durations of the parts of a step, for each kind of islands that has rows.

    Args:
      plan: the plan.
      subjects: those that it was made of.
      choices: of each kind; None: the best ones.

    Raises:
      ValueError: a choice does not fit the model or the devices.
    """
    if choices is None:
        choices = [each.plan.ranked[0].choice for each in plan.kinds]
    found = []
    for (each, subject), choice in zip(plan.planned(subjects), choices, strict=True):
        if not each.rows:
            continue
        (step,) = steps(subject, each.machine, each.kind.devices or 1, [choice])
        found.append(step_times(step, each.machine))
    return found


def _speeds(found: ClusterPlan, before: Sequence[float]) -> list[float]:
    """Return rows a second of each kind; those without rows keep their ratio to the others."""
    new = [each.rows / each.plan.ranked[0].prediction.seconds.total for each in found.kinds]
    ratio = sum(new) / sum(speed for speed, each in zip(before, found.kinds, strict=True) if each.rows)
    return [rows or ratio * speed for rows, speed in zip(new, before, strict=True)]


def _machine(kind: IslandKind, in_float32: bool) -> Machine:
    if kind.device is None or kind.devices is None:
        raise ValueError(
            f"islands of kind {kind.kind!r} do not say their devices; give devices = NUMBER and"
            ' device = { name = "NVIDIA A100-SXM4-80GB" }, or measured rates (shardtrain calibrate)'
        )
    return make_machine(kind.device, kind.devices, in_float32=in_float32, nodes=kind.nodes)


def _apply_speeds(
    subjects: Sequence[Subject],
    cluster: Cluster,
    machines: Sequence[Machine],
    speeds: Sequence[float],
    space: Space,
    most: int,
    joined: _Joined,
) -> ClusterPlan:
    """Give rows in proportion to speeds, and plan each kind for its rows."""
    weights = [speed for kind, speed in zip(cluster.islands, speeds, strict=True) for _ in range(kind.count)]
    rows = shares(subjects[0].batch_rows, weights)
    # islands of a kind may differ by one row: the plan is for the most
    firsts = [sum(kind.count for kind in cluster.islands[:i]) for i in range(len(cluster.islands))]
    kinds = []
    for first, kind, machine, subject in zip(firsts, cluster.islands, machines, subjects, strict=True):
        most_rows = max(rows[first : first + kind.count])
        plan = search(subject.share(most_rows), machine, kind.devices or 1, space, most)
        if not plan.ranked:
            # what the run's own checks say of the first layout
            raise ValueError(
                f"nothing runs on islands of kind {kind.kind!r}: {next(iter(plan.refused.values()))}\n"
                + nearest_text(subject.share(most_rows), kind.devices or 1, space)
            )
        kinds.append(KindPlan(kind=kind, machine=machine, rows=most_rows, plan=plan))
    link = cluster.link_gb_per_second
    found = ClusterPlan(
        kinds=tuple(kinds),
        shares=tuple(rows),
        join_seconds=0.0,
        synchronisation=joined.by,
        link_bytes_per_second=math.inf if link is None else link * GB,
        merges=joined.merges,
    )
    return replace(found, join_seconds=found.estimate_join(joined.by).seconds)
