"""Multiply activations with kernels while the parts of a sequence that tensor shards are exchanged.

A device multiplies the part that it has while it receives the next one. This replaces an all-gather before
the product, or a reduce-scatter after it. A run gives it to models among their operations
(docs/decisions/0058); outside a run models compute plain products. Next: `ring.py`, `activation_rules.py`.

References:
  Wang et al. 2023, Overlap Communication with Dependent Computation via Decomposition,
  https://dl.acm.org/doi/10.1145/3567955.3567959, sections 3 and 5.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.functional.mesh_axes import find_mesh_axes, map_shards, num_devices
from shardtrain.functional.remat_policies import WHOLE_SEQ
from shardtrain.functional.ring import Ring
from shardtrain.functional.run_trace import note

Dims = tuple[str | None, ...]
Axes = tuple[str, ...]

NOTED = "products: while parts of the sequence are exchanged"
"""The beginning of the line that a run logs if its model has such products."""


class _Call(NamedTuple):
    """The mesh axes of a product's arrays, and the devices that exchange parts.

    Attributes:
      ring: the devices along tensor.
      rows: mesh axes that shard the rows of x.
      seq: mesh axes that shard the positions of x where its features are sharded over tensor.
      of_kernel: mesh axes that shard each dim of the kernel.
      num_in: the first dims of the kernel, over which the product sums.
    """

    ring: Ring
    rows: Axes
    seq: Axes
    of_kernel: tuple[Axes, ...]
    num_in: int

    def spec(self, features: range) -> PartitionSpec:
        """Return the spec of activations whose features are these dims of the kernel."""
        of_features = [self.of_kernel[i] for i in features]
        is_split = any(axes.TENSOR in each for each in of_features)
        seq = self.seq if is_split else (*self.seq, axes.TENSOR)
        return PartitionSpec(self.rows or None, seq or None, *(each or None for each in of_features))


@dataclass(frozen=True)
class CollectiveMatmul:
    """Products that turn parts of a sequence into parts of features, or back."""

    def gathered(self, x_BTD: jax.Array, kernel: jax.Array, dims: Dims) -> jax.Array | None:
        """Multiply the residual stream with a kernel whose other dims are sharded over tensor.

        Args:
          x_BTD: named (batch, residual_seq, embed).
          kernel: (embed, ...), in the dtype of x.
          dims: its names where it is used.

        Returns:
          (B, T, ...), named (batch, seq, ...); None where the rules of the layout shard other dims, or over
          other axes too, or the positions cannot be split into equal parts.
        """
        call = _call(x_BTD, kernel, dims, 1, range(1, kernel.ndim))
        return None if call is None else _gather(call, x_BTD, kernel)

    def multiply_scattered(self, x: jax.Array, kernel: jax.Array, dims: Dims) -> jax.Array | None:
        """Multiply features that are sharded over tensor with a kernel that makes them the residual stream.

        Args:
          x: (B, T, ...), named (batch, seq, ...).
          kernel: (..., embed), in the dtype of x.
          dims: its names where it is used.

        Returns:
          (B, T, D), named (batch, residual_seq, embed), summed in the dtype of x; None as for `gathered`.
        """
        call = _call(x, kernel, dims, kernel.ndim - 1, range(kernel.ndim - 1))
        return None if call is None else _scatter(call, x, kernel)


def _call(x: jax.Array, kernel: jax.Array, dims: Dims, num_in: int, split: range) -> _Call | None:
    """Return the mesh axes of a product's arrays; None where it cannot be computed part by part.

    Exactly one dim of the kernel may be sharded: one of `split`, over tensor only. A sum over a dim that
    another axis shards would need the terms of other devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    num = mesh.shape.get(axes.TENSOR, 1)
    rows, seq = find_mesh_axes(axes.BATCH, axes.SEQ)
    _, parts = find_mesh_axes(axes.BATCH, axes.RESIDUAL_SEQ)
    of_kernel = tuple(find_mesh_axes(*dims))
    sharded = {i: each for i, each in enumerate(of_kernel) if each}
    if num == 1 or parts != (*seq, axes.TENSOR) or sharded not in [{i: (axes.TENSOR,)} for i in split]:
        return None
    if x.shape[1] % num_devices(parts, mesh.shape):
        return None
    # a few rows that are only traced need not divide
    rows = rows if x.shape[0] % num_devices(rows, mesh.shape) == 0 else ()
    ring = Ring(axes.TENSOR, num, "any", in_pairs=mesh.shape.get(axes.PIPELINE, 1) > 1)
    note(f"{NOTED} over tensor={num} (collective matmul)")
    return _Call(ring, rows, seq, of_kernel, num_in)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(call: _Call, x_BTD: jax.Array, kernel: jax.Array) -> jax.Array:
    return _gather_forward(call, x_BTD, kernel)[0]


def _gather_forward(call: _Call, x_BTD: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    y, whole_BTD = _gather_and_multiply(call, x_BTD, kernel, range(call.num_in))
    return y, (checkpoint_name(whole_BTD, WHOLE_SEQ), kernel)


def _gather_backward(call: _Call, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    whole_BTD, kernel = kept
    return _multiply_and_scatter(call, dy, kernel, range(call.num_in, kernel.ndim)), _sum_kernel_gradient(
        whole_BTD, dy
    )


_gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scatter(call: _Call, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _multiply_and_scatter(call, x, kernel, range(call.num_in))


def _scatter_forward(call: _Call, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, Any]:
    return _scatter(call, x, kernel), (x, kernel)


def _scatter_backward(call: _Call, kept: Any, dy_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = kept
    dx, whole_BTD = _gather_and_multiply(call, dy_BTD, kernel, range(call.num_in, kernel.ndim))
    return dx, _sum_kernel_gradient(x, whole_BTD)


_scatter.defvjp(_scatter_forward, _scatter_backward)


def _sum_kernel_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    """Return the gradient of a kernel: a sum over tokens, which the compiler reduces over devices."""
    return lax.dot_general(x, dy, (((0, 1), (0, 1)), ((), ())))


def _gather_and_multiply(call: _Call, x: jax.Array, kernel: jax.Array, summed: range) -> Any:
    """Multiply the parts of a sequence with a kernel: first this device's part, then those of the others.

    Args:
      call: of the product.
      x: (B, T, ...), sharded along the sequence.
      kernel: the kernel.
      summed: its dims that the product sums over, the last of x.

    Returns:
      The product (B, T, ...), and x gathered.
    """
    ring, features = call.ring, _other_dims(kernel, summed)

    def of_device(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        here, parts, products = x, [x], [_multiply(x, kernel, summed)]
        for step in range(1, ring.num):
            if step > 1:
                # send one part at a time, during a product, and not all of them before the first
                x, here, products[-2] = lax.optimization_barrier((x, here, products[-2]))
            here = ring.exchange_with_opponent(x, step) if ring.is_tournament else ring.send(here)
            parts.append(here)
            products.append(_multiply(here, kernel, summed))
        return _join(products, ring), _join(parts, ring)

    whole = PartitionSpec(*call.spec(features)[:2], *[None] * len(summed))
    return _run_on_shards(call, of_device, call.spec(summed), (call.spec(features), whole))(x, kernel)


def _join(parts: Sequence[jax.Array], ring: Ring) -> jax.Array:
    """Join the parts (B, T, ...) of a sequence, given in the order of the ring's steps."""
    first, num_tokens = parts[0], parts[0].shape[1]
    whole = jnp.zeros((len(first), ring.num * num_tokens, *first.shape[2:]), first.dtype)
    for step, part in enumerate(parts):
        whole = lax.dynamic_update_slice_in_dim(whole, part, ring.other(step) * num_tokens, 1)
    return whole


def _multiply_and_scatter(call: _Call, x: jax.Array, kernel: jax.Array, summed: range) -> jax.Array:
    """Multiply parts of features with a kernel; each device gets the sums of its part of the sequence.

    Args:
      call: of the product.
      x: (B, T, ...), its features sharded.
      kernel: the kernel.
      summed: its dims that the product sums over, the last of x.

    Returns:
      The product (B, T, ...), sharded along the sequence.
    """
    ring = call.ring

    def of_device(x: jax.Array, kernel: jax.Array) -> jax.Array:
        num_tokens = x.shape[1] // ring.num

        def compute_term(device: jax.Array) -> jax.Array:
            """Return this device's term of the sums of another device."""
            part = lax.dynamic_slice_in_dim(x, device * num_tokens, num_tokens, 1)
            return _multiply(part, kernel, summed)

        if ring.is_tournament:
            terms = [
                ring.exchange_with_opponent(compute_term(ring.other(step)), step)
                for step in range(1, ring.num)
            ]
            return sum(terms, compute_term(ring.other(0)))
        # sums go round, and each device adds its term; a device's own sums are those that it completes
        total = compute_term(ring.other(1))
        for step in range(2, ring.num + 1):
            total = ring.send(total) + compute_term(ring.other(step))
        return total

    return _run_on_shards(call, of_device, call.spec(summed), call.spec(_other_dims(kernel, summed)))(
        x, kernel
    )


def _run_on_shards(call: _Call, function: Any, of_x: PartitionSpec, of_result: Any) -> Any:
    of_kernel = PartitionSpec(*(each or None for each in call.of_kernel))
    return map_shards(function, (of_x, of_kernel), of_result)


def _multiply(x: jax.Array, kernel: jax.Array, summed: range) -> jax.Array:
    """Multiply the last dims of x with some dims of the kernel, after an optimization barrier.

    Without the barrier compilers join the products into one, which waits for the parts of all devices.
    """
    x, kernel = lax.optimization_barrier((x, kernel))
    last = tuple(range(x.ndim - len(summed), x.ndim))
    return lax.dot_general(x, kernel, ((last, tuple(summed)), ((), ())))


def _other_dims(kernel: jax.Array, summed: range) -> range:
    """Return the dims of a kernel that a product does not sum over."""
    return range(summed.stop, kernel.ndim) if summed.start == 0 else range(summed.start)
