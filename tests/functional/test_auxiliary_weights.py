"""A model's own losses weigh each row by what the loss counts in it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.functional.auxiliary import Outputs, sum_loss
from shardtrain.functional.loss import masked_token_loss, next_token_loss
from shardtrain.models.experts_options import Experts
from shardtrain.models.experts_routing import Routing

ROWS, SEQ = 4, 6


def positive_weights(apply, batch):
    """A loss whose count has no derivative."""
    return next_token_loss(apply, batch)[0], (batch["weights"] > 0).sum()


@pytest.mark.parametrize(
    ("loss", "counted"),
    [(next_token_loss, "tokens"), (next_token_loss, "first unused"),
     (masked_token_loss, "rows"), (positive_weights, "tokens")],
)  # fmt: skip
def test_penalties_of_any_split_are_means_weighted_by_what_rows_count(loss, counted):
    """By hand: each row's penalty times its number of counted tokens; so microbatches and replicas add up."""
    random = np.random.default_rng(0)
    shape = {"rows": (ROWS,), "tokens": (ROWS, SEQ), "first unused": (ROWS, SEQ + 1)}[counted]
    weights = (random.random(shape) < 0.5) * random.choice([0.5, 1, 2], shape)
    tokens = random.integers(0, 3, (ROWS, SEQ + (loss is not masked_token_loss)))
    batch = {"tokens": tokens, "weights": weights}
    per_row = weights[:, 1:].sum(1) if counted == "first unused" else weights.reshape(ROWS, -1).sum(1)
    per_row = per_row * SEQ if counted == "rows" else per_row
    if loss is masked_token_loss:
        chosen = random.integers(0, 2, tokens.shape)
        batch |= {"targets": tokens, "chosen": chosen}
        per_row = weights * chosen.sum(1)
    if loss is positive_weights:
        per_row = (weights > 0).sum(1)
    z = random.random(ROWS) * SEQ
    options = Experts(num=2, top=1, balance=0, z=1)

    def losses(z, some):
        rows = len(z)
        shapes = {"chosen_BLE": (rows, 1, 2), "probability_BLE": (rows, 1, 2), "dropped_BL": (rows, 1)}
        arrays: Any = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        routing = Routing(**arrays, z_BL=z[:, None], options=options, seq=SEQ)
        return [
            sum_loss(loss, lambda *_, t=train: Outputs(jnp.zeros((rows, SEQ, 3)), routing, train=t), some)[0]
            for train in (True, False)
        ]

    compiled = jax.jit(losses)

    def penalty(rows):
        with_, without = compiled(z[rows], {name: x[rows] for name, x in batch.items()})
        return float(with_ - without)

    expected = [count * mean / SEQ for count, mean in zip(per_row, z, strict=True)]
    assert penalty(slice(None)) == pytest.approx(sum(expected), rel=1e-5)
    assert penalty(slice(1)) + penalty(slice(1, None)) == pytest.approx(sum(expected), rel=1e-5)


@pytest.mark.parametrize("weights", [[[1.0], [0.0]], [[0.0, 0.0, 0.5], [0.0, 0.0, 0.0]], [1.0, 0.0]])
def test_a_row_counts_for_routers_if_any_of_its_tokens_does(weights):
    options = Experts(num=2, top=1)
    chosen = jnp.array([[[2.0, 0.0]], [[0.0, 2.0]]])
    routing = Routing(
        chosen_BLE=chosen, probability_BLE=chosen, z_BL=jnp.ones((2, 1)), dropped_BL=jnp.zeros((2, 1)),
        options=options, seq=2,
    )  # fmt: skip
    outputs: Any = Outputs(jnp.ones(2), routing)
    batch: Any = {"weights": jnp.array(weights)}
    metrics = sum_loss(lambda apply, batch: (apply().sum(), 2), lambda: outputs, batch)[2]
    # of the first row's tokens alone, all of which chose one of two experts
    assert metrics["expert_load"][0] / metrics["expert_load"][1] == 2
