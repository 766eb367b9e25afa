"""A mixture of experts in place of a block's feed-forward: a router, experts, and a shared feed-forward.

`experts_options.py` has its options, `experts_routing.py` the choice of experts and its losses,
`experts_products.py` the matrix products. The layer names dims and knows no mesh: a run that shards experts
or tokens gives it a function that exchanges them (docs/decisions/0040).
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, EXPERTS, MLP, SEQ
from shardtrain.models.experts_options import Experts
from shardtrain.models.experts_products import Slots, slots_of_all, slots_of_rows
from shardtrain.models.experts_routing import Choice, choose
from shardtrain.models.layers import cast_and_constrain, normal, parameter
from shardtrain.models.ops import WithOps
from shardtrain.models.residual_stream import STREAM, gather
from shardtrain.models.transformer import FeedForward
from shardtrain.models.transformer_options import BlockOptions


class RouterBias(nnx.Variable):
    """A bias of the experts' scores, only for the choice of experts; it is part of the model's state."""


class MixtureOfExperts(WithOps):
    """Apply to each token the experts that a router chooses for it, and the shared feed-forward if any.

    Experts have no biases. The layer maps (batch, seq, embed) back to the residual stream.
    """

    def __init__(self, config: BlockOptions, *, rngs: nnx.Rngs):
        options = config.experts
        assert options is not None
        self.config, self.options = config, options
        sizes = {**config.sizes, EXPERTS: options.num}
        router = 0.02 * jax.random.normal(rngs.params(), (config.embed, options.num), jnp.float32)
        self.router = parameter(router, (EMBED, None))
        self.router_bias = RouterBias(jnp.zeros(options.num, jnp.float32)) if options.bias else None
        self.up = normal((EXPERTS, EMBED, MLP), sizes=sizes, std=0.02, rngs=rngs)
        gated = config.activation == "swiglu"
        self.gate = normal((EXPERTS, EMBED, MLP), sizes=sizes, std=0.02, rngs=rngs) if gated else None
        # smaller for the output to the residual stream, as in `transformer.make_linear`
        std = 0.02 / math.sqrt(2 * config.num_layers)
        self.down = normal((EXPERTS, MLP, EMBED), sizes=sizes, std=std, rngs=rngs)
        wide = replace(config, mlp=max(options.shared, 1) * sizes[MLP])
        self.shared = FeedForward(wide, rngs=rngs) if options.shared else None
        gated_shared = options.shared_gate == "sigmoid"
        self.shared_gate = normal((EMBED,), sizes=sizes, std=0.02, rngs=rngs) if gated_shared else None

    def __call__(self, x_BTD: jax.Array, *, dropless: bool = False) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output of the layer, and the counts of its router (`experts_routing.add_block`).

        Args:
          x_BTD: the normed residual stream, from `read_by_products`.
          dropless: whether experts take all tokens, regardless of their capacity.
        """
        options = replace(self.options, capacity=None) if dropless else self.options
        of_products_BTD, x_BTD = x_BTD, gather(self.ops, x_BTD)
        logits_BTE = jnp.tensordot(
            x_BTD.astype(jnp.float32),
            cast_and_constrain(self.router, (EMBED, None), "float32"),
            1,
            precision="highest",
        )
        logits_BTE = with_logical_constraint(logits_BTE, (BATCH, SEQ, None))
        bias_E = None if self.router_bias is None else self.router_bias[...]
        choice, counts = choose(options, logits_BTE, bias_E)
        blocks = self.ops.has_expert_blocks
        experts = LocalExperts(options, self.config.activation, x_BTD.shape[1], has_blocks=blocks)
        exchange, kernels = self.ops.experts, self._kernels()
        if exchange is None:
            y_BTD = experts(x_BTD, choice, kernels)
        else:
            y_BTD = exchange(experts, x_BTD, choice, kernels)
        y_BTD = with_logical_constraint(y_BTD.astype(x_BTD.dtype), (BATCH, SEQ, EMBED))
        y_BTD = with_logical_constraint(y_BTD, STREAM)
        if self.shared is not None:
            y_BTD += self._gate(self.shared(of_products_BTD), x_BTD)
        return y_BTD, counts

    def _gate(self, y_BTD: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Return the output of the shared feed-forward times its gate, if it has one."""
        if self.shared_gate is None:
            return y_BTD
        gate_BT1 = (
            x_BTD.astype(jnp.float32) @ cast_and_constrain(self.shared_gate, (EMBED,), "float32")[:, None]
        )
        gate_BT1 = with_logical_constraint(jax.nn.sigmoid(gate_BT1), (*STREAM[:2], None))
        return (y_BTD * gate_BT1).astype(y_BTD.dtype)

    def _kernels(self) -> tuple[jax.Array, jax.Array]:
        """Return the kernels in the compute dtype: up and gate (experts, embed, 1 or 2, mlp), and down."""
        both = self.up, self.gate
        into = [kernel[...].astype(self.config.dtype) for kernel in both if kernel is not None]
        up = with_logical_constraint(jnp.stack(into, 2), (EXPERTS, EMBED, None, MLP))
        return up, cast_and_constrain(self.down, (EXPERTS, MLP, EMBED), self.config.dtype)


class LocalExperts:
    """The computation of a device's experts over its tokens.

    Args:
      options: options of the mixture.
      activation: the activation of the configuration.
      seq: number of tokens of a whole row, of which a device may have a part.
      has_blocks: see `experts_products.slots_of_all`.
    """

    def __init__(self, options: Experts, activation: str, seq: int, *, has_blocks: bool) -> None:
        self.options, self.activation, self.seq, self.has_blocks = options, activation, seq, has_blocks

    @property
    def is_dropless(self) -> bool:
        """Whether each expert has room for all tokens."""
        return self.options.room(self.seq) >= self.seq

    def __call__(self, x_BTD: jax.Array, choice: Choice, kernels: Any) -> jax.Array:
        """Return the weighted sum of the outputs of each token's experts, float32 (B, T, D)."""
        if self.is_dropless:
            return self.dropless(x_BTD, choice, kernels)
        slots = self.slots(choice)
        out = self.outputs(slots, self.filled(slots, x_BTD), kernels)
        return self.combined(slots, out, choice).reshape(x_BTD.shape)

    def dropless(self, x_BTD: jax.Array, choice: Choice, kernels: Any) -> jax.Array:
        """Do the same with room for all tokens in each expert; choices of other experts add nothing."""
        top, x_ND = choice.experts_BTK.shape[-1], x_BTD.reshape(-1, x_BTD.shape[-1])
        experts_NK = choice.experts_BTK.reshape(-1, top)
        slots = slots_of_all(experts_NK, len(kernels[0]), has_blocks=self.has_blocks)
        out = self.outputs(slots, slots.filled(x_ND), kernels)
        return self.combined(slots, out, choice).reshape(x_BTD.shape)

    def slots(self, choice: Choice) -> Slots:
        """Return the slots of all experts, with room for their capacity in each row."""
        room = min(self.options.room(self.seq), choice.experts_BTK.shape[1])
        return slots_of_rows(choice.experts_BTK, self.options.num, room)

    def filled(self, slots: Slots, x_BTD: jax.Array) -> jax.Array:
        """Return the tokens in their slots, (slots, D)."""
        return slots.filled(x_BTD.reshape(-1, x_BTD.shape[-1]))

    def outputs(self, slots: Slots, x: jax.Array, kernels: Any) -> jax.Array:
        """Apply the experts to the tokens in their slots, (slots, D)."""
        up, down = kernels
        h = slots.product(x, up.reshape(*up.shape[:2], -1)).reshape(len(x), up.shape[2], -1)
        if up.shape[2] == 2:
            h = h[:, 0] * jax.nn.silu(h[:, 1])
        else:
            h = jax.nn.gelu(h[:, 0], approximate=self.activation == "gelu")
        return slots.product(h, down)

    def combined(self, slots: Slots, out: jax.Array, choice: Choice) -> jax.Array:
        """Return the weighted sum of the outputs of each token's experts, float32 (N, D)."""
        return slots.combined(out, choice.weights_BTK.reshape(-1, choice.weights_BTK.shape[-1]))
