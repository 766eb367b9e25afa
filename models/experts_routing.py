"""Choose the experts of each token and their weights, and count choices for losses and metrics.

Counts are kept for each row and block, so they are the same on any mesh. Next: `experts.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardtrain.models.experts_options import Experts

REPLICAS = "replicas"
"""Name of the axis of replicas, over which the losses of a microbatch are computed."""


class Choice(NamedTuple):
    """The experts of each token.

    Args:
      experts_BTK: int32, the chosen experts, the likeliest first; `num` if the token was dropped.
      weights_BTK: float32, the weight of each expert's output.
    """

    experts_BTK: jax.Array
    weights_BTK: jax.Array


def choose(
    options: Experts, logits_BTE: jax.Array, bias_E: Any = None
) -> tuple[Choice, dict[str, jax.Array]]:
    """Choose the experts of each token, and drop tokens above an expert's capacity.

    An expert takes the tokens of a sequence in order: those that have it as their first choice, then those
    that have it as their second, and so on (Lepikhin et al. 2020, GShard, algorithm 1).

    Args:
      options: options of the mixture.
      logits_BTE: float32 logits of the router.
      bias_E: float32, added to the scores only for the choice, unless it is None.

    Returns:
      The choice, and the counts of one block, as in `Routing` without the dim of blocks.
    """
    if options.scores == "softmax":
        scores_BTE = jax.nn.softmax(logits_BTE, -1)
        probabilities_BTE = scores_BTE
    else:
        scores_BTE = jax.nn.sigmoid(logits_BTE)
        probabilities_BTE = scores_BTE / scores_BTE.sum(-1, keepdims=True)
    # the largest score again and again: sharded rows stay sharded, which they would not in a sort
    left_BTE = lax.stop_gradient(scores_BTE if bias_E is None else scores_BTE + bias_E)
    if options.groups > 1:
        left_BTE = _mask_worse_groups(options, left_BTE)
    numbers_E = jnp.arange(options.num, dtype=jnp.int32)
    found, masks, weights = [], [], []
    for _ in range(options.top):
        expert_BT = jnp.argmax(left_BTE, -1).astype(jnp.int32)
        is_it_BTE = expert_BT[..., None] == numbers_E
        weights.append(jnp.where(is_it_BTE, scores_BTE, 0).sum(-1))
        left_BTE = jnp.where(is_it_BTE, -jnp.inf, left_BTE)
        found.append(expert_BT)
        masks.append(is_it_BTE)
    weights_BTK = jnp.stack(weights, -1)
    if options.is_normalised:
        weights_BTK /= weights_BTK.sum(-1, keepdims=True) + jnp.finfo(jnp.float32).tiny
    counts_BE = sum(mask.sum(1, dtype=jnp.float32) for mask in masks)
    experts_BTK, dropped_B = _limit_capacity(options, jnp.stack(found, -1), masks)
    of_block = {
        "chosen": counts_BE,
        "probability": probabilities_BTE.sum(1),
        "z": jnp.square(jax.nn.logsumexp(logits_BTE, -1)).sum(1),
        "dropped": dropped_B,
    }
    return Choice(experts_BTK, weights_BTK * options.scale), of_block


def _mask_worse_groups(options: Experts, scores_BTE: jax.Array) -> jax.Array:
    """Set the scores of experts outside of a token's best groups to -inf."""
    size = options.num // options.groups
    scores_BTGN = scores_BTE.reshape(*scores_BTE.shape[:2], options.groups, size)
    left_BTG = scores_BTGN.max(-1)
    if options.scores == "sigmoid" and size > 1:
        is_first = jnp.argmax(scores_BTGN, -1)[..., None] == jnp.arange(size)
        left_BTG += jnp.where(is_first, -jnp.inf, scores_BTGN).max(-1)
    is_best_BTG = jnp.zeros(left_BTG.shape, bool)
    for _ in range(options.top_groups):
        is_it_BTG = jnp.argmax(left_BTG, -1)[..., None] == jnp.arange(options.groups)
        is_best_BTG |= is_it_BTG
        left_BTG = jnp.where(is_it_BTG, -jnp.inf, left_BTG)
    return jnp.where(is_best_BTG[..., None], scores_BTGN, -jnp.inf).reshape(scores_BTE.shape)


def _limit_capacity(
    options: Experts, experts_BTK: jax.Array, masks: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Replace full experts in the choice by `num`, and count them in each row."""
    room = options.room(experts_BTK.shape[1])
    if room >= experts_BTK.shape[1]:
        # a token chooses an expert once, so none has more tokens than there are
        return experts_BTK, jnp.zeros(experts_BTK.shape[0], jnp.float32)
    taken_BE, is_full = jnp.int32(0), []
    for mask_BTE in masks:
        before_BTE = jnp.cumsum(mask_BTE, 1, dtype=jnp.int32) + taken_BE
        # number of tokens of the expert, including this one
        is_full.append(jnp.where(mask_BTE, before_BTE, 0).sum(-1) > room)
        # not the last count: a slice of sharded positions is sent by a permute (docs/decisions/0035)
        taken_BE += mask_BTE.sum(1, keepdims=True, dtype=jnp.int32)
    is_full_BTK = jnp.stack(is_full, -1)
    return (
        jnp.where(is_full_BTK, options.num, experts_BTK),
        is_full_BTK.sum((1, 2), dtype=jnp.float32),
    )


BLOCK_COUNTS = ("chosen", "probability", "z", "dropped")
"""Names of the counts of each block; the first two are per expert."""


def make_counts(options: Experts, rows: int, num_blocks: int) -> dict[str, jax.Array]:
    """Return the initial counts of all blocks: zeros (rows, blocks, ...)."""
    shapes = dict.fromkeys(BLOCK_COUNTS, (rows, num_blocks))
    shapes |= dict.fromkeys(BLOCK_COUNTS[:2], (rows, num_blocks, options.num))
    return {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}


def add_block(counts: dict[str, jax.Array], of_block: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Append the counts of the next block and drop the first entry: after all blocks they are in order.

    The residual stream then has the same shapes between all blocks, as pipelines need, and a block need not
    know its number.
    """
    return {name: jnp.concatenate([counts[name][:, 1:], of_block[name][:, None]], 1) for name in counts}


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("chosen_BLE", "probability_BLE", "z_BL", "dropped_BL"),
    meta_fields=("options", "seq"),
)
@dataclass(frozen=True, kw_only=True)
class Routing:
    """Counts of the routers of all blocks for each row of a batch; a pytree of arrays with rows first.

    Args:
      chosen_BLE: float32, number of tokens of a row that chose an expert, including dropped ones.
      probability_BLE: float32, sum of the expert's probabilities over tokens.
      z_BL: float32, sum over tokens of the squared logsumexp of their logits.
      dropped_BL: float32, number of choices that were dropped.
      options: options of the mixture.
      seq: number of tokens of a row.
    """

    chosen_BLE: jax.Array
    probability_BLE: jax.Array
    z_BL: jax.Array
    dropped_BL: jax.Array
    options: Experts
    seq: int

    def losses(
        self, weights_B: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array]]]:
        """Return the losses of the router, summed over blocks, and its metrics.

        Args:
          weights_B: float32, the weight of each row in the loss of the model; 0 for padding.
          count: float32 scalar, the number of items that the loss counts in these rows.

        Returns:
          (the mean, to be added to the mean loss; metrics: name -> (sum, count)). `router_balance` and
          `router_z` are means over blocks; `expert_load` is the tokens of a block's most loaded expert over
          the mean of all, 1 where they are balanced; `expert_drops` is the share of dropped choices.
        """
        options, num_blocks = self.options, self.z_BL.shape[1]
        total = weights_B.sum()
        tokens = jnp.where(total > 0, total, 1) * self.seq
        # of all replicas: shares of the choices, which have no gradient
        chosen_LE = _sum_over_replicas(jnp.einsum("B,BLE->LE", weights_B, self.chosen_BLE))
        share_LE = chosen_LE / jnp.maximum(chosen_LE.sum(-1, keepdims=True), 1)
        if options.over == "batch":
            # of these rows alone: means of probabilities, whose gradients replicas add up
            probability_LE = jnp.einsum("B,BLE->LE", weights_B, self.probability_BLE) / tokens
            balance_L = options.num * (share_LE * probability_LE).sum(-1)
        else:
            product_BL = (self.chosen_BLE * self.probability_BLE).sum(-1)
            balance_L = options.num / (options.top * self.seq) * (weights_B @ product_BL) / tokens
        z_L = weights_B @ self.z_BL / tokens
        metrics = {"router_balance": balance_L.mean(), "expert_load": options.num * share_LE.max(-1).mean()}
        if options.z:
            metrics["router_z"] = z_L.mean()
        found = {name: (value * count, count) for name, value in metrics.items()}
        if options.capacity is not None:
            is_row_B = (weights_B != 0).astype(jnp.float32)
            num_choices = is_row_B.sum() * (self.seq * options.top * num_blocks)
            found["expert_drops"] = (is_row_B @ self.dropped_BL.sum(1), num_choices)
        return options.balance * balance_L.sum() + options.z * z_L.sum(), found

    def move_bias(self, bias_LE: jax.Array) -> jax.Array:
        """Return the biases of the choice after this microbatch: up where an expert has too few tokens."""
        chosen_LE = _sum_over_replicas(self.chosen_BLE.sum(0))
        # whole numbers: a rounded mean would move the bias of an expert that has just as many
        error_LE = chosen_LE.sum(-1, keepdims=True) - self.options.num * chosen_LE
        return bias_LE + self.options.bias * jnp.sign(error_LE)


def read_routing(experts: Experts | None, stream: Any) -> Routing | None:
    """Return the counts of all routers from the stream after the blocks; None without experts."""
    if experts is None or not isinstance(stream, dict):
        return None
    counts = stream["routers"]
    return Routing(
        chosen_BLE=counts["chosen"], probability_BLE=counts["probability"], z_BL=counts["z"],
        dropped_BL=counts["dropped"], options=experts, seq=stream["x"].shape[1],
    )  # fmt: skip


def _sum_over_replicas(x: jax.Array) -> jax.Array:
    """Sum over the replicas that share a microbatch, if the axis of replicas exists."""
    try:
        return lax.psum(x, REPLICAS)
    except NameError:
        return x


def move_bias(experts: Experts | None, mlp: Any, stream: Any) -> None:
    """Move the biases of routers, if there are any, towards equal loads after a training step."""
    routing = read_routing(experts, stream)
    if routing is not None and routing.options.bias:
        mlp.router_bias[...] = routing.move_bias(mlp.router_bias[...])
