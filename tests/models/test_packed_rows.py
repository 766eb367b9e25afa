"""Rows of several documents give the losses and gradients of their documents, each in a row of its own."""

import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest
from mesh_gradients import compute_gradients

from shardtrain.data import Batches, Chat
from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.models.attention import blockwise
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.models.rotary import YarnScaling
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.step import make_gradients

SEQ, VOCAB = 12, 32
LEARNED = DecoderConfig(vocab=VOCAB, seq=SEQ, embed=16, num_layers=2, num_heads=4, mlp=32, remat="none")
ROTARY = replace(
    LEARNED, remat="weights", positions="rotary", num_kv_heads=2, norm="rmsnorm", bias=False, tied=False
)
EVERYTHING = replace(
    ROTARY, remat="none", num_layers=3, activation="geglu", norm="rmsnorm_plus_one", post_norm=True,
    qk_norm=True, qkv_bias=True, window=3, full_every=2, theta=500.0, window_theta=100.0, rotary_dims=2,
    query_scale=0.4, rope_scaling=YarnScaling(factor=4, original_seq=8, fast=2, slow=0.5), soft_cap=2.0,
    logits_soft_cap=3.0, embed_scale=4.0, tied=True, loss_chunk=8,
)  # fmt: skip
BESIDE = replace(ROTARY, parallel=True, post_norm=True, only_post_norm=True, qk_norm=True, qk_norm_joint=True)
"""Halves beside each other, norms behind them alone, and of all heads together."""
LENGTHS = [(12,), (5, 7), (1, 4, 7), (6, 1, 5), (3, 3, 3, 3), (11, 1), (2, 10), (4, 8)]
"""Inputs of the documents of each row; the last row counts for nothing."""


@cache
def batches():
    """The same documents packed, and each in a row."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCAB, (len(LENGTHS), SEQ + 1), np.int32)
    segments = np.stack([np.repeat(np.arange(len(lengths)), lengths) for lengths in LENGTHS]).astype(np.int32)
    # the target of a document's last token is the first one of the next, which counts for nothing
    weights = np.ones((len(LENGTHS), SEQ), np.float32)
    alone = []
    for row, lengths in enumerate(LENGTHS):
        for stop in np.cumsum(lengths)[:-1]:
            weights[row, stop - 1] = 0
    weights[-1] = 0
    for row, lengths in enumerate(LENGTHS):
        for length, stop in zip(lengths, np.cumsum(lengths), strict=True):
            inside = slice(stop - length, stop)
            one = np.zeros((2, SEQ + 1), np.float32)
            one[0, : length + 1] = tokens[row, stop - length : stop + 1]
            one[1, :length] = weights[row, inside]
            alone.append(one)
    rows = np.stack(alone)
    own = {"tokens": rows[:, 0].astype(np.int32), "weights": rows[:, 1, :SEQ]}
    return {"tokens": tokens, "segments": segments, "weights": weights}, own


def gradients(config, batch, layout, microbatches=1):
    """Loss and gradients by the toolkit, on any layout."""
    halves = (config.num_layers + 1) // 2, config.num_layers // 2
    counts = halves if "pipeline" in layout.mesh else ()
    return compute_gradients(from_nnx(config), layout, batch, microbatches, counts=counts)


@cache
def expected(config):
    """Of each document in a row of its own, on one device."""
    return gradients(config, batches()[1], Layout(mesh={"data": 1}))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LEARNED, marks=pytest.mark.full),
        pytest.param(ROTARY, marks=pytest.mark.full),
        pytest.param(replace(ROTARY, scan=False, loss_chunk=8), marks=pytest.mark.full),
        EVERYTHING,
    ],
    ids=["learned", "rotary", "chunks", "everything"],
)
def test_packed_rows_give_the_gradients_of_their_documents(config, assert_same):
    found = gradients(config, batches()[0], Layout(mesh={"data": 1}))
    assert found["count"] == sum(sum(lengths) - len(lengths) + 1 for lengths in LENGTHS[:-1])
    assert_same(found, expected(config))
    if config is not LEARNED:
        return
    # without segments they would not
    mixed = {name: x for name, x in batches()[0].items() if name != "segments"}
    with pytest.raises(AssertionError):
        assert_same(gradients(config, mixed, Layout(mesh={"data": 1})), expected(config))


# the fuzzer has packed rows on any layout
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        pytest.param(EVERYTHING, Layout(mesh={"context": 3, "tensor": 2}), id="everything-ring"),
        pytest.param(
            BESIDE,
            Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}, sequence_sharded=True),
            marks=pytest.mark.full,
            id="beside-mesh",
        ),
    ],
)
def test_they_do_on_a_mesh(config, layout, assert_same):
    assert_same(gradients(config, batches()[0], layout), expected(config))


def test_conversations_packed_into_windows_do_too(tmp_path, monkeypatch, assert_same):
    """By attention in blocks."""
    monkeypatch.setattr(blockwise, "AT_ONCE", 4)
    random = np.random.default_rng(0)
    rows = [
        {"prompt": "".join(map(chr, random.integers(1, VOCAB, 3))), "completion": chr(5) * int(size)}
        for size in random.integers(1, 9, 20)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Chat(paths=(tmp_path / "a.jsonl",), template="plain", seq=SEQ, heldout_fraction=0)
    batches = []
    for packing, num_windows in (("separate", 17), ("alone", 20)):
        source = replace(data, packing=packing).train(tmp_path)
        assert len(source) == num_windows
        batches.append(Batches(source=source, batch=20, shuffle=False).load({"epoch": 0, "index": 0}))
    packed, alone = batches
    config = replace(ROTARY, window=5, full_every=2)
    expected = gradients(config, alone, Layout(mesh={"data": 1}))
    assert expected["count"] == sum(len(row["completion"]) + 1 for row in rows)
    mesh = {"data": 2, "fsdp": 2, "tensor": 2}
    assert_same(gradients(replace(config, attention="blockwise"), packed, Layout(mesh=mesh)), expected)


@pytest.mark.parametrize(
    ("others", "microbatches"),
    [
        ({"data": 2}, 4),
        pytest.param({"tensor": 2}, 2, marks=pytest.mark.full),
        pytest.param({"fsdp": 2}, 2, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_stages_look_up_restarted_positions_over_context(others, microbatches, assert_same):
    """Looked up in parts, XLA would end the process, or stages would wait for ever."""
    layout = Layout(mesh={"pipeline": 2, "context": 2, **others}, context_attention="all-gather")
    assert_same(gradients(LEARNED, batches()[0], layout, microbatches), expected(LEARNED))


def test_a_model_that_takes_no_segments_is_refused():
    packed = batches()[0]
    tokens = jax.ShapeDtypeStruct((1, SEQ), np.int32)
    model = from_linen(LinenDecoder(LEARNED), tokens)
    layout = Layout(mesh={"data": 1})
    mesh = make_mesh(layout, jax.devices()[:1])
    placement = make_placement(model, optax.identity(), layout, mesh)
    state = init_state(model, optax.identity(), placement, seed=7)
    rows = {k: v[None] for k, v in packed.items()}
    with pytest.raises(
        ValueError, match=r"the batch has segments .* and the model takes none .*--data\.packing"
    ):
        make_gradients(model, next_token_loss, placement)(
            state.params, state.model_state, step_key(state.seed, state.step), rows
        )
