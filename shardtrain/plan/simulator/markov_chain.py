"""Search the shardings of single operators by a Markov chain on top of the delta simulation. No jax.

The search of FlexFlow (Jia et al. 2019, "Beyond Data and Model Parallelism for Deep Neural Networks", section
6): a change is proposed, simulated, and kept by the rule of Metropolis.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardtrain.plan.simulator.delta import DeltaSimulation
from shardtrain.plan.simulator.operator_shardings import ShardedOperators, Sharding, Transfers
from shardtrain.plan.simulator.task_graph import Key, Task, TaskGraph

BETA = 300.0
"""Beta times the best step: one that is slower by 1 / 300 is kept with a probability of 1 / e."""

MEAN_RUN = 8
"""Mean number of operators in a row that a proposal changes, where it changes several."""

TOO_LARGE = 10.0
"""A step that does not fit costs so many times its seconds, times the part that is too large."""


class Judged(NamedTuple):
    """A step as a search sees it.

    Args:
      cost: the seconds, times a penalty where it does not fit; for comparisons alone.
      seconds: of the step, as it is simulated.
      fits: whether it is within the memory of a device.
    """

    cost: float
    seconds: float
    fits: bool


class ShardedStep:
    """A step whose operators are sharded, and its simulation.

    Args:
      space: the operators on a mesh.
      shardings: of each operator, such as fits it.

    Attributes:
      shardings: now.
      simulation: of its tasks.

    Raises:
      ValueError: a sharding does not fit its operator.
    """

    def __init__(self, space: ShardedOperators, shardings: Sequence[Sharding]) -> None:
        for number, sharding in enumerate(shardings):
            if not space.fits(number, sharding):
                each = space.graph.operators[number]
                raise ValueError(
                    f"operator {number}, {each.name}, cannot be sharded by {sharding} over axes of sizes"
                    f" {tuple(space.sizes.values())}; its dims are {dict(each.sizes)}"
                )
        self.space = space
        self.shardings = list(shardings)
        self._sent: dict[int, Transfers] = {
            number: space.transfers(number, self.shardings) for number in range(len(space.graph.values))
        }
        computed = [
            space.compute_task(number, sharding, self._sent) for number, sharding in enumerate(shardings)
        ]
        moved = [task for sent in self._sent.values() for tasks in sent.values() for task in tasks]
        self.simulation = DeltaSimulation(TaskGraph([*computed, *moved]))
        self._before: tuple[dict[int, Sharding], dict[int, Transfers]] = ({}, {})

    @property
    def judged(self) -> "Judged":
        """What the search compares: seconds, and more where the step does not fit the memory."""
        over = self.space.memory_bytes(self.shardings) / self.space.machine.rates.memory_bytes
        seconds = self.simulation.makespan
        return Judged(seconds * (1 + TOO_LARGE * over if over > 1 else 1), seconds, over <= 1)

    @property
    def cost(self) -> float:
        """Seconds of the step; more if it does not fit the memory."""
        return self.judged.cost

    def change(self, new: Mapping[int, Sharding]) -> None:
        """Shard some operators otherwise; tasks are changed where anything about them changes."""
        space = self.space
        values = {
            value
            for number in new
            for value in (*space.made_by.get(number, ()), *space.read_by.get(number, ()))
        }
        old = {task.key for value in values for tasks in self._sent[value].values() for task in tasks}
        self._before = (
            {number: self.shardings[number] for number in new},
            {value: self._sent[value] for value in values},
        )
        for number, sharding in new.items():
            self.shardings[number] = sharding
        self._sent |= {value: space.transfers(value, self.shardings) for value in values}
        users = {use.operator for value in values for use in space.graph.values[value].uses}
        tasks = [space.compute_task(each, self.shardings[each], self._sent) for each in {*users, *new}]
        tasks += [task for value in values for sent in self._sent[value].values() for task in sent]
        put: list[Task] = [task for task in tasks if self.simulation.task(task.key) != task]
        removed: set[Key] = old - {task.key for task in tasks}
        self.simulation.change(remove=removed, put=put)

    def undo(self) -> None:
        """Undo the last change."""
        shardings, sent = self._before
        for number, sharding in shardings.items():
            self.shardings[number] = sharding
        self._sent |= sent
        self.simulation.undo()


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a chain found.

    Args:
      shardings: the best, of each operator.
      start: what it began with.
      found: the best.
      accepted: how many proposals were kept.
    """

    shardings: tuple[Sharding, ...]
    start: Judged
    found: Judged
    accepted: int


def search_shardings(
    space: ShardedOperators, start: Sequence[Sharding], *, proposals: int, seed: int = 0
) -> Searched:
    """Search from one start.

    Half of the proposals change one operator to any sharding, half shard one dim over one axis, or none, in
    some operators in a row. One that costs x seconds more is kept with probability exp(-beta x), where
    beta is `BETA` over the seconds of the best step so far. Proposals are not symmetric: this is a search,
    and samples no distribution.

    Args:
      space: the operators on a mesh.
      start: of each operator, such as fits it.
      proposals: how many.
      seed: the same seed gives the same result.
    """
    rng = random.Random(seed)
    step = ShardedStep(space, start)
    first = now = best = step.judged
    found, accepted = tuple(step.shardings), 0
    for _ in range(proposals):
        new = _proposal(space, step.shardings, rng)
        if not new:
            continue
        step.change(new)
        tried = step.judged
        if tried.cost > now.cost and rng.random() >= math.exp(BETA * (now.cost - tried.cost) / best.cost):
            step.undo()
            continue
        now, accepted = tried, accepted + 1
        if tried.cost < best.cost:
            best, found = tried, tuple(step.shardings)
    return Searched(shardings=found, start=first, found=best, accepted=accepted)


def random_shardings(space: ShardedOperators, seed: int = 0) -> tuple[Sharding, ...]:
    """Return any sharding for each operator."""
    rng = random.Random(seed)
    return tuple(_any_sharding(space, number, rng) for number in range(len(space.graph.operators)))


def _any_sharding(space: ShardedOperators, number: int, rng: random.Random) -> Sharding:
    """Return any sharding that fits an operator."""
    options = (None, *space.graph.operators[number].sizes)
    found: Sharding = (None,) * len(space.sizes)
    for axis in rng.sample(range(len(found)), len(found)):
        tried = (*found[:axis], rng.choice(options), *found[axis + 1 :])
        found = tried if space.fits(number, tried) else found
    return found


def _proposal(
    space: ShardedOperators, shardings: Sequence[Sharding], rng: random.Random
) -> dict[int, Sharding]:
    """Return new shardings of some operators, such as fit them."""
    first = rng.randrange(len(shardings))
    if rng.random() < 0.5:
        chosen = _any_sharding(space, first, rng)
        return {first: chosen} if chosen != shardings[first] else {}
    length = 1 + int(rng.expovariate(1 / MEAN_RUN))
    axis, dim = rng.randrange(len(space.sizes)), rng.choice((None, *space.dims))
    new = {
        number: (*shardings[number][:axis], dim, *shardings[number][axis + 1 :])
        for number in range(first, min(first + length, len(shardings)))
    }
    return {
        number: sharding
        for number, sharding in new.items()
        if sharding != shardings[number] and space.fits(number, sharding)
    }
