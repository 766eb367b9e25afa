"""Weights of tokens, which a model's own losses see as one weight for each row."""

from typing import Any

import jax.numpy as jnp
import pytest

from shardtrain.functional.auxiliary import Outputs, summed_loss
from shardtrain.models.experts_options import read_experts
from shardtrain.models.experts_routing import Routing


@pytest.mark.parametrize("weights", [[[1.0], [0.0]], [[0.0, 0.0, 0.5], [0.0, 0.0, 0.0]], [1.0, 0.0]])
def test_a_row_counts_for_routers_if_any_of_its_tokens_does(weights):
    options: Any = read_experts("num=2,top=1")
    chosen = jnp.array([[[2.0, 0.0]], [[0.0, 2.0]]])
    routing = Routing(
        chosen_BLE=chosen, probability_BLE=chosen, z_BL=jnp.ones((2, 1)), dropped_BL=jnp.zeros((2, 1)),
        options=options, seq=2,
    )  # fmt: skip
    outputs: Any = Outputs(jnp.ones(2), routing)
    batch: Any = {"weights": jnp.array(weights)}
    metrics = summed_loss(lambda apply, batch: (apply().sum(), 2), lambda: outputs, batch)[2]
    # of the first row's tokens alone, all of which chose one of two experts
    assert metrics["expert_load"][0] / metrics["expert_load"][1] == 2
