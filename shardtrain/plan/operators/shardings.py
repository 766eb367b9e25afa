"""Predict a step whose operators each have their own sharding: what devices compute, send and keep. No jax.

All devices do the same at the same time. If an operator needs a value in another sharding, a collective moves
it. As in the prediction of a layout, nothing overlaps. Next: `search.py`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from shardtrain import axes
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER
from shardtrain.plan.machine import Machine
from shardtrain.plan.operators.graph import Operators, Part, Value
from shardtrain.plan.traffic import count_sent_bytes

Sharding = tuple[str | None, ...]
"""The dim that each mesh axis shards; None if its devices all do the same."""

PARTIAL = "partial"
"""In the place of a dim: each device has a partial sum."""

TOO_LARGE = 10.0
"""Penalty of a step that does not fit, relative to its seconds and to its memory over that of a device."""


class Move(NamedTuple):
    """A collective that changes the sharding of a value.

    Args:
      kind: as in `plan.hlo.collectives`.
      axes: the mesh axes that it runs over.
      seconds: its seconds in a step.
      num_bytes: the bytes that a device sends in a step.
    """

    kind: str
    axes: tuple[str, ...]
    seconds: float
    num_bytes: float


Needs = dict[tuple[Sharding, bool], tuple[float, float]]
"""A sharding in which a value is needed, and whether it is for a part that is computed again -> messages and
bytes in a step."""


class Rest(NamedTuple):
    """What the prediction of a layout has beside what its operators take by its rules; may be negative.

    Args:
      seconds: of a step.
      memory_bytes: of a device.
    """

    seconds: float
    memory_bytes: float


NOTHING = Rest(0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class ShardedOperators:
    """Operators on a mesh.

    Args:
      graph: the operators and their values.
      machine: the devices.
      sizes: mesh axis -> size, the slowest link first.
      rest: of the prediction of the layout with this mesh.
    """

    graph: Operators
    machine: Machine
    sizes: Mapping[str, int]
    rest: Rest = NOTHING
    _seconds: dict[tuple[int, Sharding], float] = field(default_factory=dict, init=False, repr=False)
    _moves: dict[Any, list[Move]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def made_by(self) -> Mapping[int, list[int]]:
        """Operator -> the values that it makes, or to which its own are added."""
        found = defaultdict(list)
        for number, value in enumerate(self.graph.values):
            for operator in (value.source, *value.added):
                found[operator].append(number)
        return found

    @cached_property
    def read_by(self) -> Mapping[int, list[int]]:
        """Operator -> the values that it reads."""
        found = defaultdict(list)
        for number, value in enumerate(self.graph.values):
            for operator in dict.fromkeys(use.operator for use in value.uses):
                found[operator].append(number)
        return found

    def fits(self, operator: int, sharding: Sharding) -> bool:
        """Return whether an operator has these dims, and the axes divide their sizes."""
        sizes = self.graph.operators[operator].sizes
        used = {dim for dim in sharding if dim is not None}
        return all(dim in sizes and sizes[dim] % self._parts(sharding, {dim}) == 0 for dim in used)

    def seconds(self, number: int, sharding: Sharding) -> float:
        """Return the seconds of an operator on each device, in all its trips."""
        if (number, sharding) not in self._seconds:
            self._seconds[number, sharding] = sum(
                times * self._kernel_seconds(flops, arrays, sharding)
                for flops, arrays, times in self.graph.operators[number].work
            )
        return self._seconds[number, sharding]

    def flops(self, number: int, sharding: Sharding) -> float:
        """Return the flops of an operator on each device, in all its trips."""
        work = self.graph.operators[number].work
        return sum(times * self._select_device(flops, sharding) for flops, _, times in work)

    def _kernel_seconds(self, flops: Part, arrays: Sequence[Part], sharding: Sharding) -> float:
        moved = sum(self._select_device(each, sharding) for each in arrays)
        return float(self.machine.rates.seconds(self._select_device(flops, sharding), moved))

    def kept_bytes(self, shardings: Sequence[Sharding]) -> float:
        """Return the bytes of parameters, gradients and optimizer state on each device."""
        return sum(
            operator.kept_bytes / self._parts(sharding, set(operator.sizes))
            for operator, sharding in zip(self.graph.operators, shardings, strict=True)
            if operator.kept_bytes
        )

    def activation_bytes(self, shardings: Sequence[Sharding]) -> float:
        """Return the bytes of activations that the backward reads on each device."""
        return sum(
            num_bytes / self._parts(shardings[value.source], value.dims)
            for value, num_bytes in self._read_later
        )

    @cached_property
    def _read_later(self) -> list[tuple[Value, float]]:
        """What the forward makes and the backward reads, and its bytes."""
        kinds = [each.kind for each in self.graph.operators]
        return [
            (value, max(use.num_bytes for use in value.uses))
            for value in self.graph.values
            if kinds[value.source] == "forward"
            and any(kinds[use.operator] == "backward" for use in value.uses)
        ]

    def moves(self, number: int, shardings: Sequence[Sharding]) -> Iterator[Move]:
        """Yield the collectives that bring a value into each sharding that operators need."""
        value, given = self.graph.values[number], dict(enumerate(shardings))
        made, *added = (_find_made(value, shardings[operator]) for operator in (value.source, *value.added))
        yield from () if made in added else self.list_moves(number, made, [self.find_needs(number, given)])

    def find_made(self, number: int, shardings: Mapping[int, Sharding]) -> dict[int, Sharding]:
        """Return the shardings in which some operators make a value, or add to it."""
        value = self.graph.values[number]
        makers = (operator for operator in (value.source, *value.added) if operator in shardings)
        return {operator: _find_made(value, shardings[operator]) for operator in makers}

    def find_needs(self, number: int, shardings: Mapping[int, Sharding]) -> Needs:
        """Return the shardings in which some operators need a value."""
        value, found = self.graph.values[number], Needs()
        for use in value.uses:
            if use.operator in shardings:
                key = (_find_required(value, shardings[use.operator]), use.recomputes)
                messages, num_bytes = found.get(key, (0.0, 0.0))
                found[key] = max(messages, use.messages), max(num_bytes, use.num_bytes)
        return found

    def list_moves(self, number: int, made: Sharding, needs: Iterable[Needs]) -> Iterator[Move]:
        """Yield the collectives that bring a value from the sharding that it is made in into those needed."""
        every = Needs()
        for each in needs:
            for (required, recomputes), (messages, num_bytes) in each.items():
                # sums are kept as they were completed; what was gathered is gathered again
                key = (required, recomputes and PARTIAL not in made)
                before = every.get(key, (0.0, 0.0))
                every[key] = max(before[0], messages), max(before[1], num_bytes)
        order = self.graph.operators[self.graph.values[number].source].result
        for (required, _), (messages, num_bytes) in every.items():
            key = (made, required, messages, num_bytes, order)
            if key not in self._moves:
                self._moves[key] = list(self._move(*key))
            yield from self._moves[key]

    def _move(
        self,
        made: Sharding,
        required: Sharding,
        messages: float,
        num_bytes: float,
        order: tuple[str | None, ...],
    ) -> Iterator[Move]:
        """Yield the collectives from one sharding to another as XLA chooses them, smaller arrays first."""
        pairs = list(zip(self.sizes, made, required, strict=True))
        # an array that every device has is cut without sending
        split = {axis for axis, a, b in pairs if a != PARTIAL and (a or b)}
        permuted = self._find_permuted(made, required)
        # replicas add up their own sums last
        summed = [axis for axis, a, b in pairs if a == PARTIAL and (not b or b in permuted)]
        gathered = {axis: a for axis, a, b in pairs if a not in (None, PARTIAL) and not b}
        groups = [
            (REDUCE_SCATTER, [axis for axis, a, b in pairs if a == PARTIAL and b and b not in permuted]),
            (ALL_REDUCE, [axis for axis in summed if axis != axes.DATA]),
            (ALL_TO_ALL, [axis for axis, a, b in pairs if a not in (None, PARTIAL, b) and b]),
        ]
        for dim in sorted({*gathered.values()}, key=lambda dim: dim in order and -order.index(dim)):
            groups.append((ALL_GATHER, [axis for axis, a in gathered.items() if a == dim]))
        groups.append((ALL_REDUCE, [axis for axis in summed if axis == axes.DATA]))
        groups += [(PERMUTE, over) for over in permuted.values()]
        for kind, over in groups:
            if not over:
                continue
            split = (
                split - set(over) if kind == ALL_GATHER else split | set(over) if kind == PERMUTE else split
            )
            whole = num_bytes / math.prod(self.sizes[axis] for axis in split)
            seconds = self.machine.collective_seconds(kind, over, self.sizes, whole, messages)
            members = math.prod(self.sizes[axis] for axis in over)
            yield Move(kind, tuple(over), seconds, count_sent_bytes(kind, members, whole))
            split = split | set(over) if kind == REDUCE_SCATTER else split

    def _find_permuted(self, made: Sharding, required: Sharding) -> dict[str, list[str]]:
        """Return the dims whose parts change devices, as axes that stay are not the slowest -> their axes."""
        found = {}
        for dim in {*made, *required} - {None, PARTIAL}:
            before, after = (
                [axis for axis, each in zip(self.sizes, sharding, strict=True) if each == dim]
                for sharding in (made, required)
            )
            kept = [axis for axis in before if axis in after]
            if not kept == before[: len(kept)] == after[: len(kept)]:
                found[dim] = [axis for axis in self.sizes if axis in {*before, *after}]
        return found

    def _select_device(self, part: Part, sharding: Sharding) -> float:
        return part.amount / self._parts(sharding, part.dims)

    def _parts(self, sharding: Sharding, dims: frozenset[str] | set[str]) -> int:
        sizes = self.sizes.values()
        return math.prod(size for size, dim in zip(sizes, sharding, strict=True) if dim in dims)


def _find_made(value: Value, sharding: Sharding) -> Sharding:
    """Return the sharding in which an operator with this sharding makes a value."""
    return tuple(dim if dim is None or dim in value.dims else PARTIAL for dim in sharding)


def _find_required(value: Value, sharding: Sharding) -> Sharding:
    """Return the sharding in which an operator with this sharding needs a value."""
    return tuple(dim if dim in value.dims else None for dim in sharding)


class StepScore(NamedTuple):
    """The score of a step.

    Args:
      cost: the seconds, times a penalty if it does not fit, for comparisons.
      seconds: predicted seconds of the step.
      fits: whether it fits the memory of a device.
    """

    cost: float
    seconds: float
    fits: bool


@dataclass(frozen=True, eq=False)
class ShardedStep:
    """A step whose operators are sharded.

    Args:
      space: the operators on a mesh.
      shardings: sharding of each operator.
      computed: seconds of each operator.
      moved: number of a value -> the collectives that bring it to the operators that need it.
    """

    space: ShardedOperators
    shardings: tuple[Sharding, ...]
    computed: Mapping[int, float]
    moved: Mapping[int, Sequence[Move]]

    @classmethod
    def of(cls, space: ShardedOperators, shardings: Sequence[Sharding]) -> "ShardedStep":
        """Return the step with these shardings.

        Raises:
          ValueError: a sharding does not fit its operator.
        """
        for number, sharding in enumerate(shardings):
            if not space.fits(number, sharding):
                each = space.graph.operators[number]
                raise ValueError(
                    f"operator {number}, {each.name}, cannot be sharded by {sharding} over axes of sizes"
                    f" {tuple(space.sizes.values())}; its dims are {dict(each.sizes)}"
                )
        nothing = cls(space, tuple(shardings), {}, {})
        return nothing.changed(dict(enumerate(shardings)))

    def changed(self, new: Mapping[int, Sharding]) -> "ShardedStep":
        """Return the step with other shardings of some operators; only what they change is computed again."""
        space = self.space
        shardings = tuple(new.get(number, sharding) for number, sharding in enumerate(self.shardings))
        values = {
            value
            for number in new
            for value in (*space.made_by.get(number, ()), *space.read_by.get(number, ()))
        }
        return ShardedStep(
            space,
            shardings,
            {**self.computed, **{number: space.seconds(number, new[number]) for number in new}},
            {**self.moved, **{value: tuple(space.moves(value, shardings)) for value in values}},
        )

    @cached_property
    def judged(self) -> StepScore:
        """The score of the step."""
        rest, space = self.space.rest, self.space
        kept = space.kept_bytes(self.shardings) + space.activation_bytes(self.shardings)
        over = (rest.memory_bytes + kept) / space.machine.rates.memory_bytes
        seconds = rest.seconds + sum(self.computed.values())
        seconds += sum(move.seconds for moves in self.moved.values() for move in moves)
        # what is left of a layout's prediction may be negative
        seconds = max(seconds, sum(self.computed.values()))
        return StepScore(seconds * (1 + TOO_LARGE * over if over > 1 else 1), seconds, over <= 1)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends for its operators."""
        return sum(self.sum_moves("num_bytes").values())

    def sum_moves(self, name: Literal["seconds", "num_bytes"]) -> dict[tuple[str, ...], float]:
        """Return mesh axes -> the sums of a field of the collectives over them."""
        found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for moves in self.moved.values():
            for move in moves:
                found[move.axes] += getattr(move, name)
        return dict(found)
