"""Work of a device that a trace leaves closed: arrays in, arrays out, and what it costs in between.

What a run computes by hand on each device (attention over context, the exchange of experts) depends on the
mesh, and a trace has none. So its place in a traced program is a call that only says the names and shapes of
its results. Next: `traced_attention.py` and `traced_experts.py`, which make such calls.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive

from shardtrain.plan.program import DeviceCall, Dims

NAME = "device_call"
"""The name of the primitive in a traced computation."""

Result = tuple[tuple[int, ...], Any, Dims]
"""Shape, dtype and names of the dims of a result."""

_PRIMITIVE = Primitive(NAME)
_PRIMITIVE.multiple_results = True


@_PRIMITIVE.def_abstract_eval
def _results(*_: Any, call: DeviceCall, results: Sequence[Result]) -> list[Any]:
    return [ShapedArray(shape, np.dtype(dtype)) for shape, dtype, _ in results]


def device_call(call: DeviceCall, inputs: Sequence[jax.Array], results: Sequence[Result]) -> list[jax.Array]:
    """Return arrays of these shapes, in a traced computation.

    Args:
      call: what it costs.
      inputs: what it reads.
      results: of what it writes.
    """
    return _PRIMITIVE.bind(*inputs, call=call, results=tuple(results))


def linear_call(
    there: DeviceCall, back: DeviceCall, inputs: Sequence[jax.Array], named: Dims, result: Result
) -> jax.Array:
    """Return the result of a call that is linear in its first input; its gradient is another such call.

    Args:
      there: what it costs.
      back: what its gradient costs.
      inputs: what both read; the others have no gradient.
      named: the dims of the first input.
      result: what it writes.
    """
    first, *others = inputs

    @jax.custom_vjp
    def forward(x: jax.Array, others: Any) -> jax.Array:
        return device_call(there, (x, *others), [result])[0]

    def kept(x: jax.Array, others: Any) -> Any:
        return forward(x, others), others

    def backward(others: Any, cotangent: jax.Array) -> Any:
        (found,) = device_call(back, (cotangent, *others), [(first.shape, first.dtype, named)])
        return found, None

    forward.defvjp(kept, backward)
    return forward(first, others)


Trace = Callable[..., jax.Array]
"""What a model calls in the place of its own attention or experts."""
