"""Defer the second output of a function, without computing anything twice.

This splits a backward pass into the cotangents of its inputs and the gradients of its parameters. Next:
`jaxpr_split.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any

import jax

from shardtrain.jaxpr.split import Split


@dataclass(frozen=True, eq=False)
class _DeferredProgram:
    """The program of deferred outputs: one object for all calls of a compiled function.

    Args:
      split: both programs.
      needed: whether the program needs each argument.
      structure: the tree structure of its outputs.
    """

    split: Split
    needed: tuple[bool, ...]
    structure: Any


@partial(jax.tree_util.register_dataclass, data_fields=["kept", "arguments"], meta_fields=["program"])
@dataclass(frozen=True)
class Deferred:
    """The deferred outputs of a function; a pytree, which compiled functions can return.

    Args:
      kept: the intermediate arrays that the program needs.
      arguments: the arguments that the program needs, see `given`.
      program: computes the outputs.
    """

    kept: list[jax.Array]
    arguments: list[jax.Array]
    program: _DeferredProgram

    def given(self, *arguments: Any) -> "Deferred":
        """Return it with the needed arguments: compiled functions would copy them if they returned them."""
        return replace(self, arguments=list(compress(jax.tree.leaves(arguments), self.program.needed)))

    def compute(self) -> Any:
        """Compute the outputs, after `given`."""
        split = self.program.split
        arrays = compress(split.inputs, self.program.needed)
        given = [*zip(arrays, self.arguments, strict=True), *zip(split.kept, self.kept, strict=True)]
        return jax.tree.unflatten(self.program.structure, split.later.run(given))


def defer(function: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Deferred]]:
    """Return a function that computes the first output of a function, and returns the second as `Deferred`.

    Args:
      function: returns (outputs needed now, outputs needed later), each a pytree of arrays.

    >>> def moments(x, y):
    ...     z = x + y
    ...     return z.sum(), z**2
    >>> x, y = jax.numpy.arange(3.0), jax.numpy.ones(3)
    >>> total, squares = defer(moments)(x, y)
    >>> float(total), squares.given(x, y).compute().tolist(), len(squares.kept)
    (6.0, [1.0, 4.0, 9.0], 1)
    """

    def run(*arguments: Any) -> tuple[Any, Deferred]:
        jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        (now, of_now), (later, of_later) = map(jax.tree.flatten, shapes)
        is_now = [True] * len(now) + [False] * len(later)
        split = Split(jaxpr, is_now, [not yes for yes in is_now])
        split.now.outputs += split.kept
        found = split.now.run(zip(split.inputs, jax.tree.leaves(arguments), strict=True))
        needed = tuple(map(split.later.needs, split.inputs))
        deferred = Deferred(found[len(now) :], [], _DeferredProgram(split, needed, of_later))
        return jax.tree.unflatten(of_now, found[: len(now)]), deferred

    return run
