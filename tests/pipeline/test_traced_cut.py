"""Models that say no blocks: the parts that tracing finds compute what the whole model does."""

import re
from itertools import pairwise

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_cut import list_cuts
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.loss import (
    Regularized,
    classification_loss,
    find_evaluation_loss,
    next_token_loss,
    translation_loss,
)
from shardtrain.functional.model import Model, path_text
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import row_key
from shardtrain.pipeline.costs import STATE
from shardtrain.pipeline.cuts import make_partitions, trace_parts
from shardtrain.pipeline.options import Pipeline
from shardtrain.pipeline.partition import cut, cut_narrowly
from shardtrain.pipeline.stage_model import StageModel

ROWS, SEQ, VOCAB, EMBED = 4, 6, 11, 8
WEIGHTS = np.array([1, 1, 0, 1], np.float32)


class ConvNet(nn.Module):
    """Batch norm, dropout and skips, as linen models are written."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(4, (3, 3))(x)
        for _ in range(2):
            y = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
            x = x + nn.Dropout(0.2, deterministic=not train)(y)
        return nn.Dense(5)(x.mean((1, 2)))


class Translator(nnx.Module):
    """An encoder and a decoder with masks and two inputs, written plainly, in calls of every kind."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.encoder = nnx.List([nnx.Linear(EMBED, EMBED, rngs=rngs) for _ in range(2)])
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.query, self.key = (nnx.Linear(EMBED, EMBED, rngs=rngs) for _ in range(2))
        self.steps = nnx.Param(0.3 * jax.random.normal(rngs.params(), (3, EMBED, EMBED)))

    def encode(self, source):
        x = self.table(source)
        for layer in self.encoder:
            x = x + self.drop(nnx.silu(layer(x)))
        return x

    def __call__(self, source, target):
        # the whole encoder in one call, which has to be cut inside
        memory = nnx.jit(Translator.encode)(self, source)
        # integers that follow from activations, and cross to where they choose
        best = jnp.argmax(memory.sum(-1), axis=-1)
        x = self.table(target)
        mask = (source > 2)[:, None, :]
        scores = jnp.einsum("bte,bse->bts", self.query(x), jax.checkpoint(self.key)(memory))
        x = x + jax.nn.softmax(jnp.where(mask, scores, -1e9), -1) @ memory
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, self.steps[...])[0]
        x = x + jnp.take_along_axis(memory, best[:, None, None], 1)
        return self.table.attend(x)


def images():
    random = np.random.default_rng(0)
    return {
        "image": random.normal(size=(ROWS, 4, 4, 3)).astype(np.float32),
        "label": random.integers(0, 5, ROWS, np.int32),
        "weights": WEIGHTS,
    }


def sentences():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, ROWS, SEQ + 1), np.int32)
    return {"source": tokens[0, :, 1:], "target": tokens[1], "weights": WEIGHTS}


def conv_net() -> Model:
    return from_linen(ConvNet(), jax.ShapeDtypeStruct((1, 4, 4, 3), jnp.float32))


def constant_count(apply, batch):
    """A loss whose count and metrics are constants, inputs, or parts of the result."""
    loss_sum, _, _ = classification_loss(apply, batch)
    rows = batch["label"].shape[0]
    return loss_sum, rows, {"constant": (1.0, jnp.int32(2)), "again": (loss_sum, batch["weights"].sum())}


CASES = {
    "constants": (conv_net, constant_count, images),
    "linen": (conv_net, classification_loss, images),
    "nnx": (lambda: from_nnx(Translator), Regularized(translation_loss, z_loss=0.1), sentences),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name != "constants")) for name in CASES]
)
def test_the_parts_compute_what_the_whole_model_does(name):
    make, loss, data = CASES[name]
    model, batch = make(), data()
    traced = trace_parts(model, loss, batch)
    # a stage for every piece: cut wherever the model can be cut
    cut = make_partitions(traced, Pipeline(stages=",".join("1" * traced.num_blocks)), traced.num_blocks, 1)[0]
    stages = [StageModel(model=model, stages=cut, traced=traced, stage=i) for i in range(traced.num_blocks)]
    params, state = model.init(jax.random.key(0))
    key = row_key(jax.random.key(1), 0, ROWS)
    for path, _ in jax.tree.leaves_with_path(params):
        owners = [stage for stage in stages if path_text(path) in by_path(stage.own(params))]
        assert len(owners) == 1, path_text(path)

    def whole(params, train):
        states = []

        def apply(*inputs):
            outputs, changed = model.apply(params, state, key, train, *inputs)
            states.append(changed)
            return outputs

        total, *rest = (loss if train else find_evaluation_loss(loss))(apply, batch)
        return total, (rest, states[0])

    def in_parts(params, train):
        activations, states = [], {}
        for stage in stages:
            # a stage has what it owns and what it borrows, and nothing else
            own = {**by_path(stage.own(params)), **{path: by_path(params)[path] for path in stage.borrowed}}
            found = stage.run(
                stage.stage,
                stage.part_params(own, stage.stage),
                stage.own(state, STATE),
                key,
                train,
                batch,
                activations,
            )
            activations, changed = found
            states |= by_path(changed)
        total, (count, metrics) = activations
        return total, ([count, *([metrics] if metrics else [])], states)

    for train in (True, False):
        expected, got = (
            jax.jit(jax.value_and_grad(lambda p, f=f, t=train: f(p, t), has_aux=True))(params)
            for f in (whole, in_parts)
        )
        close(got[0][0], expected[0][0])
        close(got[0][1][0], expected[0][1][0])
        close(got[0][1][1], by_path(expected[0][1][1]))
        close(got[1], expected[1])


def by_path(tree):
    return {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def close(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, expected)


def test_what_crosses_is_found_by_tracing():
    traced = trace_parts(from_nnx(Translator), translation_loss, sentences())
    cut = make_partitions(traced, Pipeline(stages="2,2,2"), 3, 1)[0]
    stages = [StageModel(model=from_nnx(Translator), stages=cut, traced=traced, stage=i) for i in range(3)]
    flow = stages[0].flow(sentences())
    wide, chosen = (ROWS, SEQ, EMBED), (ROWS,)
    shapes = [[(flow.shapes[v].shape, str(flow.shapes[v].dtype)) for v in reads] for reads in flow.reads]
    # the encoder between its layers; then memory and its best row: masks and dropout are computed again
    assert shapes[0] == []
    assert shapes[1] == [(wide, "float32")]
    assert (chosen, "int32") in shapes[2]
    integers = [value for value in flow.shapes if flow.shapes[value].dtype == jnp.int32]
    assert [flow.has_cotangent(value) for value in integers] == [False]
    # the table is read by the encoder, the decoder and the head
    assert stages[0].lent["table/embedding"] == [stage.stage for stage in stages if stage.borrowed]


def test_the_equal_cut_is_one_of_equal_work_where_little_crosses():
    traced = trace_parts(conv_net(), classification_loss, images())
    flops, counts = traced.costs("flops").blocks, make_partitions(traced, Pipeline(), 2, 1)[0].counts
    assert len(flops) == sum(counts) == traced.num_blocks
    heaviest = max(sum(flops[: counts[0]]), sum(flops[counts[0] :]))
    assert heaviest <= 1.1 * sum(flops[: cut(flops, 2)[0]])
    sizes = {path: leaf.size for path, leaf in by_path(traced.params).items()}
    assert sum(traced.costs("params").blocks) == sum(sizes.values())


@given(st.lists(st.integers(1, 9), min_size=3, max_size=9), st.integers(2, 3), st.data())
def test_a_narrow_cut_sends_the_least_of_all_even_cuts(costs, num_parts, data):
    sent = data.draw(st.lists(st.integers(1, 9), min_size=len(costs) - 1, max_size=len(costs) - 1))

    def judged(counts):
        ends = np.cumsum([0, *counts])
        heaviest = max(sum(costs[a:b]) for a, b in pairwise(ends))
        return heaviest, sum(sent[end - 1] for end in ends[1:-1])

    limit = 1.1 * judged(cut(costs, num_parts))[0]
    every = [c for c in list_cuts(len(costs), num_parts) if judged(c)[0] <= limit]
    found = judged(cut_narrowly(costs, num_parts, sent))
    assert found[0] <= limit
    assert found[1] == min(judged(c)[1] for c in every)


class TimeFirst(nnx.Module):
    """Its activations have time first, and the batch second."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return jnp.swapaxes(self.head(self.table(tokens.T)), 0, 1)


class OneNorm(nnx.Module):
    """One batch norm in two places."""

    def __init__(self, rngs):
        self.table = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.one, self.two = (nnx.Linear(EMBED, EMBED, rngs=rngs) for _ in range(2))
        self.head = nnx.Linear(EMBED, VOCAB, rngs=rngs)
        self.norm = nnx.BatchNorm(EMBED, use_bias=False, use_scale=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.norm(self.two(self.one(self.norm(self.table(tokens))))))


REFUSED = {
    TimeFirst: (
        2,
        r"1 piece .* 2 parts; use --across data.*between .* and .* crosses float32\[6,8,8\], an array",
    ),
    OneNorm: (
        4,
        r"3 pieces .* 4 parts; use --partitions 3"
        r".*between one/.* and two/.* the model state norm/mean is used on both sides",
    ),
}


@pytest.mark.parametrize("module", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_with_the_place(module):
    num_parts, text = REFUSED[module]
    tokens = {"tokens": np.zeros((ROWS, SEQ + 1), np.int32), "weights": WEIGHTS}
    traced = trace_parts(from_nnx(module), next_token_loss, tokens)
    with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
        make_partitions(traced, Pipeline(), num_parts, 1)
