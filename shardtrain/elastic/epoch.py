"""Epochs, the membership of an elastic run, and the next epoch from what members report. Values only.

Epoch N is a file of the run folder that is made once, so the folder decides between two proposals. Next:
`member.py`, which collects reports and proposes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

BatchRule = Literal["fixed", "members"]
"""Rows of a step: a batch, or a batch for each member."""

IF_GIVEN = {"if given": True}
"""Metadata of a field that a file has only if its value is not the default."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """An island as others reach it.

    Args:
      name: used once: an island that was excluded joins again under another name.
      address: where its transport listens.
      speed: measured slots per unit of time; members get slots in the ratio of their speeds. 0 means that it
        is not measured yet, and counts as the mean of the others.
    """

    name: str
    address: str
    speed: int = 0

    def __post_init__(self) -> None:
        if not self.name or self.speed < 0:
            raise ValueError(f"a member needs a name and a speed of 0 or more, not {self}")


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The members of a run, from a step until the next epoch.

    Args:
      number: number of the epoch; the first is 1.
      step: the first step of the epoch; the steps before it are committed.
      members: oldest first; the first one is the chief.
      slots: member -> its slots of the first step, in the order in which it sums them. Later steps are
        dealt by speed alone.
      why: what changed, for the ledger.
      kept: for each member the number of its first slots that it has computed in epochs before, if the first
        step is done again.
      stops: whether the run ends before the first step.
      founded: whether the state comes from a checkpoint; then `step` may be lower than before.
      every: number of steps from one exchange to the next, which members do or repeat as one; 1 exchanges
        in each step.
      num_steps: number of steps of the run, as its founder has it; 0 has no end.
      member_slots: number of slots of a batch, if a step reads a batch for each member: slot s of the step is
        slot `s % member_slots` of its batch `s // member_slots`. A step that was begun keeps its slots. 0: a
        step reads one batch.
      first_batch: with `member_slots`, the number of batches that the steps before have read.

    Raises:
      ValueError: names are not unique, or slots are not each slot of a step once.
    """

    number: int
    step: int
    members: tuple[Peer, ...]
    slots: tuple[tuple[int, ...], ...]
    why: str
    kept: tuple[int, ...] = ()
    stops: bool = False
    founded: bool = False
    every: int = 1
    num_steps: int = 0
    member_slots: int = field(default=0, metadata=IF_GIVEN)
    first_batch: int = field(default=0, metadata=IF_GIVEN)

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"epoch {self.number} must have 1 step or more between exchanges: {self.every}")
        if self.number < 1 or self.step < 0 or self.first_batch < 0 or not self.members:
            raise ValueError(
                f"an epoch has a number from 1, a step and a batch from 0 and a member, not {self}"
            )
        if len(set(self.names)) < len(self.members) or len(self.slots) != len(self.members):
            raise ValueError(f"epoch {self.number} needs members with unique names, each with slots: {self}")
        if sorted(slot for slots in self.slots for slot in slots) != list(range(self._num_dealt)):
            raise ValueError(f"epoch {self.number} must deal each slot of a batch once, not {self.slots}")
        if self.kept and (len(self.kept) != len(self.slots) or (self.number == 1 and self.repeats)):
            raise ValueError(f"epoch {self.number} must say what each member kept of another: {self.kept}")
        if self.member_slots and (
            self.every > 1 or not self._num_dealt or self._num_dealt % self.member_slots
        ):
            raise ValueError(f"epoch {self.number} must deal whole batches, and exchange each step: {self}")

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the members, oldest first."""
        return tuple(member.name for member in self.members)

    @property
    def repeats(self) -> bool:
        """Whether the first step is done again."""
        return any(self.kept)

    @cached_property
    def num_slots(self) -> int:
        """Number of slots of a batch."""
        return self.member_slots or self._num_dealt

    @property
    def batch(self) -> BatchRule:
        """How many batches a step reads."""
        return "members" if self.member_slots else "fixed"

    @property
    def _num_dealt(self) -> int:
        return sum(map(len, self.slots))

    @cached_property
    def _later_slots(self) -> dict[str, tuple[int, ...]]:
        number = self.member_slots * len(self.members) or self.num_slots
        return deal(number, {member.name: member.speed for member in self.members})

    def find_batches(self, step: int) -> range | None:
        """Return the numbers of the batches of a step of this epoch; None if each step has one."""
        if not self.member_slots:
            return None
        size, first = len(self.members), self._num_dealt // self.member_slots
        if step == self.step:
            return range(self.first_batch, self.first_batch + first)
        begin = self.first_batch + first + (step - self.step - 1) * size
        return range(begin, begin + size)

    def find_next(self, step: int) -> int:
        """Return the number of steps done after the exchange of a step."""
        return find_next(step, self.every)

    def slots_of(self, step: int) -> dict[str, tuple[int, ...]]:
        """Return the slots of each member in a step of this epoch."""
        first = step < self.find_next(self.step)
        return dict(zip(self.names, self.slots, strict=True)) if first else self._later_slots


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of a member at the end of an epoch; it promises to apply nothing more in it.

    Args:
      epoch: the epoch that ends.
      step: number of steps that it has applied.
      behind: whether it lacks the state of the first step of the epoch.
      held: whether it holds the whole sum of the next step.
      begun: number of slots of the next step that it has begun to compute, the first ones of its slots.
      stops: whether it knows that the run ends before the next step.
      leaves: whether it wants to leave.
      speed: its measured speed.
      lost: names it has no connection to.
      excluded: names that must go, because their numbers differ.
    """

    epoch: int
    step: int
    behind: bool
    held: bool
    begun: int
    stops: bool
    leaves: bool
    speed: int
    lost: tuple[str, ...]
    excluded: tuple[str, ...]


def find_next(step: int, every: int) -> int:
    """Return the number of steps done after the exchange of a step.

    Args:
      step: number of a step, from 0.
      every: number of steps between exchanges, see `Epoch`.

    >>> [find_next(step, 4) for step in (0, 3, 4)]
    [4, 4, 8]
    """
    return step - step % every + every


def deal(
    num_slots: int, speeds: Mapping[str, int], kept: Mapping[str, tuple[int, ...]] = {}
) -> dict[str, tuple[int, ...]]:
    """Deal the slots of a step in the ratio of speeds, by D'Hondt's method.

    Args:
      num_slots: number of slots of a step.
      speeds: member -> speed, see `Peer`.
      kept: member -> slots that it has computed already; they stay first.

    >>> deal(8, {"a": 2, "b": 1, "c": 1})
    {'a': (0, 1, 2, 3), 'b': (4, 5), 'c': (6, 7)}
    >>> deal(6, {"a": 1, "c": 1}, kept={"a": (0, 1), "b": (2, 3), "c": (4, 5)})
    {'a': (0, 1, 2), 'c': (4, 5, 3)}
    """
    known = [speed for speed in speeds.values() if speed]
    mean = sum(known) / len(known) if known else 1
    dealt = {name: list(kept.get(name, ())) for name in speeds}
    taken = {slot for slots in dealt.values() for slot in slots}
    free = [slot for slot in range(num_slots) if slot not in taken]
    counts = {name: len(slots) for name, slots in dealt.items()}
    for _ in free:
        counts[min(counts, key=lambda name: (counts[name] + 1) / (speeds[name] or mean))] += 1
    for name, slots in dealt.items():
        num_new = counts[name] - len(slots)
        slots += free[:num_new]
        free = free[num_new:]
    return {name: tuple(slots) for name, slots in dealt.items()}


def found_epoch(
    number: int,
    founder: Peer,
    step: int,
    num_slots: int,
    *,
    every: int = 1,
    num_steps: int = 0,
    first_batch: int | None = None,
) -> Epoch:
    """Return the epoch in which one island begins at the state of a checkpoint.

    Args:
      number: number of the epoch.
      founder: the island.
      step: number of steps of the checkpoint.
      num_slots: number of slots of a batch.
      every: see `Epoch`.
      num_steps: see `Epoch`.
      first_batch: number of batches that these steps have read, if a step reads one for each member.
    """
    return Epoch(
        number=number,
        step=step,
        members=(founder,),
        slots=(tuple(range(num_slots)),),
        why="founded",
        founded=True,
        every=every,
        num_steps=num_steps,
        member_slots=0 if first_batch is None else num_slots,
        first_batch=first_batch or 0,
    )


def next_epoch(
    epoch: Epoch, reports: Mapping[str, Report], joiners: Mapping[str, Peer], most: int | None = None
) -> Epoch | None:
    """Return the epoch that follows from the reports of all living members.

    A member applies a step once all members hold its sum. So if one that reports does not hold it, nobody has
    applied the step or ever will, and the step is repeated; if all hold it, somebody may have applied it, and
    all do.

    Args:
      epoch: the epoch that ends.
      reports: name -> report of each living member.
      joiners: islands to let in, which have the state.
      most: largest number of members; None has no limit.

    Returns:
      None if no living member has the right state.
    """
    # an island that was let in and lost its donor is behind, and joins again
    whole = {name: reports[name] for name in epoch.names if name in reports}
    whole = {name: report for name, report in whole.items() if not report.behind}
    if not whole:
        return None
    first, last = (pick(report.step for report in whole.values()) for pick in (min, max))
    committed = first < last or all(report.held for report in whole.values())
    step = epoch.find_next(first) if committed else first
    excluded = {name for report in reports.values() for name in report.excluded}
    right = [name for name in _connected(whole) if name not in excluded]
    if not right:
        return None
    stays = [name for name in right if not whole[name].leaves]
    # if all want to leave, the run ends
    stops = any(report.stops for report in whole.values()) or not stays
    stays = stays or right
    members = [
        replace(member, speed=whole[member.name].speed) for member in epoch.members if member.name in stays
    ]
    lost = {name for report in whole.values() for name in report.lost}
    new = [] if stops else [peer for name, peer in joiners.items() if name not in lost | excluded]
    new = new if most is None else new[: max(most - len(members), 0)]
    kept = {} if stops else {name: report.begun for name, report in whole.items() if report.step == step}
    speeds = {member.name: member.speed for member in [*members, *new]}
    dealt, batches = epoch.slots_of(step), epoch.find_batches(step)
    number = sum(map(len, dealt.values()))
    if epoch.member_slots and not any(kept.get(name) for name in speeds):
        number = epoch.member_slots * len(speeds)
    slots = deal(number, speeds, {name: dealt[name][:begun] for name, begun in kept.items()})
    return Epoch(
        number=epoch.number + 1,
        step=step,
        members=(*members, *new),
        slots=tuple(slots.values()),
        why=_explain(epoch, reports, stays, [peer.name for peer in new], excluded)
        + ("; stops" if stops else ""),
        kept=tuple(kept.get(name, 0) for name in slots),
        stops=stops,
        every=epoch.every,
        num_steps=epoch.num_steps,
        member_slots=epoch.member_slots,
        first_batch=0 if batches is None else batches.start,
    )


def find_wrong(digests: Mapping[str, str]) -> tuple[set[str], bool]:
    """Compare what members say of their parameters, which are equal unless one computes wrongly.

    Args:
      digests: member -> KIND/HASH. Kinds, such as meshes, may round differently and are not compared.

    Returns:
      Those that differ from more than half of the members of their kind, and whether others differ too.

    >>> find_wrong({"a": "data=2/1f", "b": "data=2/1f", "c": "data=2/77", "d": "data=4/50"})
    ({'c'}, False)
    >>> find_wrong({"a": "data=2/1f", "b": "data=2/77"})
    (set(), True)
    """
    wrong, is_doubtful = set[str](), False
    for kind in {digest.rpartition("/")[0] for digest in digests.values()}:
        own = {name: digest for name, digest in digests.items() if digest.rpartition("/")[0] == kind}
        usual, number = Counter(own.values()).most_common(1)[0]
        if 2 * number > len(own):
            wrong |= {name for name, digest in own.items() if digest != usual}
        else:
            is_doubtful = True
    return wrong, is_doubtful


def _connected(reports: Mapping[str, Report]) -> list[str]:
    """Of two members without a connection keep the older one."""
    kept: list[str] = []
    for name, report in reports.items():
        if not any(name in reports[other].lost or other in report.lost for other in kept):
            kept.append(name)
    return kept


def _explain(
    epoch: Epoch, reports: Mapping[str, Report], stays: list[str], new: list[str], excluded: set[str]
):
    gone = [name for name in epoch.names if name not in stays]
    left = [name for name in gone if name in reports and reports[name].leaves]
    wrong = [name for name in gone if name in excluded]
    words = {"joined": new, "left": left, "excluded": wrong}
    words["lost"] = [name for name in gone if name not in left + wrong]
    return "; ".join(f"{word} {', '.join(names)}" for word, names in words.items() if names) or "dealt anew"
