"""An island of several processes, on one mesh or each a stage of a pipeline; the first one is the member.

It asks all of them, in the same order, for what each does with its own arrays. Next: `island.py`, of which
only the first process has one.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from shardtrain.elastic.codecs import Arrays
from shardtrain.elastic.program import Program

DONE, FAILED = "done", "failed"

CALL = "what the first process of the island asks for"

DEATH_SECONDS = 2.0
"""Seconds until MPI has ended all processes after the death of one."""


class Channel(Protocol):
    """Exchanges values and arrays between the processes of an island, which have numbers from 0."""

    rank: int
    size: int

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the JSON values of all processes."""
        ...

    def send(self, array: np.ndarray, to: int) -> None:
        """Send an array, which is not changed afterwards."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: Any, source: int) -> np.ndarray:
        """Receive an array."""
        ...


class LeaderFailed(ValueError):
    """The first process of this island has ended with an error."""


class Group:
    """The processes of an island.

    Args:
      channel: connects them; None for a single process.

    Attributes:
      leads: whether this is the first process.
      actions: name -> what each process does when the first one calls `ask` with this name.
    """

    def __init__(self, channel: Channel | None = None) -> None:
        self.channel = channel
        self.leads = channel is None or channel.rank == 0
        self.actions: dict[str, Callable[..., Any]] = {}
        self._is_acting = False

    def ask(self, name: str, *values: Any) -> Any:
        """Do something on all processes, as the first one; return its own result.

        Args:
          name: of `actions`.
          values: JSON values.
        """
        self._broadcast(name, values)
        self._is_acting = True
        found = self.actions[name](*values)
        self._is_acting = False
        return found

    def run(self, work: Callable[[], Any]) -> Any:
        """Call a function on the first process, while the others do what it asks; return its JSON result.

        Raises:
          LeaderFailed: it has failed, on the others.
        """
        if self.leads:
            try:
                found = work()
            except BaseException as error:
                if self._is_acting:
                    # the others may wait for an array of this process, so they are not told; if one of them
                    # has died, MPI ends all meanwhile, and its exit code counts
                    time.sleep(0.0 if self.channel is None else DEATH_SECONDS)
                    raise
                text = f"the first process of this island has ended: {type(error).__name__}: {error}"
                self._broadcast(FAILED, [text])
                raise
            self._broadcast(DONE, [found])
            return found
        while True:
            name, values = self._broadcast()
            if name == DONE:
                return values[0]
            if name == FAILED:
                # the first process ends all, with its own error and exit code
                time.sleep(DEATH_SECONDS)
                raise LeaderFailed(values[0])
            self.actions[name](*values)

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the JSON values of all processes, which all call this."""
        return [value] if self.channel is None else self.channel.all_gather(name, value)

    def _broadcast(self, *call: Any) -> Any:
        return self.all_gather(CALL, list(call))[0]


class GroupProgram:
    """What an island of several processes trains, as its first process has it; see `elastic.program.Program`.

    If each process has a part of the model, such as a stage, a tree is a list of arrays for each process. If
    they share a mesh, the first one sends and receives whole arrays.

    Args:
      group: the processes.
      program: what this process computes of each step.
      whole: the sharding of whole arrays on the mesh that the processes share; None if each has a part.
    """

    def __init__(self, group: Group, program: Program, whole: Sharding | None = None) -> None:
        assert group.channel is not None
        self._group, self._channel, self._program = group, group.channel, program
        self._whole = whole
        self._copy_whole = jax.jit(lambda x: x, out_shardings=whole)
        self._shapes: dict[str, list[Any]] = {}
        self._given: list[Arrays] | None = None
        self._tree: Any = None
        group.actions |= {
            "compute": self._compute,
            "apply": self._apply,
            "gather state": self._gather_state,
            "set state": self._set_state,
            "codecs": self._gather_codecs,
        }

    @property
    def state(self) -> list[Arrays]:
        """The arrays of each process."""
        return self._group.ask("gather state")

    @state.setter
    def state(self, state: list[Arrays]) -> None:
        self._given = state
        self._group.ask("set state")

    @property
    def codecs(self) -> list[list[str]]:
        """The codecs of each process's arrays."""
        return self._group.ask("codecs")

    def compute(self, step: int, slots: Any, *batches: range) -> list[Arrays]:
        """Return the sums of each process over some slots."""
        return self._group.ask("compute", step, list(slots), *([each.start, each.stop] for each in batches))

    def apply(self, step: int, total: list[Arrays]) -> None:
        """Update the state of each process."""
        self._given = total
        self._group.ask("apply", step)

    # -- on each process ---------------------------------------------------------------------------------

    def _compute(self, step: int, slots: list[int], *ends: list[int]) -> list[Arrays]:
        arrays, self._tree = jax.tree.flatten(
            self._program.compute(step, slots, *(range(*each) for each in ends))
        )
        return self._gather("sums", arrays)

    def _apply(self, step: int) -> None:
        self._program.apply(step, jax.tree.unflatten(self._tree, self._scatter("sums")))

    def _gather_state(self) -> list[Arrays]:
        return self._gather("state", jax.tree.leaves(self._program.state))

    def _set_state(self) -> None:
        tree = jax.tree.structure(self._program.state)
        self._program.state = jax.tree.unflatten(tree, self._scatter("state"))

    def _gather_codecs(self) -> list[list[str]]:
        own = jax.tree.leaves(getattr(self._program, "codecs", ()))
        return self._channel.all_gather("codecs", own) if self._whole is None else [own]

    def _gather(self, kind: str, arrays: list[Any]) -> list[Arrays]:
        """Return the arrays of each process, on the first one."""
        if self._whole is not None:
            # one after the other, as each is whole on every device
            arrays = [np.asarray(self._copy_whole(x).addressable_data(0)) for x in arrays]
        if kind not in self._shapes:
            own = [(np.shape(x), jnp.dtype(x.dtype).name) for x in arrays]
            self._shapes[kind] = self._channel.all_gather(f"shapes of the {kind}", own)
        if self._group.leads:
            ranks = range(1, self._channel.size) if self._whole is None else ()
            return [[np.asarray(x) for x in arrays], *(self._receive(kind, rank, rank) for rank in ranks)]
        if self._whole is not None:
            return []
        for array in arrays:
            self._channel.send(np.asarray(array), 0)
        return []

    def _scatter(self, kind: str) -> Arrays:
        """Return the arrays of this process, which the first one has been given."""
        if not self._group.leads:
            return self._receive(kind, self._channel.rank, 0)
        assert self._given is not None
        (own, *others), self._given = self._given, None
        if self._whole is not None:
            others = [own] * (self._channel.size - 1)
        for rank, arrays in enumerate(others, 1):
            for array in arrays:
                self._channel.send(np.asarray(array), rank)
        return own

    def _receive(self, kind: str, rank: int, source: int) -> Arrays:
        shapes = self._shapes[kind][rank]
        return [self._channel.receive(tuple(shape), jnp.dtype(dtype), source) for shape, dtype in shapes]
