"""Compute logits over a large vocabulary when they are read, one chunk of tokens at a time.

A program never has more than one chunk of logits in memory, forward and backward. Next: `decoder.py`, whose
option `loss_chunk` returns such logits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.spmd import logical_to_mesh_axes, with_logical_constraint

from shardtrain.axes import BATCH, EMBED, SEQ, VOCAB


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("hidden_BTD", "kernel", "bias_V"),
    meta_fields=("kernel_dims", "chunk", "soft_cap"),
)
@dataclass(frozen=True, kw_only=True)
class ChunkedLogits:
    """Logits (batch, seq, vocab), stored as the activations and the kernel of the head; a pytree.

    The losses and metrics of this library accept them in place of logits. A loss of your own reads them by
    `sum_chunks` or, if they fit into memory, by `whole()`. An index over batch and seq computes the logits of
    these tokens only.

    Args:
      hidden_BTD: the input of the head, in the compute dtype.
      kernel: weights of the head in the compute dtype, with dims `kernel_dims`.
      bias_V: added to the logits, unless it is None.
      kernel_dims: ("vocab", "embed") for an embedding table, or ("embed", "vocab").
      chunk: largest number of tokens of a device whose logits are in memory at the same time.
      soft_cap: see `cap`.
    """

    hidden_BTD: jax.Array
    kernel: jax.Array
    bias_V: jax.Array | None
    kernel_dims: tuple[str, str]
    chunk: int
    soft_cap: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        return (*self.hidden_BTD.shape[:-1], self.kernel.shape[self.kernel_dims.index(VOCAB)])

    @property
    def dtype(self) -> Any:
        """The dtype of the logits, float32."""
        return jnp.dtype(jnp.float32)

    def __getitem__(self, index: Any) -> jax.Array:
        """Return the float32 logits (..., vocab) of some tokens; `index` is over batch and seq."""
        dims = index if isinstance(index, tuple) else (index,)
        if len(dims) > 2 or any(dim is Ellipsis for dim in dims):
            raise ValueError(
                f"index {index} of logits in chunks; allowed: rows and positions, as [:, -1], then all tokens"
            )
        return self._product(self.hidden_BTD[index], self.kernel, self.bias_V)

    def whole(self) -> jax.Array:
        """Return all logits, float32 (batch, seq, vocab)."""
        return with_logical_constraint(self[:, :], (BATCH, SEQ, VOCAB))

    def argmax(self, axis: int = -1) -> jax.Array:
        """Return the likeliest token of each position, int32 (batch, seq)."""
        if axis not in (-1, 2):
            raise ValueError(f"argmax over dim {axis} of logits in chunks; allowed: -1, the vocabulary")
        shards = _Shards.of(self.hidden_BTD)
        kernel, bias = self._broadcast_head(shards)

        def chunk(hidden: jax.Array) -> jax.Array:
            return self._product(hidden, kernel, bias).argmax(-1)

        return shards.joined(jax.lax.map(chunk, shards.chunks(self.hidden_BTD, self.chunk)))

    def sum_chunks(self, compute: Callable[..., tuple[Any, Any]], *of_tokens: jax.Array) -> tuple[Any, Any]:
        """Sum the results of a function over chunks of tokens; its gradient is computed by chunks too.

        Args:
          compute: (logits (..., vocab), *arrays (...)) -> (loss, others). The loss is a scalar sum over
            tokens, which is differentiated by the logits; others is a pytree of sums without gradients. The
            function uses no other traced values. The last chunk is padded with tokens whose entries in all
            arrays are 0; they must add nothing, as with a weight of 0.
          *of_tokens: arrays (batch, seq), one entry for each token.

        Returns:
          The sums over all tokens, as `compute` returns them.
        """
        shards = _Shards.of(self.hidden_BTD)
        # float32, so that the gradients of chunks are added up in it
        head = jax.tree.map(lambda x: x.astype(jnp.float32), self._broadcast_head(shards))
        arrays = tuple(shards.chunks(x, self.chunk) for x in of_tokens)
        dtype = self.hidden_BTD.dtype
        # the scale of a loss in float16 comes after these products, whose small gradients would be 0
        dtype = jnp.float32 if dtype == jnp.float16 else dtype

        def of_chunk(head: Any, hidden: jax.Array, arrays: tuple[jax.Array, ...]) -> tuple[Any, Any]:
            return compute(self._product(hidden.astype(dtype), *head), *arrays)

        return _sum(of_chunk, head, shards.chunks(self.hidden_BTD, self.chunk), arrays)

    def _broadcast_head(self, shards: "_Shards") -> tuple[jax.Array, jax.Array | None]:
        """Return kernel and bias with two leading dims, a copy for each shard of the tokens.

        Each device then sums its own gradient over chunks, which is reduced over devices only once.
        """
        kernel = jnp.broadcast_to(self.kernel, (shards.rows, shards.positions, *self.kernel.shape))
        kernel = with_logical_constraint(kernel, (BATCH, SEQ, *self.kernel_dims))
        if self.bias_V is None:
            return kernel, None
        bias = jnp.broadcast_to(self.bias_V, (shards.rows, shards.positions, 1, *self.bias_V.shape))
        return kernel, with_logical_constraint(bias, (BATCH, SEQ, None, VOCAB))

    def _product(self, hidden: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        """Return float32 logits, rounded to the compute dtype as they are without chunks."""
        letters = "VD" if self.kernel_dims == (VOCAB, EMBED) else "DV"
        lead = "bs" if kernel.ndim == 4 else ""
        logits = jnp.einsum(f"{lead}...D,{lead}{letters}->{lead}...V", hidden, kernel.astype(hidden.dtype))
        if bias is not None:
            logits += bias.astype(hidden.dtype)
        if lead:
            logits = with_logical_constraint(logits, (BATCH, SEQ, None, VOCAB))
        return cap(logits.astype(jnp.float32), self.soft_cap)


def cap(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    """Return soft_cap * tanh(logits / soft_cap), or the logits if soft_cap is None."""
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(of_chunk: Callable[..., Any], head: Any, hidden: jax.Array, arrays: Any) -> Any:
    """Sum of_chunk(head, hidden, arrays) over the chunks, the first dim of hidden and arrays.

    With a gradient, one loop computes the loss of each chunk and its gradient, so no logits are computed
    twice. The gradient is in float32 for a cotangent of 1; the backward pass multiplies it by the cotangent.
    """

    def add(total: Any, chunk: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of_chunk(head, *chunk)), None

    return jax.lax.scan(add, _zeros(of_chunk, head, hidden, arrays), (hidden, arrays))[0]


def _sum_forward(of_chunk: Callable[..., Any], head: Any, hidden: jax.Array, arrays: Any) -> Any:
    def add(carry: Any, chunk: Any) -> tuple[Any, jax.Array]:
        (total, others), grads = carry
        hidden, arrays = chunk
        loss, pull, more = jax.vjp(
            lambda head, hidden: of_chunk(head, hidden, arrays),
            head,
            hidden.astype(jnp.float32),
            has_aux=True,
        )
        of_head, of_hidden = pull(jnp.ones_like(loss))
        sums = total + loss, jax.tree.map(jnp.add, others, more)
        return (sums, jax.tree.map(jnp.add, grads, of_head)), of_hidden

    carry = _zeros(of_chunk, head, hidden, arrays), jax.tree.map(jnp.zeros_like, head)
    (sums, of_head), of_hidden = jax.lax.scan(add, carry, (hidden, arrays))
    return sums, (of_head, of_hidden, jnp.zeros((), hidden.dtype))


def _sum_backward(of_chunk: Callable[..., Any], kept: Any, cotangent: Any) -> Any:
    of_head, of_hidden, like = kept
    scale = cotangent[0]
    return jax.tree.map(lambda g: g * scale, of_head), (of_hidden * scale).astype(like.dtype), None


_sum.defvjp(_sum_forward, _sum_backward)


def _zeros(of_chunk: Callable[..., Any], head: Any, hidden: jax.Array, arrays: Any) -> Any:
    shapes = jax.eval_shape(of_chunk, head, *jax.tree.map(lambda x: x[0], (hidden, arrays)))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


@dataclass(frozen=True)
class _Shards:
    """Number of shards of the tokens of a batch, over rows and over positions; 1 and 1 outside a run."""

    rows: int
    positions: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, hidden_BTD: jax.Array) -> "_Shards":
        sizes = jax.sharding.get_abstract_mesh().shape
        entries = logical_to_mesh_axes((BATCH, SEQ)) or ()
        counts = [math.prod(sizes.get(axis, 1) for axis in _axes(entry)) for entry in entries]
        # a few rows that are only traced need not divide
        fit = [n if size % n == 0 else 1 for n, size in zip(counts, hidden_BTD.shape, strict=False)]
        return cls(fit[0], fit[1], (hidden_BTD.shape[0], hidden_BTD.shape[1]))

    def chunks(self, x: jax.Array, chunk: int) -> jax.Array:
        """Split (B, T, ...) into chunks of equal size: (chunks, rows, positions, tokens of a chunk, ...).

        Each has at most `chunk` tokens of a shard; the last one is padded with zeros.
        """
        rows, seq = self.shape
        x = x.reshape(self.rows, rows // self.rows, self.positions, seq // self.positions, *x.shape[2:])
        x = jnp.moveaxis(x, 2, 1)
        x = x.reshape(*x.shape[:2], -1, *x.shape[4:])
        num_tokens = x.shape[2]
        num_chunks = -(-num_tokens // chunk)
        size = -(-num_tokens // num_chunks)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, num_chunks * size - num_tokens), *[(0, 0)] * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], num_chunks, size, *x.shape[3:]), 2, 0)

    def joined(self, chunks: jax.Array) -> jax.Array:
        """Return (chunks, rows, positions, tokens of a chunk) as (B, T)."""
        rows, seq = self.shape
        num_tokens = rows * seq // (self.rows * self.positions)
        x = jnp.moveaxis(chunks, 0, 2).reshape(self.rows, self.positions, -1)[:, :, :num_tokens]
        x = x.reshape(self.rows, self.positions, rows // self.rows, seq // self.positions)
        return jnp.moveaxis(x, 1, 2).reshape(rows, seq)


def _axes(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
