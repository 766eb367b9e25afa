"""What pieces cost and use, against arithmetic; and stages cut by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.loss import Regularized, classification_loss, next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.models.resnet import ResNetConfig
from shardtrain.pipeline.costs import ChainTrace
from shardtrain.pipeline.cuts import make_partition
from shardtrain.pipeline.options import Pipeline
from shardtrain.pipeline.stacking import Partition

VOCAB, SEQ, EMBED, MLP = 64, 8, 16, 32
TIED = DecoderConfig(vocab=VOCAB, seq=SEQ, embed=EMBED, num_layers=4, num_heads=2, mlp=MLP, bias=False)
BIASED = DecoderConfig(vocab=VOCAB, seq=SEQ, embed=EMBED, num_layers=4, num_heads=2, mlp=MLP)
BATCH = {"tokens": np.zeros((2, SEQ + 1), np.int32), "weights": np.ones(2, np.float32)}
IMAGES = {
    "image": np.zeros((2, 8, 8, 1), np.float32),
    "label": np.zeros(2, np.int32),
    "weights": np.ones(2, np.float32),
}


def test_a_decoders_parameters_by_hand():
    traced = ChainTrace(from_nnx(TIED), next_token_loss, BATCH)
    block = 4 * EMBED * EMBED + 2 * EMBED * MLP + 2 * EMBED
    costs = traced.costs("params")
    assert list(costs.blocks) == [block] * 4
    assert costs.first == VOCAB * EMBED + SEQ * EMBED
    assert costs.last == VOCAB * EMBED + EMBED
    assert traced.first_paths == {"embedding", "positions"}
    assert traced.last_paths == {"embedding", "final_norm/scale"}


def test_the_last_part_has_the_loss_of_training_or_of_evaluation():
    model = from_nnx(TIED)
    traced = ChainTrace(model, Regularized(next_token_loss, z_loss=0.1), BATCH)
    one = Partition(num_stages=1, counts=(4,))
    params, state = model.init(jax.random.key(0))

    @jax.jit
    def losses(params):
        return [
            traced.run_part(one, 0, params, state, jax.random.key(1), train, BATCH, None)[0]
            for train in (True, False)
        ]

    (training, (count, metrics)), (evaluation, _) = losses(params)
    np.testing.assert_allclose(evaluation, metrics["cross_entropy"][0], rtol=1e-6)
    assert training > evaluation + count


def test_a_decoders_flops_are_those_of_its_products():
    traced = ChainTrace(from_nnx(TIED), next_token_loss, BATCH)
    tokens = 2 * SEQ
    products = tokens * 2 * (4 * EMBED * EMBED + 2 * EMBED * MLP) + 2 * tokens * 2 * SEQ * EMBED
    costs = traced.costs("flops")
    assert set(costs.blocks) == {costs.blocks[0]}
    assert products < costs.blocks[0] < 1.5 * products
    head = tokens * 2 * EMBED * VOCAB
    assert head < costs.last < 1.5 * head
    assert costs.first < head


def test_blocks_of_a_list_cost_each_its_own():
    model = from_nnx(
        ResNetConfig(depth=20, filters=4, num_groups=2, height=8, width=8, colours=1, classes=10)
    )
    traced = ChainTrace(model, classification_loss, IMAGES)
    sizes = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in traced.params.items()}
    costs = traced.costs("params")
    assert sum(costs.blocks) == sizes["blocks"]
    assert costs.first + costs.last == sum(sizes.values()) - sizes["blocks"]
    assert len(set(traced.costs("flops").blocks)) > 2


@pytest.mark.parametrize(
    ("stages", "counts"),
    [("params", (2, 2)), ("flops", (3, 1))],
)
def test_a_wide_head_takes_blocks_from_the_last_stage(stages, counts):
    config = DecoderConfig(vocab=2048, seq=SEQ, embed=EMBED, num_layers=4, num_heads=2, mlp=MLP)
    found = make_partition(from_nnx(config), Pipeline(stages=stages), 2, next_token_loss, BATCH)
    assert found.counts == counts


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, image):
        return self.linear(image.reshape(len(image), -1))


@pytest.mark.parametrize(
    "model",
    [from_nnx(Plain), from_linen(LinenDecoder(BIASED), jax.ShapeDtypeStruct((1, SEQ), jnp.int32))],
    ids=["nnx", "linen"],
)
def test_a_model_without_blocks_is_refused(model):
    with pytest.raises(ValueError, match=r"does not say what its blocks are.*docs/pipeline\.md.*pipeline=1"):
        make_partition(model, Pipeline(), 2, classification_loss, IMAGES)
