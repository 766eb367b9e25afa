"""Logits by a cache are those of the whole row, however it is read; the cache is sharded as in training.

Of decoders, and of encoder-decoders, whose sources of several lengths are read once.
"""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.models.generate import generate
from shardtrain.models.key_value_cache import NewCache
from shardtrain.models.lora import Lora
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

SIZES: dict[str, Any] = {"vocab": 32, "seq": 12, "embed": 16, "num_layers": 3, "num_heads": 4}
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied": False,
}
CONFIGS = {
    "learned": DecoderConfig(**SIZES),
    "windows, unrolled": DecoderConfig(**SIZES, **LLAMA, num_kv_heads=2, window=3, scan=False),
    "full every second, soft caps": DecoderConfig(
        **SIZES,
        **LLAMA,
        window=2,
        full_every=2,
        soft_cap=2.0,
        logits_soft_cap=3.0,
        post_norm=True,
        qk_norm=True,
    ),
    "loss in chunks, lora": DecoderConfig(
        **SIZES, **LLAMA, num_kv_heads=1, loss_chunk=4, lora=Lora(rank=2, alpha=1)
    ),
    "experts": DecoderConfig(
        **SIZES, **LLAMA, mlp=12, experts=Experts(num=4, top=2, shared=1, shared_gate="sigmoid")
    ),
}
BOTH = EncoderDecoderConfig(
    vocab=32, seq=12, embed=16, num_encoder_layers=1, num_decoder_layers=2, num_heads=4
)
PAIRS = {
    "source, learned": BOTH,
    "source, rotary": replace(
        BOTH, positions="rotary", norm="rmsnorm", activation="swiglu", num_kv_heads=2, tied=False,
        loss_chunk=4,
    ),
    "source, relative": replace(
        BOTH, positions="relative", relative_buckets=8, relative_distance=6, query_scale=1.0, head_scale=0.5,
        num_encoder_layers=2, lora=Lora(rank=2, alpha=1),
    ),
}  # fmt: skip
CONFIGS |= PAIRS
RANDOM = np.random.default_rng(0)
TOKENS, SOURCE = (RANDOM.integers(0, 32, (8, num), np.int32) for num in (9, 7))
MASK = (np.arange(7) < np.array([7, 3, 5, 1, 7, 2, 6, 4])[:, None]).astype(np.int32)
COUNTS = np.array([4, 2, 5, 1, 3, 5, 2, 1], np.int32)
ROWS = np.arange(8)


def read_in_parts(config, read, params):
    """Logits of rows that first read prompts of other lengths, then two tokens, one after the other."""
    cache: Any = NewCache(9)
    found, is_pair = [], isinstance(config, EncoderDecoderConfig)
    for i in range(3):
        tokens, counts = (TOKENS[ROWS, COUNTS + i - 1][:, None], None) if i else (TOKENS[:, :5], COUNTS)
        source, mask = (None, None) if i or not is_pair else (SOURCE, MASK)
        logits, cache = read(params, *[source] * is_pair, tokens, mask, cache, counts)
        found.append(logits)
    assert getattr(cache, "target", cache).lengths_B.tolist() == (COUNTS + 2).tolist()
    return np.stack(found), cache


def read_whole(config, pure, quick_jit):
    """The same logits, of whole rows."""

    def whole(params):
        inputs = (SOURCE, TOKENS, MASK) if isinstance(config, EncoderDecoderConfig) else (TOKENS,)
        logits = pure(config).apply(params, *inputs)
        return logits if isinstance(logits, jax.Array) else logits.whole()

    logits = np.asarray(quick_jit(whole)(pure(config).params))
    return np.stack([logits[ROWS, COUNTS - 1 + i] for i in range(3)])


# the mesh has relative positions
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in PAIRS)) for name in CONFIGS]
)
def test_logits_are_those_of_the_whole_row(name, pure, quick_jit):
    config = CONFIGS[name]
    found, _ = read_in_parts(config, quick_jit(pure(config).apply), pure(config).params)
    np.testing.assert_allclose(found, read_whole(config, pure, quick_jit), rtol=1e-5, atol=1e-5)


def test_experts_of_a_cache_take_all_tokens_whatever_their_capacity_is(pure, quick_jit):
    config, full = CONFIGS["experts"], "num=4,top=2,shared=1,shared_gate=sigmoid,capacity=0.3"
    params = pure(config).params
    tight = pure(replace(config, experts=full))
    found, _ = read_in_parts(config, quick_jit(tight.apply), params)
    free, _ = read_in_parts(config, quick_jit(pure(config).apply), params)
    np.testing.assert_array_equal(found, free)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("learned", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("source, relative", {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("experts", {"data": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_a_mesh_shards_rows_and_heads(name, axes, pure, quick_jit):
    """Over data and fsdp (or expert) go rows, over tensor heads; no program gathers the cache."""
    config, layout = CONFIGS[name], Layout(mesh=axes)
    mesh = make_mesh(layout)

    def sharded(*inputs):
        with activation_rules(layout.activation_rules, mesh):
            return pure(config).apply(*inputs)

    read = quick_jit(sharded)
    params = jax.device_put(pure(config).params, NamedSharding(mesh, PartitionSpec()))
    found, cache = read_in_parts(config, read, params)
    np.testing.assert_allclose(found, read_whole(config, pure, quick_jit), rtol=1e-5, atol=1e-5)
    own = getattr(cache, "target", cache)
    for slots in (cache.keys_LBSHK, own.keys_LBSHK, own.values_LBSHK):
        assert slots.sharding.spec == PartitionSpec(None, tuple(axes)[:2], None, "tensor")
        layers, rows, length, heads, features = slots.shape
        expected = (layers, rows // 4, length, heads // 2, features)
        assert {shard.data.shape for shard in slots.addressable_shards} == {expected}
    assert own.keys_LBSHK.shape[1:] == own.values_LBSHK.shape[1:] == (8, 9, 4, 4)
    if name in PAIRS:
        return
    text = read.lower(params, TOKENS[:, :1], None, cache, None).compile().as_text()
    assert "all-reduce" in text
    assert not [line for line in text.splitlines() if "all-gather(" in line and "[3,8,9" in line]


def test_refuses_more_slots_than_positions_and_segments(pure):
    model = pure(CONFIGS["learned"])
    with pytest.raises(ValueError, match="seq=12") as error:
        model.apply(model.params, TOKENS, None, NewCache(13))
    assert str(error.value) == (
        "tokens of length 13 were given to a decoder of seq=12 positions. Give at most 12 tokens, or build it"
        " with seq=13."
    )
    with pytest.raises(ValueError, match="a cache is of rows with one document"):
        model.apply(model.params, TOKENS, np.zeros_like(TOKENS), NewCache(9))


def test_attention_over_a_mesh_axis_takes_no_cache(pure):
    layout = Layout(mesh={"context": 8})
    model = pure(CONFIGS["learned"])
    with (
        pytest.raises(ValueError, match="takes no cache of keys and values; use a mesh with context=1"),
        activation_rules(layout.activation_rules, make_mesh(layout)),
    ):
        jax.eval_shape(lambda: model.apply(model.params, TOKENS[:, :8], None, NewCache(8)))


def test_sources_and_targets_that_do_not_fit_are_refused(pure):
    model = pure(BOTH)
    with pytest.raises(ValueError, match="a source is read once: give it with NewCache"):
        model.apply(model.params, None, TOKENS, None, NewCache(9))
    with pytest.raises(ValueError, match="tokens of length 13 were given to a decoder of seq=12"):
        model.apply(model.params, SOURCE, TOKENS, None, NewCache(13))
    with pytest.raises(
        ValueError, match="the longest source has 13 tokens, but the model has seq=12"
    ) as error:
        generate(model.apply, [[1] * 13], 13, jax.random.key(0), seq=12, begin=0, cached=True)
    assert "num_tokens is 13, but targets have seq=12 positions. Use num_tokens=12." in str(error.value)
