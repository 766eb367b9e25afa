"""Layers the nnx models share: a linear map over named dims, norms, positions.

Parameters are float32. Each names its dims; where it is used it is cast to the compute dtype and constrained
to those dims again, so that a sharded parameter is gathered in the compute dtype instead of the activations
being reduced.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED
from shardtrain.models.float8 import Products, product
from shardtrain.models.lora import Lora
from shardtrain.models.on_gpus import recompute

Dims = tuple[str, ...]
Norms = Literal["layernorm", "rmsnorm", "rmsnorm_plus_one"]


def parameter(values: jax.Array, dims: tuple[str | None, ...]) -> nnx.Param:
    """Make a parameter that names its dims, with or without a mesh: its user shards it."""
    return nnx.Param(values, out_sharding=dims, eager_sharding=False)


def normal(dims: Dims, *, sizes: Mapping[str, int], std: float, rngs: nnx.Rngs) -> nnx.Param:
    """Make a float32 parameter over `dims` drawn from a normal distribution."""
    return parameter(std * jax.random.normal(rngs.params(), [sizes[dim] for dim in dims], jnp.float32), dims)


def coming_keys(stream: nnx.RngStream, num: int) -> jax.Array:
    """Return keys (num,) split from the stream's next key, without advancing the stream.

    So the parts of a model, called in any order and in programs of their own, see the same keys.
    """
    return jax.random.split(jax.random.fold_in(stream.key[...], stream.count[...]), num)


def add_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Add a bias over the last dims, if there is one."""
    return y if bias is None else y + bias


def cast_and_constrain(
    parameter: nnx.Param | jax.Array, dims: tuple[str | None, ...], dtype: str
) -> jax.Array:
    """Cast a parameter to the compute dtype and constrain it to its dims: here a sharded one is gathered."""
    return with_logical_constraint(parameter[...].astype(dtype), dims)


@jax.custom_jvp
def lookup(table: jax.Array, indices: jax.Array) -> jax.Array:
    """Return rows of a table, NaN for an index out of range; in 16 bits their gradients are summed in 32.

    A row that is looked up often would otherwise get a sum in 16 bits, to which little can be added.

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


class Linear(nnx.Module):
    """A linear map from the last dims of its input, `into`, to `out`.

    It has a bias over `out` if asked for, and a low-rank adapter (`lora.py`) if one is given: two maps beside
    the kernel, one after the other, of which the second begins at 0.
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
        return self.shifted(self.product(x))

    def product(self, x: jax.Array) -> jax.Array:
        """Apply the map without its bias."""
        y = product(x, self.cast(), (*self.into, *self.out), len(self.into), self.products)
        return self.adapted(y, x)

    def adapted(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Add what the adapter makes of `x`, if there is one, to a product of `x` with the kernel."""
        if self.lora is None:
            return y
        first = cast_and_constrain(self.lora_a, (*self.into, None), self.dtype)
        second = cast_and_constrain(self.lora_b, (None, *self.out), self.dtype)
        return y + self.lora.scale * jnp.tensordot(jnp.tensordot(x, first, len(self.into)), second, 1)

    def cast(self) -> jax.Array:
        """Cast the kernel to the compute dtype, sharded as stored, for concatenation and gathering."""
        return self.kernel[...].astype(self.dtype)

    def shifted(self, y: jax.Array) -> jax.Array:
        """Add the bias, if there is one, to a product with the kernel."""
        return add_bias(y, self.cast_bias())

    def cast_bias(self) -> jax.Array | None:
        """Return the bias in the compute dtype, None without one."""
        return None if self.bias is None else cast_and_constrain(self.bias, self.out, self.dtype)


class Norm(nnx.Module):
    """Layer or root-mean-square norm over the last dims, in float32; only a layer norm can have a bias.

    "rmsnorm_plus_one" multiplies by 1 + its scale, which begins at 0.
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
        return recompute(self._normalise, derived)(x, scale, bias)

    def _normalise(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        x, axes = x.astype(jnp.float32), tuple(range(-len(self.dims), 0))
        # a root-mean-square norm leaves the mean where it is
        if self.kind == "layernorm":
            x = x - jnp.mean(x, axis=axes, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + self.eps)
        return self._scale(x, scale, bias)

    def _normalise_by_moments(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None) -> jax.Array:
        """The same with both moments summed at once and barriers around them: GPUs compute its gradient fast.

        The first feature is subtracted before, as squares of values far from 0 would lose digits. Where it is
        far from the others some are lost all the same: less than the rounding of inputs in 16 bits.
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
      segments_BT: the number of each token's segment, such as a document; equal numbers stand together.

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
