"""Defer the second output of a function, without computing anything twice.

This splits a backward pass into the cotangents of its inputs and the gradients of its parameters. Next:
`split_scans.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from shardtrain.jaxpr.cut import ProgramPart
from shardtrain.jaxpr.forward import evaluate, inline
from shardtrain.jaxpr.split_scans import cut_in_two


@dataclass(frozen=True, eq=False)
class _DeferredProgram:
    """The program of deferred outputs: one object for all calls of a compiled function.

    Args:
      part: the program.
      structure: the tree structure of its outputs.
    """

    part: ProgramPart
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
        leaves = jax.tree.leaves(arguments)
        return replace(self, arguments=[leaves[n] for n in self.program.part.reads])

    def compute(self) -> Any:
        """Compute the outputs, after `given`."""
        outputs = evaluate(self.program.part.closed, [*self.arguments, *self.kept])
        return jax.tree.unflatten(self.program.structure, outputs)


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
        traced, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        (now, of_now), (later, of_later) = map(jax.tree.flatten, shapes)
        is_now = [True] * len(now) + [False] * len(later)
        first, second = cut_in_two(inline(traced), is_now, [not yes for yes in is_now])
        leaves = jax.tree.leaves(arguments)
        found = evaluate(first.closed, [leaves[n] for n in first.reads])
        deferred = Deferred(found[len(now) :], [], _DeferredProgram(second, of_later))
        return jax.tree.unflatten(of_now, found[: len(now)]), deferred

    return run
