"""Shared layers of the nnx models: a linear map over named dims, norms, a lookup, positions.

Parameters are float32 and name their dims. Before use they are cast to the compute dtype and constrained to
these dims, so that a sharded parameter is gathered in the compute dtype instead of the activations being
reduced.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED
from shardtrain.models.float8 import Products, multiply
from shardtrain.models.lora import Lora
from shardtrain.models.ops import WithOps

Dims = tuple[str, ...]
Norms = Literal["layernorm", "rmsnorm", "rmsnorm_plus_one"]


def parameter(values: jax.Array, dims: tuple[str | None, ...]) -> nnx.Param:
    """Make a parameter that names its dims, without sharding it."""
    return nnx.Param(values, out_sharding=dims, eager_sharding=False)


def normal(dims: Dims, *, sizes: Mapping[str, int], std: float, rngs: nnx.Rngs) -> nnx.Param:
    """Make a float32 parameter with dims `dims`, drawn from a normal distribution."""
    return parameter(std * jax.random.normal(rngs.params(), [sizes[dim] for dim in dims], jnp.float32), dims)


def peek_keys(stream: nnx.RngStream, num: int) -> jax.Array:
    """Return keys (num,) split from the stream's next key, without advancing the stream.

    The parts of a model then see the same keys, in any order and in separate programs.
    """
    return jax.random.split(jax.random.fold_in(stream.key[...], stream.count[...]), num)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias over the last dims, if there is one."""
    return y if bias is None else y + bias


def cast_and_constrain(
    parameter: nnx.Param | jax.Array, dims: tuple[str | None, ...], dtype: str
) -> jax.Array:
    """Cast a parameter to the compute dtype, and constrain it to its dims, which gathers a sharded one."""
    return with_logical_constraint(parameter[...].astype(dtype), dims)


@jax.custom_jvp
def lookup(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Return rows of a table, NaN for an index out of range; gradients of 16 bits are summed in float32.

    Otherwise the gradients of a row that is looked up often would be rounded away in a sum of 16 bits.

    Args:
      table: (rows, embed).
      indices: int (batch, seq).

    Returns:
      (batch, seq, embed), typed as the table.
    """
    return jnp.take(table, indices, axis=0)


@lookup.defjvp
def _derive_lookup(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    table, indices = primals
    tangent = jnp.take(tangents[0].astype(jnp.float32), indices, axis=0).astype(table.dtype)
    return lookup(table, indices), tangent


class Linear(WithOps):
    """A linear map from the last dims of its input, `into`, to `out`.

    It may have a bias over `out`, and a low-rank adapter (`lora.py`): two successive maps next to the kernel,
    the second initialised with 0.
    """

    def __init__(
        self,
        into: Dims,
        out: Dims,
        *,
        sizes: Mapping[str, int],
        std: float,
        bias: bool,
        dtype: str,
        rngs: nnx.Rngs,
        lora: Lora | None = None,
        products: Products = "",
    ):
        self.into, self.out, self.dtype = into, out, dtype
        self.products: Products = products
        self.kernel = normal((*into, *out), sizes=sizes, std=std, rngs=rngs)
        self.bias = parameter(jnp.zeros([sizes[dim] for dim in out]), out) if bias else None
        self.lora = lora
        if lora is not None:
            shape_in, shape_out = ([sizes[dim] for dim in dims] for dims in (into, out))
            bound = 1 / math.sqrt(math.prod(shape_in))
            first = jax.random.uniform(rngs.params(), (*shape_in, lora.rank), jnp.float32, -bound, bound)
            self.lora_a = parameter(first, (*into, None))
            self.lora_b = parameter(jnp.zeros((lora.rank, *shape_out)), (None, *out))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.add_bias(self.product(x))

    def product(self, x: jax.Array) -> jax.Array:
        """Apply the map without its bias."""
        y = multiply(self.ops, x, self.cast(), (*self.into, *self.out), len(self.into), self.products)
        return self.add_adapter(y, x)

    def add_adapter(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Add the adapter's output for `x`, if there is one, to a product of `x` with the kernel."""
        if self.lora is None:
            return y
        first = cast_and_constrain(self.lora_a, (*self.into, None), self.dtype)
        second = cast_and_constrain(self.lora_b, (None, *self.out), self.dtype)
        return y + self.lora.scale * jnp.tensordot(jnp.tensordot(x, first, len(self.into)), second, 1)

    def cast(self) -> jax.Array:
        """Cast the kernel to the compute dtype, sharded as stored, for concatenation and gathering."""
        return self.kernel[...].astype(self.dtype)

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Add the bias, if there is one, to a product with the kernel."""
        return add_bias(y, self.cast_bias())

    def cast_bias(self) -> jax.Array | None:
        """Return the bias in the compute dtype, or None."""
        return None if self.bias is None else cast_and_constrain(self.bias, self.out, self.dtype)


class Norm(WithOps):
    """A layer norm or root-mean-square norm over the last dims, in float32; only layer norms have biases.

    "rmsnorm_plus_one" multiplies by 1 + its scale, which is initialised with 0.
    """

    def __init__(
        self,
        kind: Norms,
        *sizes: int,
        eps: float,
        bias: bool,
        dtype: str,
        dims: Dims = (EMBED,),
    ) -> None:
        self.kind, self.eps, self.dtype, self.dims = kind, eps, dtype, dims
        self.scale = parameter((jnp.zeros if kind == "rmsnorm_plus_one" else jnp.ones)(sizes), dims)
        has_bias = bias and kind == "layernorm"
        self.bias = parameter(jnp.zeros(sizes), dims) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = cast_and_constrain(self.scale, self.dims, "float32")
        bias = None if self.bias is None else cast_and_constrain(self.bias, self.dims, "float32")
        derived = self._normalise_by_moments if x.dtype.itemsize == 2 else None
        return self.ops.recompute(self._normalise, derived)(x, scale, bias)

    def _normalise(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        x, axes = x.astype(jnp.float32), tuple(range(-len(self.dims), 0))
        # a root-mean-square norm keeps the mean
        if self.kind == "layernorm":
            x = x - jnp.mean(x, axis=axes, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + self.eps)
        return self._scale(x, scale, bias)

    def _normalise_by_moments(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Normalise with both moments summed at once, between barriers, which has a fast gradient on GPUs.

        The first feature is subtracted before, as squares of values far from 0 would lose digits. If it is
        far from the others some digits are lost, which is less than the rounding of inputs in 16 bits.
        """
        x, axes = x.astype(jnp.float32), tuple(range(-len(self.dims), 0))
        if self.kind == "layernorm":
            x = x - jax.lax.stop_gradient(x[(..., *[slice(1)] * len(axes))])
            mean, square = jax.lax.optimization_barrier(
                (jnp.mean(x, axis=axes, keepdims=True), jnp.mean(jnp.square(x), axis=axes, keepdims=True))
            )
            x = (x - mean) * jax.lax.rsqrt(square - jnp.square(mean) + self.eps)
        else:
            square = jax.lax.optimization_barrier(jnp.mean(jnp.square(x), axis=axes, keepdims=True))
            x = x * jax.lax.rsqrt(square + self.eps)
        return self._scale(x, scale, bias)

    def _scale(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        x = x * (1 + scale if self.kind == "rmsnorm_plus_one" else scale)
        return add_bias(x, bias).astype(self.dtype)


def restart_positions(segments_BT: jax.Array) -> jax.Array:
    """Return the position of each token in its segment, int32 (batch, seq).

    Args:
      segments_BT: the number of each token's segment, such as a document; equal numbers are neighbours.

    >>> restart_positions(jnp.array([[0, 0, 1, 1, 1, 2]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    # over whole rows: neighbours in different shards would be sent by permutes, see `drop_first`
    segments_BT = with_logical_constraint(segments_BT, (BATCH, None))
    places_BT = jnp.broadcast_to(jnp.arange(segments_BT.shape[1], dtype=jnp.int32), segments_BT.shape)
    begins_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    begins_BT = with_logical_constraint(begins_BT, (BATCH, None))
    starts_BT = jax.lax.cummax(jnp.where(begins_BT, places_BT, 0), axis=1)
    return places_BT - with_logical_constraint(starts_BT, (BATCH, None))
