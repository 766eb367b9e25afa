"""Make the tasks of a step whose operators each have their own sharding. No jax.

All devices do the same at the same time, so there is one queue for computation and one for each link. If an
operator needs a value in another sharding, a collective moves it. Next: `operator_search.py`.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardtrain import axes
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from shardtrain.plan.machine import Machine
from shardtrain.plan.simulator.operators import Operators, Part, Value
from shardtrain.plan.simulator.task_graph import Key, Task
from shardtrain.plan.traffic import count_sent_bytes

Sharding = tuple[str | None, ...]
"""The dim that each mesh axis shards; None if its devices all do the same."""

Move = tuple[str, tuple[str, ...], float, float]
"""A collective, the mesh axes that it runs over, its seconds, and the bytes that a device sends."""

Transfers = Mapping[Sharding, Sequence[Task]]
"""Sharding that operators need -> the tasks that bring a value into it, () if it has it already."""

PARTIAL = "partial"
"""In the place of a dim: each device has a partial sum."""

AHEAD = 8
"""Number of operators before the one that needs a parameter at which it is gathered."""


@dataclass(frozen=True, kw_only=True)
class ShardedOperators:
    """Operators on a mesh.

    Args:
      graph: the operators and their values.
      machine: the devices.
      sizes: mesh axis -> size, the slowest link first.
    """

    graph: Operators
    machine: Machine
    sizes: Mapping[str, int]
    _seconds: dict[tuple[int, Sharding], float] = field(default_factory=dict, init=False, repr=False)
    _moves: dict[Any, list[Move]] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def made_by(self) -> Mapping[int, list[int]]:
        """Operator -> the values that it makes."""
        found = defaultdict(list)
        for number, value in enumerate(self.graph.values):
            found[value.source].append(number)
        return found

    @cached_property
    def read_by(self) -> Mapping[int, list[int]]:
        """Operator -> the values that it reads."""
        found = defaultdict(list)
        for number, value in enumerate(self.graph.values):
            for operator in dict.fromkeys(use.operator for use in value.uses):
                found[operator].append(number)
        return found

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """All dims that any operator can be sharded over."""
        return tuple(sorted({dim for each in self.graph.operators for dim in each.sizes}))

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

    def _kernel_seconds(self, flops: Part, arrays: Sequence[Part], sharding: Sharding) -> float:
        moved = sum(self._select_device(each, sharding) for each in arrays)
        return float(self.machine.rates.seconds(self._select_device(flops, sharding), moved))

    def memory_bytes(self, shardings: Sequence[Sharding]) -> float:
        """Return the bytes of parameters, gradients and state, and of activations that a backward reads."""
        operators = self.graph.operators
        kept = sum(
            operator.kept_bytes / self._parts(sharding, set(operator.sizes))
            for operator, sharding in zip(operators, shardings, strict=True)
            if operator.kept_bytes
        )
        return kept + sum(
            max(use.num_bytes for use in value.uses) / self._parts(shardings[value.source], value.dims)
            for value in self.graph.values
            if operators[value.source].kind == "forward"
            and any(operators[use.operator].kind == "backward" for use in value.uses)
        )

    def compute_task(self, number: int, sharding: Sharding, sent: Mapping[int, Transfers]) -> Task:
        """Return the task of an operator.

        Args:
          number: of the operator.
          sharding: of the operator.
          sent: number of a value -> its `transfers`, for the values that it reads.
        """
        needs: list[Key] = []
        for i in self.read_by.get(number, ()):
            value = self.graph.values[i]
            if tasks := sent[i][_find_required(value, sharding)]:
                needs.append(tasks[-1].key)
            elif not value.is_parameter:
                needs.append((value.source, 0))
        operator = self.graph.operators[number]
        return Task(
            key=(number, 0),
            name=operator.name,
            kind=operator.kind,
            queue="compute",
            seconds=self.seconds(number, sharding),
            # values that a loop carries to its next trip come from a later operator
            needs=tuple(key for key in dict.fromkeys(needs) if key < (number, 0)),
        )

    def transfers(self, number: int, shardings: Sequence[Sharding]) -> Transfers:
        """Return the tasks that bring a value into each sharding that operators need."""
        value = self.graph.values[number]
        found = {}
        for required, moves, first_user in self._list_moves(number, shardings):
            code = tuple(0 if dim is None else 1 + self.dims.index(dim) for dim in required)
            first, needs = (value.source, 1), ((value.source, 0),)
            if value.is_parameter:
                first = (first_user - 1, 2)
                needs = ((first_user - AHEAD, 0),) if first_user >= AHEAD else ()
            tasks: list[Task] = []
            for step, (kind, over, seconds, _) in enumerate(moves):
                key = (*first, number, *code, step)
                link = self.machine.find_link_name(over, self.sizes)
                name = f"{kind} of {self.graph.operators[value.source].name}"
                tasks.append(Task(key, name, "collective", link, seconds, needs))
                needs = (key,)
            found[required] = tasks
        return found

    def sent_bytes(self, shardings: Sequence[Sharding]) -> Mapping[tuple[str, ...], float]:
        """Return mesh axes -> the bytes that each device sends over them in a step."""
        found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for number in range(len(self.graph.values)):
            for _, moves, _ in self._list_moves(number, shardings):
                for _, over, _, num_bytes in moves:
                    found[over] += num_bytes
        return found

    def _list_moves(
        self, number: int, shardings: Sequence[Sharding]
    ) -> Iterator[tuple[Sharding, list[Move], int]]:
        """Yield each sharding that operators need of a value, its collectives, and its first user."""
        value = self.graph.values[number]
        made = _find_made(value, shardings[value.source])
        is_sent = value.added is None or made != _find_made(value, shardings[value.added])
        uses = defaultdict(list)
        for use in value.uses:
            uses[_find_required(value, shardings[use.operator])].append(use)
        for required, of_required in uses.items():
            messages = max(use.messages for use in of_required)
            num_bytes = max(use.num_bytes for use in of_required)
            key = (made, required, messages, num_bytes)
            if key not in self._moves:
                self._moves[key] = list(self._move(*key))
            yield required, self._moves[key] if is_sent else [], min(use.operator for use in of_required)

    def _move(self, made: Sharding, required: Sharding, messages: float, num_bytes: float) -> Iterator[Move]:
        """Yield the collectives from one sharding to another, smaller arrays first."""
        pairs = list(zip(self.sizes, made, required, strict=True))
        # an array that every device has is cut without sending
        split = {axis for axis, a, b in pairs if a != PARTIAL and (a or b)}
        groups = {
            REDUCE_SCATTER: [axis for axis, a, b in pairs if a == PARTIAL and b],
            ALL_REDUCE: [axis for axis, a, b in pairs if a == PARTIAL and not b and axis != axes.DATA],
            ALL_TO_ALL: [axis for axis, a, b in pairs if a not in (None, PARTIAL, b) and b],
            ALL_GATHER: [axis for axis, a, b in pairs if a not in (None, PARTIAL) and not b],
        }
        # replicas add up their own sums last
        last = [axis for axis, a, b in pairs if a == PARTIAL and not b and axis == axes.DATA]
        for kind, over in (*groups.items(), (ALL_REDUCE, last)):
            if not over:
                continue
            split = split - set(over) if kind == ALL_GATHER else split
            whole = num_bytes / math.prod(self.sizes[axis] for axis in split)
            seconds = self.machine.collective_seconds(kind, over, self.sizes, whole, messages)
            members = math.prod(self.sizes[axis] for axis in over)
            yield kind, tuple(over), seconds, count_sent_bytes(kind, members, whole)
            split = split | set(over) if kind == REDUCE_SCATTER else split

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
