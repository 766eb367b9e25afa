"""The encoder-decoder: what reads what, the streams between its blocks, and its parts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.models.encoder_decoder import CrossAttention, DecoderBlock, EncoderBlock, EncoderDecoderConfig

CONFIG = EncoderDecoderConfig(
    vocab=32, seq=8, embed=16, num_encoder_layers=2, num_decoder_layers=2, num_heads=4, remat="none"
)
LLAMA = replace(
    CONFIG,
    num_kv_heads=2,
    mlp=24,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    tied=False,
)
DROPOUT = replace(CONFIG, dropout=0.25)
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(0, 32, (2, 6), dtype=np.int32)
TARGET = RNG.integers(0, 32, (2, 8), dtype=np.int32)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_blocks_hand_on_what_they_do_not_touch(remat):
    """A boundary has two tensors, until the last block drops the source."""

    def check():
        module = replace(CONFIG, remat=remat)(nnx.Rngs(0))
        stream = module.first(jnp.asarray(SOURCE), jnp.asarray(TARGET))
        assert {name: x.shape for name, x in stream.items()} == {"source": (2, 6, 16), "target": (2, 8, 16)}
        for block in module.blocks[:2]:
            new = module.run([block], stream, None)
            assert new["target"] is stream["target"]
            assert new["source"] is not stream["source"]
            stream = new
        for block in module.blocks[2:-1]:
            new = module.run([block], stream, None)
            assert new["source"] is stream["source"]
            assert new["target"] is not stream["target"]
            stream = new
        assert set(module.run(module.blocks[-1:], stream, None)) == {"target"}

    jax.eval_shape(check)


def test_encoder_blocks_come_first():
    blocks: Any = nnx.eval_shape(lambda: CONFIG(nnx.Rngs(0))).blocks
    assert isinstance(blocks, nnx.List)
    assert [type(block) for block in blocks] == [EncoderBlock] * 2 + [DecoderBlock] * 2
    assert [block.source_norm is not None for block in blocks[:2]] == [False, True]


def test_cross_attention_is_softmax_over_the_source():
    cross = CrossAttention(LLAMA.parts, rngs=nnx.Rngs(0))
    x, source = (RNG.normal(size=(2, length, 16)).astype(np.float32) for length in (5, 7))
    q, k, v, o = (np.asarray(linear.kernel[...]) for linear in (cross.q, cross.k, cross.v, cross.o))
    expected = 0
    for head in range(4):
        scores = (x @ (5 * q)[:, head]) @ (source @ (5 * k)[:, head // 2]).swapaxes(1, 2) / 2
        p = np.exp(scores - scores.max(-1, keepdims=True))
        expected += p / p.sum(-1, keepdims=True) @ (source @ v[:, head // 2]) @ o[head]
    for linear in (cross.q, cross.k):
        linear.kernel[...] *= 5
    found = jax.jit(cross)(jnp.asarray(x), jnp.asarray(source))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_every_mask_has_a_key_of_its_own(pure, seeded, monkeypatch):
    """Two for the embeddings, two in an encoder block, three in a decoder block."""
    used = []
    monkeypatch.setattr(nnx.Dropout, "__call__", lambda _, x, rngs: used.append(rngs) or x)
    seeded(DROPOUT, pure(CONFIG).params, 7)(SOURCE, TARGET)
    data = {tuple(jax.random.key_data(key).tolist()) for key in used}
    assert len(data) == len(used) == 2 + 2 * 2 + 2 * 3
