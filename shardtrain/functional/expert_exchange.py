"""Compute experts over a mesh: send tokens to the devices of their experts, and the outputs back.

A run gives it to the models' mixtures of experts among their operations (docs/decisions/0040);
outside a run a model computes its experts itself. Next: `activation_rules.py`.
"""

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jax import lax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.errors.messages import refuse
from shardtrain.functional.mesh_axes import find_mesh_axes, map_shards, num_devices


class Choice(Protocol):
    """The experts of each token, a NamedTuple of two arrays (batch, seq, choices).

    Their numbers are int32, and that of no expert where a choice was dropped; their weights are float32.
    """

    @property
    def experts_BTK(self) -> jax.Array: ...

    @property
    def weights_BTK(self) -> jax.Array: ...

    def _replace(self, **arrays: jax.Array) -> Any: ...


class LocalExperts(Protocol):
    """The experts of a model over tokens of one device, as `models.experts.LocalExperts` computes them."""

    @property
    def is_dropless(self) -> bool: ...

    def dropless(self, x_BTD: jax.Array, choice: Any, kernels: Any) -> jax.Array:
        """Return the sums over the experts whose kernels are given, float32 (B, T, D)."""
        ...

    def slots(self, choice: Any) -> Any:
        """Return the slots of all experts: equally many for each, sorted by expert."""
        ...

    def filled(self, slots: Any, x_BTD: jax.Array) -> jax.Array:
        """Return the tokens in their slots, (slots, D)."""
        ...

    def outputs(self, slots: Any, x: jax.Array, kernels: Any) -> jax.Array:
        """Return the outputs of experts, (slots, D), for as many experts as there are kernels."""
        ...

    def combined(self, slots: Any, out: jax.Array, choice: Any) -> jax.Array:
        """Return the weighted sums of each token's slots, float32 (tokens, D)."""
        ...


def exchange_tokens(
    experts: LocalExperts, x_BTD: jax.Array, choice: Choice, kernels: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Compute experts that are sharded over a mesh; return their weighted sums for each token, float32.

    If experts have a capacity, devices exchange that number of tokens by all-to-all. Without one a device may
    need all tokens: they are all-gathered, and the sums are reduce-scattered.

    Args:
      experts: the model's own computation on one device.
      x_BTD: named (batch, seq, embed).
      choice: named (batch, seq, no name).
      kernels: named (experts, embed, no name, mlp) and (experts, mlp, embed).

    Raises:
      ValueError: lists every size that cannot be split.
    """
    mesh = jax.sharding.get_abstract_mesh()
    rows, seq = find_mesh_axes(axes.BATCH, axes.SEQ)
    (by_expert,) = find_mesh_axes(axes.EXPERTS)
    (hidden,) = find_mesh_axes(axes.MLP)
    size = {
        axes.BATCH: num_devices(rows, mesh.shape),
        axes.EXPERTS: num_devices(by_expert, mesh.shape),
        axes.MLP: num_devices(hidden, mesh.shape),
    }
    problems = [
        f"{number} {dim} cannot be split over {list(names)} of total size {num}: {number} % {num} ="
        f" {number % num}. Use another mesh, or the rules {dim} = [] of parameters and activations"
        for dim, number, names, num in (
            (axes.EXPERTS, kernels[1].shape[0], by_expert, size[axes.EXPERTS]),
            (axes.MLP, kernels[1].shape[1], hidden, size[axes.MLP]),
        )
        if number % num
    ]
    refuse("experts cannot be sharded over this mesh", problems)
    # a few rows that are only traced need not divide
    rows = rows if x_BTD.shape[0] % size[axes.BATCH] == 0 else ()
    # one copy for each part of the hidden features: then gradients are reduced where the compiler
    # reduces those of any layer, and no input of the program below is on several devices
    lead = (hidden or None, rows or None, seq or None)
    copied = [_copy_for_mlp(x, size[axes.MLP]) for x in (x_BTD, choice.weights_BTK)]
    in_up = PartitionSpec(by_expert or None, None, None, hidden or None)
    in_down = PartitionSpec(by_expert or None, hidden or None, None)

    def of_device(x: Any, weights: Any, numbers: Any, *kernels: Any) -> jax.Array:
        own = choice._replace(experts_BTK=numbers, weights_BTK=weights[0])
        compute = _gather if experts.is_dropless else _exchange
        return compute(experts, x[0], own, kernels, by_expert)[None]

    split, of_numbers = PartitionSpec(*lead), PartitionSpec(*lead[1:])
    compute_parts = map_shards(of_device, (split, split, of_numbers, in_up, in_down), split)
    parts = compute_parts(*copied, choice.experts_BTK, *kernels)
    return with_logical_constraint(parts, (axes.MLP, axes.BATCH, axes.SEQ, axes.EMBED)).sum(0)


def _copy_for_mlp(x: jax.Array, number: int) -> jax.Array:
    """Return x with a leading dim of copies, sharded as hidden features are."""
    x = jnp.broadcast_to(x, (number, *x.shape))
    return with_logical_constraint(x, (axes.MLP, axes.BATCH, axes.SEQ, None))


def _exchange(experts: LocalExperts, x: Any, choice: Any, kernels: Any, over: tuple[str, ...]) -> jax.Array:
    """Send each token to the devices of its experts, which have as many slots for every device."""
    slots = experts.slots(choice)
    filled = experts.filled(slots, x)
    if not over:
        return experts.combined(slots, experts.outputs(slots, filled, kernels), choice).reshape(x.shape)
    num_own = len(kernels[0])
    # (all experts, slots of this device) -> (own experts, slots of all devices)
    filled = filled.reshape(-1, len(filled) // (num_own * _size(over)), filled.shape[-1])
    arrived = lax.all_to_all(filled, over, 0, 1, tiled=True)
    out = experts.outputs(slots, arrived.reshape(-1, arrived.shape[-1]), kernels)
    back = lax.all_to_all(out.reshape(arrived.shape), over, 1, 0, tiled=True)
    return experts.combined(slots, back.reshape(-1, back.shape[-1]), choice).reshape(x.shape)


def _gather(experts: LocalExperts, x: Any, choice: Any, kernels: Any, over: tuple[str, ...]) -> jax.Array:
    """Gather the tokens of all devices, compute own experts, and send each device the sums of its tokens."""
    if not over:
        return experts.dropless(x, choice, kernels)
    num_own = len(kernels[0])
    x, numbers, weights = (
        lax.all_gather(array, over, axis=0, tiled=True)
        for array in (x, choice.experts_BTK, choice.weights_BTK)
    )
    numbers = numbers - lax.axis_index(over) * num_own
    is_own = (numbers >= 0) & (numbers < num_own)
    own = choice._replace(experts_BTK=jnp.where(is_own, numbers, num_own), weights_BTK=weights)
    sums = experts.dropless(x, own, kernels).astype(x.dtype)
    return lax.psum_scatter(sums, over, scatter_dimension=0, tiled=True)


def _size(names: tuple[str, ...]) -> int:
    return math.prod(lax.axis_size(name) for name in names)
