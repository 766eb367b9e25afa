"""An encoder-decoder with a cache: logits are those of whole targets, on a mesh too; targets are written."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardtrain.functional.activation_rules import activation_rules
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.generate import generate
from shardtrain.models.key_value_cache import NewCache
from shardtrain.models.lora import Lora
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

LEARNED = EncoderDecoderConfig(
    vocab=32, seq=12, embed=16, num_encoder_layers=1, num_decoder_layers=2, num_heads=4
)
ROTARY = replace(
    LEARNED, positions="rotary", norm="rmsnorm", activation="swiglu", num_kv_heads=2, tied=False, loss_chunk=4
)
RELATIVE = replace(
    LEARNED, positions="relative", relative_buckets=8, relative_distance=6, query_scale=1.0, head_scale=0.5,
    num_encoder_layers=2, lora=Lora(rank=2, alpha=1),
)  # fmt: skip
CONFIGS = {"learned": LEARNED, "rotary": ROTARY, "relative": RELATIVE}
RANDOM = np.random.default_rng(0)
SOURCE, TARGET = (RANDOM.integers(0, 32, (8, num), np.int32) for num in (7, 9))
MASK = (np.arange(7) < np.array([7, 3, 5, 1, 7, 2, 6, 4])[:, None]).astype(np.int32)
COUNTS = np.array([4, 2, 5, 1, 3, 5, 2, 1], np.int32)
ROWS = np.arange(8)
KEY = jax.random.key(0)


def read_in_parts(read, params):
    """Logits of targets whose first tokens are read at once, as many as each has, then two one by one."""
    logits, cache = read(params, SOURCE, TARGET[:, :5], MASK, NewCache(9), COUNTS)
    found = [logits]
    for i in range(2):
        logits, cache = read(params, None, TARGET[ROWS, COUNTS + i][:, None], None, cache, None)
        found.append(logits)
    assert cache.target.lengths_B.tolist() == (COUNTS + 2).tolist()
    return np.stack(found), cache


def read_whole(config, pure, quick_jit):
    """The same logits, of whole targets."""

    def whole(params):
        logits = pure(config).apply(params, SOURCE, TARGET, MASK)
        return logits if isinstance(logits, jax.Array) else logits.whole()

    logits = np.asarray(quick_jit(whole)(pure(config).params))
    return np.stack([logits[ROWS, COUNTS - 1 + i] for i in range(3)])


@pytest.mark.full  # the mesh has relative positions
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_logits_are_those_of_whole_targets(config, pure, quick_jit):
    """With sources of several lengths, which are read once."""
    expected = read_whole(config, pure, quick_jit)
    found, cache = read_in_parts(quick_jit(pure(config).apply), pure(config).params)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    heads = config.num_kv_heads or 4
    assert cache.keys_LBSHK.shape == (2, 8, 7, heads, 4)
    assert cache.target.values_LBSHK.shape == (2, 8, 9, heads, 4)


def test_a_mesh_shards_rows_and_heads_of_both_caches(pure, quick_jit):
    layout = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2})
    mesh = make_mesh(layout)

    def sharded(*inputs):
        with activation_rules(layout.activation_rules, mesh):
            return pure(RELATIVE).apply(*inputs)

    params = jax.device_put(pure(RELATIVE).params, jax.sharding.NamedSharding(mesh, PartitionSpec()))
    found, cache = read_in_parts(quick_jit(sharded), params)
    np.testing.assert_allclose(found, read_whole(RELATIVE, pure, quick_jit), rtol=1e-5, atol=1e-5)
    for slots in (cache.keys_LBSHK, cache.target.keys_LBSHK):
        assert slots.sharding.spec == PartitionSpec(None, ("data", "fsdp"), None, "tensor")


def test_what_does_not_fit_is_refused(pure):
    model = pure(LEARNED)
    with pytest.raises(ValueError, match="a source is read once: give it with NewCache"):
        model.apply(model.params, None, TARGET, None, NewCache(9))
    with pytest.raises(ValueError, match="tokens of length 13 were given to a decoder of seq=12"):
        model.apply(model.params, SOURCE, TARGET, None, NewCache(13))
    with pytest.raises(
        ValueError, match="the longest source has 13 tokens, but the model has seq=12"
    ) as error:
        generate(model.apply, [[1] * 13], 13, KEY, seq=12, begin=0, cached=True)
    assert "num_tokens is 13, but targets have seq=12 positions. Use num_tokens=12." in str(error.value)
