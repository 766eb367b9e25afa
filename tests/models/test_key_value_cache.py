"""Logits by a cache are those of the whole row, however it is read; the cache is sharded as in training."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts
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
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9), np.int32)
COUNTS = np.array([4, 2, 5, 1, 3, 5, 2, 1], np.int32)
ROWS = np.arange(8)


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=list(CONFIGS))
def config(request):
    return request.param


def read_in_parts(read, params):
    """Logits of rows that first read prompts of other lengths, then two tokens, one after the other."""
    logits, cache = read(params, TOKENS[:, :5], None, NewCache(9), COUNTS)
    found = [logits]
    for i in range(2):
        logits, cache = read(params, TOKENS[ROWS, COUNTS + i][:, None], None, cache, None)
        found.append(logits)
    assert cache.lengths_B.tolist() == (COUNTS + 2).tolist()
    return np.stack(found), cache


@pytest.fixture(scope="module")
def expected(config, pure, quick_jit):
    def whole(params):
        logits = pure(config).apply(params, TOKENS)
        return logits if isinstance(logits, jax.Array) else logits.whole()

    logits = np.asarray(quick_jit(whole)(pure(config).params))
    return np.stack([logits[ROWS, COUNTS - 1 + i] for i in range(3)])


def test_logits_are_those_of_the_whole_row(config, expected, pure, quick_jit):
    found, _ = read_in_parts(quick_jit(pure(config).apply), pure(config).params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_experts_of_a_cache_take_all_tokens_whatever_their_capacity_is(pure, quick_jit):
    config, full = CONFIGS["experts"], "num=4,top=2,shared=1,shared_gate=sigmoid,capacity=0.3"
    params = pure(config).params
    tight = pure(replace(config, experts=full))
    found, _ = read_in_parts(quick_jit(tight.apply), params)
    free, _ = read_in_parts(quick_jit(pure(config).apply), params)
    np.testing.assert_array_equal(found, free)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("learned", {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("experts", {"data": 2, "expert": 2, "tensor": 2}, marks=pytest.mark.full),
    ],
)
def test_a_mesh_shards_rows_and_heads(name, axes, pure, quick_jit):
    """Over data and fsdp (or expert) go rows, over tensor heads; no program gathers the cache."""
    config = CONFIGS[name]
    layout = Layout(mesh=axes)
    mesh = make_mesh(layout)

    def sharded(*inputs):
        with activation_rules(layout.activation_rules, mesh):
            return pure(config).apply(*inputs)

    params = jax.device_put(pure(config).params, jax.sharding.NamedSharding(mesh, PartitionSpec()))
    read = quick_jit(sharded)
    found, cache = read_in_parts(read, params)
    plain, _ = read_in_parts(quick_jit(pure(config).apply), pure(config).params)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-5)
    for slots in (cache.keys_LBSHK, cache.values_LBSHK):
        assert slots.sharding.spec == PartitionSpec(None, tuple(axes)[:2], None, "tensor")
        assert {shard.data.shape for shard in slots.addressable_shards} == {(3, 2, 9, 2, 4)}
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
