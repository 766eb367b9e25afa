"""Experts over a mesh: tokens go to the devices that have their experts, and come back.

A run hands it to the models' mixtures of experts with the rules of their constraints (docs/decisions/0040);
outside a run a model computes its experts itself. Next: `activation_rules.py`.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from shardtrain import axes
from shardtrain.errors.messages import problems_error
from shardtrain.functional.context_attention import find_mesh_axes


class Choice(Protocol):
    """The experts of each token, a NamedTuple of two arrays (batch, seq, choices).

    Their numbers are int32, and that of no expert where a choice was dropped; their weights are float32.
    """

    @property
    def experts_BTK(self) -> jax.Array: ...

    @property
    def weights_BTK(self) -> jax.Array: ...

    def _replace(self, **arrays: jax.Array) -> Any: ...


class OfDevice(Protocol):
    """The experts of a model over tokens of one device, as `models.experts.OfDevice` computes them."""

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


@dataclass(frozen=True)
class ExpertExchange:
    """Experts that are sharded over mesh axes along the dim experts, and their hidden features along mlp.

    Tokens that an expert may take of a row are bounded with a capacity: then devices exchange as many tokens
    by all-to-all. Without one a device may need all tokens: they are gathered, and their sums are scattered.
    """

    def __call__(
        self, experts: OfDevice, x_BTD: jax.Array, choice: Choice, kernels: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """Return the weighted sums of the outputs of each token's experts, float32, named as x.

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
        size = {name: math.prod(mesh.shape[axis] for axis in names) for name, names in
                (("rows", rows), ("experts", by_expert), ("mlp", hidden))}  # fmt: skip
        problems = [
            f"{number} {dim} cannot be split over {list(names)} of total size {num}: {number} % {num} ="
            f" {number % num}. Use another mesh, or the rules {dim} = [] of parameters and activations"
            for dim, number, names, num in (
                (axes.EXPERTS, kernels[1].shape[0], by_expert, size["experts"]),
                (axes.MLP, kernels[1].shape[1], hidden, size["mlp"]),
            )
            if number % num
        ]
        if problems:
            raise problems_error("experts cannot be sharded over this mesh", problems)
        # a few rows that are only traced need not divide
        rows = rows if x_BTD.shape[0] % size["rows"] == 0 else ()
        # one copy for each part of the hidden features: then gradients are reduced where the compiler
        # reduces those of any layer, and no input of the program below is on several devices
        lead = (hidden or None, rows or None, seq or None)
        copied = [_copies(x, size["mlp"]) for x in (x_BTD, choice.weights_BTK)]
        in_up = PartitionSpec(by_expert or None, None, None, hidden or None)
        in_down = PartitionSpec(by_expert or None, hidden or None, None)

        def of_device(x: Any, weights: Any, numbers: Any, *kernels: Any) -> jax.Array:
            own = choice._replace(experts_BTK=numbers, weights_BTK=weights[0])
            compute = _gather if experts.is_dropless else _exchange
            return compute(experts, x[0], own, kernels, by_expert)[None]

        free = {
            name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Auto
        }
        parts = jax.shard_map(
            of_device,
            in_specs=(PartitionSpec(*lead), PartitionSpec(*lead), PartitionSpec(*lead[1:]), in_up, in_down),
            out_specs=PartitionSpec(*lead),
            axis_names=free,
            check_vma=False,
        )(*copied, choice.experts_BTK, *kernels)
        return with_logical_constraint(parts, (axes.MLP, axes.BATCH, axes.SEQ, axes.EMBED)).sum(0)


def _copies(x: jax.Array, number: int) -> jax.Array:
    """Return x with a leading dim of copies, sharded as hidden features are."""
    x = jnp.broadcast_to(x, (number, *x.shape))
    return with_logical_constraint(x, (axes.MLP, axes.BATCH, axes.SEQ, None))


def _exchange(experts: OfDevice, x: Any, choice: Any, kernels: Any, over: tuple[str, ...]) -> jax.Array:
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


def _gather(experts: OfDevice, x: Any, choice: Any, kernels: Any, over: tuple[str, ...]) -> jax.Array:
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
