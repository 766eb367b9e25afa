"""Sort tokens by expert, and compute the matrix products of experts, on one device.

Next: `experts.py`, the layer; `functional/expert_exchange.py`, experts on several devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Slots:
    """The slots of chosen tokens in a buffer that is sorted by expert.

    Args:
      of_choice_NK: int32, the slot of each choice; `num` if the choice is not in the buffer.
      num: number of slots.
      product: (slots (num, features), kernels (experts, features, out)) -> (num, out): each slot times the
        kernel of its expert.
    """

    of_choice_NK: jax.Array
    num: int
    product: Callable[[jax.Array, jax.Array], jax.Array]

    def filled(self, x_ND: jax.Array) -> jax.Array:
        """Copy the tokens into their slots, (num, D); empty slots are zeros."""
        num_tokens, top = self.of_choice_NK.shape
        tokens = jnp.repeat(jnp.arange(num_tokens, dtype=jnp.int32), top)
        token_of_slot = jnp.full(self.num, num_tokens, jnp.int32)
        token_of_slot = token_of_slot.at[self.of_choice_NK.reshape(-1)].set(tokens, mode="drop")
        return jnp.take(x_ND, token_of_slot, axis=0, mode="fill", fill_value=0)

    def combined(self, out: jax.Array, weights_NK: jax.Array) -> jax.Array:
        """Return the weighted sum of each token's slots, float32 (N, D); choices without a slot add 0."""
        total = jnp.zeros((len(weights_NK), out.shape[-1]), jnp.float32)
        for k in range(weights_NK.shape[1]):
            of_k = jnp.take(out, self.of_choice_NK[:, k], axis=0, mode="fill", fill_value=0)
            total += weights_NK[:, k, None] * of_k.astype(jnp.float32)
        return total


def slots_of_rows(experts_BTK: jax.Array, num_experts: int, room: int) -> Slots:
    """Return slots (expert, row, place) with `room` places for each row and expert.

    Args:
      experts_BTK: int32; `num_experts` if a choice is dropped. At most `room` of a row are equal.
      num_experts: number of experts.
      room: number of places of each row and expert.
    """
    rows, _, top = experts_BTK.shape
    flat = experts_BTK.reshape(rows, -1)
    place = jax.vmap(lambda experts: _rank_choices(experts, num_experts))(flat)
    slot = (flat * rows + jnp.arange(rows, dtype=jnp.int32)[:, None]) * room + place
    num = num_experts * rows * room
    slot = jnp.where(flat < num_experts, slot, num).reshape(-1, top)

    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        y = jnp.einsum("ESD,EDF->ESF", x.reshape(len(kernel), -1, x.shape[-1]), kernel)
        return y.reshape(-1, y.shape[-1])

    return Slots(slot, num, product)


def slots_of_all(experts_NK: jax.Array, num_experts: int, *, has_blocks: bool) -> Slots:
    """Return slots with room for all tokens, whatever experts they choose.

    Args:
      experts_NK: int32; `num_experts` if a choice belongs to another device. A token chooses an expert once.
      num_experts: number of experts.
      has_blocks: whether slots are in blocks of one expert each; otherwise they have no gaps, for ragged
        products.
    """
    num_tokens, top = experts_NK.shape
    flat = experts_NK.reshape(-1)
    most = num_tokens * min(top, num_experts)
    counts_E = jnp.bincount(flat, length=num_experts + 1)[:num_experts].astype(jnp.int32)
    place = _rank_choices(flat, num_experts)
    if not has_blocks:
        start_E = jnp.cumsum(counts_E) - counts_E
        slot = jnp.where(flat < num_experts, jnp.take(start_E, flat, mode="clip") + place, most)

        def ragged(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return multiply_ragged(x, kernel, counts_E)

        return Slots(slot.reshape(-1, top), most, ragged)
    # half of an expert's mean load: at most 1.5 times as many slots as choices
    size = max(8, -(-most // (2 * num_experts)))
    num_blocks = most // size + num_experts
    blocks_E = -(-counts_E // size)
    ends_E = jnp.cumsum(blocks_E)
    slot = jnp.take(ends_E - blocks_E, flat, mode="clip") * size + place
    slot = jnp.where(flat < num_experts, slot, num_blocks * size)
    # empty blocks at the end have the last expert
    expert_of_block = jnp.searchsorted(ends_E, jnp.arange(num_blocks), side="right").clip(max=num_experts - 1)

    # the backward pass gathers the kernels of blocks again, instead of keeping them
    @jax.checkpoint
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        of_blocks = jnp.take(kernel, expert_of_block, axis=0)
        y = jnp.einsum("NSD,NDF->NSF", x.reshape(num_blocks, size, -1), of_blocks)
        return y.reshape(num_blocks * size, -1)

    return Slots(slot.reshape(-1, top), num_blocks * size, product)


@jax.custom_vjp
def multiply_ragged(x: jax.Array, kernel: jax.Array, counts_E: jax.Array) -> jax.Array:
    """Multiply rows, sorted by expert, with the kernel of their expert.

    This is `jax.lax.ragged_dot` with a batching rule: batched replicas are computed one after the other.

    Args:
      x: (N, D); rows after those of all experts have undefined results.
      kernel: (E, D, F).
      counts_E: int32, number of rows of each expert.

    Returns:
      (N, F), in the dtype of x.
    """
    return _multiply_ragged(x, kernel, counts_E)


@jax.custom_batching.sequential_vmap
def _multiply_ragged(x: jax.Array, kernel: jax.Array, counts_E: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, kernel, counts_E)


@jax.custom_batching.sequential_vmap
def _compute_ragged_gradient(x: jax.Array, dy: jax.Array, counts_E: jax.Array) -> jax.Array:
    over_rows = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )
    return lax.ragged_dot_general(x, dy, counts_E, over_rows)


def _multiply_ragged_forward(x: jax.Array, kernel: jax.Array, counts_E: jax.Array) -> Any:
    return _multiply_ragged(x, kernel, counts_E), (x, kernel, counts_E)


def _multiply_ragged_backward(kept: Any, dy: jax.Array) -> Any:
    x, kernel, counts_E = kept
    dx = _multiply_ragged(dy, jnp.swapaxes(kernel, 1, 2), counts_E)
    return dx, _compute_ragged_gradient(x, dy, counts_E), None


multiply_ragged.defvjp(_multiply_ragged_forward, _multiply_ragged_backward)


def _rank_choices(experts: jax.Array, num_experts: int) -> jax.Array:
    """Return the number of earlier choices of the same expert, int32 (choices,)."""
    order = jnp.argsort(experts, stable=True)
    counts = jnp.bincount(experts, length=num_experts + 1)
    starts = jnp.cumsum(counts) - counts
    ranks = jnp.arange(len(experts), dtype=jnp.int32) - starts[experts[order]].astype(jnp.int32)
    return jnp.zeros_like(experts).at[order].set(ranks)
