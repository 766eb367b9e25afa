"""The encoder-decoder: what reads what, the streams between its blocks, and its parts."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import fill, list_parameters
from flax import nnx

from shardtrain.models.decoder_block import Block
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
SHALLOW = replace(CONFIG, num_encoder_layers=1, num_decoder_layers=1)
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(0, 32, (2, 6), dtype=np.int32)
TARGET = RNG.integers(0, 32, (2, 8), dtype=np.int32)

assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def logits_of(pure, quick_jit):
    """(config, source, target) -> logits."""
    apply = functools.cache(lambda config: quick_jit(pure(config).apply))
    return lambda config, source, target: np.asarray(apply(config)(pure(config).params, source, target))


@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
def test_every_parameter_is_float32_and_names_its_dims(config):
    for path, parameter in list_parameters(replace(config, dtype="bfloat16")):
        dims = parameter.get_metadata()["out_sharding"]
        assert parameter.shape == tuple(config.sizes[dim] for dim in dims), path
        assert parameter.dtype == jnp.float32, path


def test_a_target_position_sees_no_later_one_and_all_of_the_source(logits_of):
    before = logits_of(CONFIG, SOURCE, TARGET)
    assert before.shape == (2, 8, 32)
    later = TARGET.copy()
    later[:, 5:] = (later[:, 5:] + 1) % 32
    after = logits_of(CONFIG, SOURCE, later)
    assert_close(after[:, :5], before[:, :5])
    assert np.abs(after[:, 5:] - before[:, 5:]).max() > 0.1
    for position in (0, 5):
        other = SOURCE.copy()
        other[:, position] = (other[:, position] + 1) % 32
        assert np.abs(logits_of(CONFIG, other, TARGET) - before).max((0, 2)).min() > 1e-3


def test_a_source_position_sees_all_of_the_source(pure, quick_jit):
    def encoded(source):
        module = fill(CONFIG, pure(CONFIG).params)
        return module.run(module.blocks[:2], module.first(source, TARGET), None)["source"]

    other = SOURCE.copy()
    other[:, 5] = (other[:, 5] + 1) % 32
    changed = np.abs(quick_jit(encoded)(other) - quick_jit(encoded)(SOURCE)).max((0, 2))
    assert changed.min() > 1e-3


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


def copied(block, own):
    """A block of a decoder alone, with the numbers of one here."""
    params = nnx.to_pure_dict(nnx.state(own))
    params = {name: params[name] for name in ("attention_norm", "attention", "mlp_norm", "mlp")}
    state = nnx.state(block)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(block, state)
    return block


def test_a_decoder_block_that_reads_no_source_is_one_of_a_decoder(quick_jit):
    def outputs():
        own = DecoderBlock(LLAMA.parts, is_last=False, rngs=nnx.Rngs(0))
        own.cross.o.kernel[...] *= 0
        x = jax.random.normal(jax.random.key(1), (2, 8, 16))
        alone = copied(Block(LLAMA.parts, rngs=nnx.Rngs(1)), own)
        return own({"source": x[:, :6], "target": x}, None)["target"], alone(x, None)

    assert_close(*quick_jit(outputs)())


def test_an_encoder_block_is_one_of_a_decoder_that_sees_everything(quick_jit):
    """So the last position, which sees everything anyway, comes out the same."""

    def outputs():
        own = EncoderBlock(LLAMA.parts, is_last=False, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(1), (2, 8, 16))
        alone = copied(Block(LLAMA.parts, rngs=nnx.Rngs(1)), own)
        return own({"source": x, "target": x}, None)["source"], alone(x, None)

    whole, causal = quick_jit(outputs)()
    assert_close(whole[:, -1], causal[:, -1])
    assert np.abs(whole[:, :-1] - causal[:, :-1]).max(-1).min() > 1e-7


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


@pytest.fixture(scope="module")
def loss_and_gradient(pure, quick_jit):
    """The loss and gradient of a config, at the parameters of `params_config`."""

    def compute(config, params_config):
        loss = lambda params: jnp.square(pure(config).apply(params, SOURCE, TARGET)).mean()  # noqa: E731
        return quick_jit(jax.value_and_grad(loss))(pure(params_config).params)

    return functools.cache(compute)


@pytest.mark.full
@pytest.mark.parametrize("remat", ["weights", "full"])
def test_remat_changes_no_gradient(remat, loss_and_gradient):
    changed = loss_and_gradient(replace(SHALLOW, remat=remat), SHALLOW)
    jax.tree.map(assert_close, changed, loss_and_gradient(SHALLOW, SHALLOW))


def test_remat_keeps_less(pure):
    def kept(remat):
        model = pure(replace(SHALLOW, remat=remat))
        backward = lambda params: jax.vjp(model.apply, params, SOURCE, TARGET)[1]  # noqa: E731
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(backward, model.params)))

    assert kept("full") < kept("outputs") < kept("dots") < kept("none")


@pytest.mark.full
@pytest.mark.parametrize("config", [CONFIG, LLAMA], ids=["gpt", "llama"])
def test_every_parameter_has_a_gradient(config, loss_and_gradient):
    """But the bias of keys: softmax does not see what is added to all scores."""
    for path, gradient in jax.tree.leaves_with_path(loss_and_gradient(config, config)[1]):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        assert np.isfinite(gradient).all(), name
        assert (np.abs(gradient).max() > 1e-5) == (not name.endswith("k/bias")), name


def in_parts(part):
    """Logits by parts, each a program of its own: the blocks' keys drawn first, shares across both kinds."""
    keys = part(lambda module: module.block_keys())()
    stream = part(lambda module: module.first(SOURCE, TARGET))()
    for share in (slice(0, 1), slice(1, 3), slice(3, 4)):
        own = None if keys is None else keys[share]
        run = lambda module, stream, keys, share=share: module.run(module.blocks[share], stream, keys)  # noqa: E731
        stream = part(run)(stream, own)
    return part(lambda module, stream: module.last(stream))(stream)


def test_parts_in_programs_of_their_own_make_the_whole(pure, quick_jit, logits_of):
    part = lambda work: quick_jit(lambda *given: work(fill(CONFIG, pure(CONFIG).params), *given))  # noqa: E731
    assert_close(in_parts(part), logits_of(CONFIG, SOURCE, TARGET))


class TestDropout:
    """A rate above 0, switched by nnx's `deterministic`."""

    @pytest.mark.full
    def test_parts_have_the_masks_of_a_call(self, pure, seeded, quick_jit):
        params = pure(CONFIG).params
        part = lambda work: quick_jit(lambda *given: work(seeded(DROPOUT, params, 3), *given))  # noqa: E731
        first, second = part(lambda module: (module(SOURCE, TARGET), module(SOURCE, TARGET)))()
        assert_close(in_parts(part), first)
        assert not np.allclose(first, second)

    def test_deterministic_is_the_model_without_dropout(self, pure, seeded, quick_jit, logits_of):
        call = lambda: seeded(DROPOUT, pure(CONFIG).params, 3, deterministic=True)(SOURCE, TARGET)  # noqa: E731
        assert_close(quick_jit(call)(), logits_of(CONFIG, SOURCE, TARGET))

    @pytest.mark.full
    def test_every_mask_has_a_key_of_its_own(self, pure, seeded, monkeypatch):
        """Two for the embeddings, two in an encoder block, three in a decoder block."""
        used = []
        monkeypatch.setattr(nnx.Dropout, "__call__", lambda _, x, rngs: used.append(rngs) or x)
        seeded(DROPOUT, pure(CONFIG).params, 7)(SOURCE, TARGET)
        data = {tuple(jax.random.key_data(key).tolist()) for key in used}
        assert len(data) == len(used) == 2 + 2 * 2 + 2 * 3


def test_tied_equals_untied_with_the_embedding_as_head(pure, logits_of, quick_jit):
    params = pure(CONFIG).params
    untied = {**params, "head": {"kernel": params["embedding"].T}}
    logits = quick_jit(pure(replace(CONFIG, tied=False)).apply)(untied, SOURCE, TARGET)
    assert_close(logits, logits_of(CONFIG, SOURCE, TARGET))


def test_bfloat16_is_close_and_returns_float32(pure, quick_jit, logits_of):
    rounded = quick_jit(pure(replace(LLAMA, dtype="bfloat16")).apply)(pure(LLAMA).params, SOURCE, TARGET)
    exact = logits_of(LLAMA, SOURCE, TARGET)
    assert rounded.dtype == jnp.float32
    assert 1e-4 < np.abs(rounded - exact).max() / np.abs(exact).max() < 5e-2


@pytest.mark.parametrize(("source", "target", "length"), [(9, 8, 9), (6, 12, 12)])
def test_sequences_longer_than_seq_are_refused(source, target, length, pure):
    tokens = (jnp.zeros((1, num), jnp.int32) for num in (source, target))
    with pytest.raises(ValueError, match="seq=8 positions") as error:
        jax.eval_shape(pure(CONFIG).apply, pure(CONFIG).params, *tokens)
    assert str(error.value) == (
        f"tokens of length {length} were given to a decoder of seq=8 positions. "
        f"Give at most 8 tokens, or build it with seq={length}."
    )


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (
            {"num_encoder_layers": 0, "dropout": 1.0},
            [
                "dropout is 1.0; it must be at least 0 and below 1. Use dropout=0.0 to switch it off.",
                "num_encoder_layers is 0; it must be at least 1. Use num_encoder_layers=1 or more.",
            ],
        ),
        (
            {"num_heads": 5, "remat": "ful"},
            [
                "remat is 'ful'; allowed: none, weights, dots, outputs, full, offload",
                "embed 16 is not a multiple of num_heads 5: 16 % 5 = 1. Use embed=15 or embed=20.",
            ],
        ),
    ],
)
def test_every_problem_of_a_configuration_is_reported(change, problems):
    with pytest.raises(ValueError, match="EncoderDecoderConfig") as error:
        replace(CONFIG, **change)
    assert str(error.value).splitlines() == ["EncoderDecoderConfig:", *(f"  - {p}" for p in problems)]
