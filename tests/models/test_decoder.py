"""The decoder: shapes, dims, options that must not change its numbers, and options that must."""

import functools
import math
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import list_parameters
from flax import nnx

from shardtrain.functional.remat_policies import REMAT_POLICIES
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.models.lora import Lora
from shardtrain.models.rotary import LinearScaling, RopeScaling

GPT = DecoderConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=4, remat="none")
LLAMA = replace(
    GPT,
    num_kv_heads=2,
    mlp=24,
    positions="rotary",
    norm="rmsnorm",
    activation="swiglu",
    bias=False,
    tied=False,
)
GEMMA = replace(
    LLAMA, num_layers=3, activation="geglu", norm="rmsnorm_plus_one", post_norm=True, qk_norm=True, window=3,
    full_every=2, window_theta=50.0, soft_cap=2.0, logits_soft_cap=3.0, query_scale=0.4, embed_scale=4.0,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 8), dtype=np.int32)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Lora(rank=8, on=()), "on is empty; name projections"),
        (lambda: RopeScaling(factor=2), "it is of no kind; use LinearScaling"),
        (
            lambda: RopeScaling.parse("yarn:factor=2"),
            "'yarn:factor=2' cannot be read; write yarn:factor=",
        ),
    ],
)
def test_compact_options_that_mean_nothing_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_a_subclass_of_a_scaling_changes_no_text():
    class Stretched(LinearScaling):
        pass

    assert RopeScaling.parse("linear:factor=2") == LinearScaling(factor=2)
    assert str(Stretched(factor=2)) == "linear:factor=2"


def loss(apply, params):
    return jnp.square(apply(params, TOKENS)).mean()


@pytest.fixture(scope="module")
def logits_of(pure, quick_jit):
    return functools.cache(
        lambda config: np.asarray(quick_jit(pure(config).apply)(pure(config).params, TOKENS))
    )


@pytest.fixture(scope="module")
def loss_and_gradient(pure, quick_jit):
    """The loss and gradient of a config at the parameters of `GPT`."""

    def compute(config):
        gradient = quick_jit(jax.value_and_grad(functools.partial(loss, pure(config).apply)))
        return gradient(pure(GPT).params)

    return functools.cache(compute)


assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)


def test_parameter_tree():
    dims = {"/".join(map(str, path)): v.get_metadata()["out_sharding"] for path, v in list_parameters(LLAMA)}
    assert dims == {
        "embedding": ("vocab", "embed"),
        "blocks/attention_norm/scale": ("layers", "embed"),
        "blocks/attention/q/kernel": ("layers", "embed", "heads", "head_dim"),
        "blocks/attention/k/kernel": ("layers", "embed", "kv_heads", "head_dim"),
        "blocks/attention/v/kernel": ("layers", "embed", "kv_heads", "head_dim"),
        "blocks/attention/o/kernel": ("layers", "heads", "head_dim", "embed"),
        "blocks/mlp_norm/scale": ("layers", "embed"),
        "blocks/mlp/up/kernel": ("layers", "embed", "mlp"),
        "blocks/mlp/gate/kernel": ("layers", "embed", "mlp"),
        "blocks/mlp/down/kernel": ("layers", "mlp", "embed"),
        "final_norm/scale": ("embed",),
        "head/kernel": ("embed", "vocab"),
    }


def test_flops_per_token_is_six_per_weight_plus_attention():
    kernels = [math.prod(v.shape) for path, v in list_parameters(LLAMA) if path[-1] == "kernel"]
    assert flops_per_token(LLAMA) == 6 * sum(kernels) + 12 * 2 * 4 * 4 * 8
    assert flops_per_token(replace(LLAMA, tied=True)) == flops_per_token(LLAMA)


def test_flops_per_token_count_the_keys_of_a_window():
    """12 operations for each key, head and feature; of seven blocks two, four and six see all eight keys."""
    config = replace(LLAMA, num_layers=7)
    whole = flops_per_token(config)
    for window, full_every, keys in ((3, None, 7 * 3), (3, 2, 4 * 3 + 3 * 8), (100, 2, 7 * 8)):
        found = flops_per_token(replace(config, window=window, full_every=full_every))
        assert whole - found == 12 * 4 * 4 * (7 * 8 - keys)
    assert flops_per_token(replace(config, activation="geglu")) == whole


def test_initial_values_are_those_of_gpt2(quick_jit):
    config = replace(GPT, embed=64, num_heads=4, vocab=512, tied=False)
    state = quick_jit(lambda: nnx.state(config(nnx.Rngs(0))))()
    values = {"/".join(map(str, path)): np.asarray(v[...]) for path, v in nnx.to_flat_state(state)}
    std = {name: x.std() for name, x in values.items()}
    residual = 0.02 / math.sqrt(4)
    for name in (
        "embedding",
        "positions",
        "head/kernel",
        "blocks/attention/q/kernel",
        "blocks/mlp/up/kernel",
    ):
        assert std[name] == pytest.approx(0.02, rel=0.1), name
    for name in ("blocks/attention/o/kernel", "blocks/mlp/down/kernel"):
        assert std[name] == pytest.approx(residual, rel=0.1), name
    first, second = values["blocks/attention/q/kernel"]
    assert not np.array_equal(first, second)


def test_a_token_out_of_range_is_loud(pure, quick_jit):
    wrong = TOKENS.copy()
    wrong[1, 3] = 32
    logits = np.asarray(quick_jit(pure(GPT).apply)(pure(GPT).params, wrong))
    assert np.isnan(logits[1, 3:]).all()
    assert np.isfinite(logits[0]).all()


def test_unrolled_equals_scan(pure, quick_jit, logits_of):
    unrolled = replace(GEMMA, scan=False)
    assert_close(logits_of(unrolled), logits_of(GEMMA))
    text = {c: quick_jit(pure(c).apply).lower(pure(c).params, TOKENS).as_text() for c in (GEMMA, unrolled)}
    assert "stablehlo.while" in text[GEMMA]
    assert "stablehlo.while" not in text[unrolled]


@pytest.mark.parametrize(
    ("remat", "scan"),
    [
        *(("weights", True), ("offload", True), ("full", False)),
        *(pytest.param(remat, True, marks=pytest.mark.full) for remat in ("dots", "outputs", "full")),
    ],
)
def test_remat_changes_no_gradient(remat, scan, loss_and_gradient):
    changed = loss_and_gradient(replace(GPT, remat=remat, scan=scan))
    jax.tree.map(assert_close, changed, loss_and_gradient(GPT))


def residuals(model):
    """What the backward pass keeps, as shapes and dtypes, without the parameters themselves."""
    backward = lambda params: jax.vjp(functools.partial(loss, model.apply), params)[1]  # noqa: E731
    given = {(x.shape, x.dtype) for x in jax.tree.leaves(model.params)}
    kept = jax.tree.leaves(jax.eval_shape(backward, model.params))
    return [x for x in kept if (x.shape, x.dtype) not in given]


def test_remat_keeps_less(pure):
    config = replace(LLAMA, dtype="bfloat16", num_layers=5)
    kept = {remat: residuals(pure(replace(config, remat=remat))) for remat in ("none", *REMAT_POLICIES)}
    num_bytes = {remat: sum(x.size * x.dtype.itemsize for x in arrays) for remat, arrays in kept.items()}
    assert (
        num_bytes["none"]
        > num_bytes["weights"]
        > num_bytes["dots"]
        > num_bytes["outputs"]
        > num_bytes["full"]
    )
    # of two blocks of five
    (mixed,) = ({x.shape[0] for x in residuals(pure(replace(config, remat="full=2,none=3")))},)
    assert {2, 3} <= mixed
    # offloaded are the inputs of blocks, and nothing else is kept in their place
    assert num_bytes["offload"] == num_bytes["full"]
    offloading = pure(replace(config, remat="offload"))
    gradient = jax.make_jaxpr(jax.grad(functools.partial(loss, offloading.apply)))(offloading.params)
    assert set(re.findall(r"\w+<host>\[5,[\d,]*\]", str(gradient))) == {"bf16<host>[5,2,8,16]"}
    # q, k and v are joined, and up and gate; all in the compute dtype, stacked over layers
    weights = [(5, 16, 2, 4, 4), (5, 4, 4, 16), (5, 16, 2, 24), (5, 24, 16)]
    shapes = {
        remat: {x.shape for x in kept[remat] if x.dtype == jnp.bfloat16} for remat in ("none", "weights")
    }
    assert shapes["none"].issuperset(weights)
    assert shapes["weights"].isdisjoint(weights)


def test_eps_is_read(logits_of):
    """Other options are those of the files of transformers, test_parity.py."""
    assert np.abs(logits_of(replace(LLAMA, eps=0.1)) - logits_of(LLAMA)).max() > 1e-3


class TestDropout:
    """A rate above 0, switched by nnx's `deterministic`."""

    config = replace(GPT, dropout=0.25)

    @pytest.fixture
    def forward(self, pure, seeded, quick_jit):
        """(config, deterministic) -> (seed -> the logits of two calls of one module)."""

        def compiled(config, deterministic):
            def twice(seed):
                module = seeded(config, pure(GPT).params, seed, deterministic)
                return module(TOKENS), module(TOKENS)

            return quick_jit(twice)

        return compiled

    def test_each_call_and_each_seed_has_masks_of_its_own(self, forward):
        on = forward(self.config, deterministic=False)
        (first, second), (third, _), (again, _) = on(0), on(1), on(1)
        np.testing.assert_array_equal(third, again)
        assert not np.allclose(first, second)
        assert not np.allclose(first, third)

    def test_shares_of_blocks_know_which_have_windows(self, pure, seeded, quick_jit):
        """As the stages of a pipeline have them, with dropout, which adds its keys."""
        config = replace(GEMMA, dropout=0.25)

        def whole():
            return seeded(config, pure(GEMMA).params, 3)(TOKENS)

        def in_shares():
            module = seeded(config, pure(GEMMA).params, 3)
            x, of_blocks = module.first(TOKENS), module.block_keys()
            for share in (slice(0, 1), slice(1, 3)):
                blocks, keys = jax.tree.map(lambda leaf, s=share: leaf[s], (module.blocks, of_blocks))
                x = module.run(blocks, x, keys)
            return module.last(x)

        # the shares add in other orders, which jaxlib 0.11 rounds by up to 1e-5 in logits of 3
        atol = 2e-5 if jax.__version_info__ >= (0, 11) else 1e-6
        assert_close(quick_jit(in_shares)(), quick_jit(whole)(), atol=atol)

    def test_the_embedding_and_every_layer_have_a_key_of_their_own(self, pure, seeded, monkeypatch):
        used = []
        monkeypatch.setattr(nnx.Dropout, "__call__", lambda _, x, rngs: used.append(rngs) or x)
        module = seeded(self.config, pure(GPT).params, 7)
        module.first(TOKENS)
        data = [tuple(jax.random.key_data(key).tolist()) for key in (*used, *module.block_keys())]
        assert len(set(data)) == len(data) == self.config.num_layers + 1

    def test_the_embedding_drops_the_rate(self, pure, seeded, quick_jit):
        tokens = jnp.zeros((64, 8), int)
        embedded = quick_jit(lambda: seeded(self.config, pure(GPT).params, 0).first(tokens))()
        assert (np.asarray(embedded) == 0).mean() == pytest.approx(0.25, abs=0.02)

    def test_scan_and_unrolled_draw_the_same_masks(self, forward):
        scanned, unrolled = (forward(replace(self.config, scan=scan), False)(0) for scan in (True, False))
        jax.tree.map(assert_close, scanned, unrolled)

    @pytest.mark.parametrize(("half", "last"), [("attention", "o"), ("mlp", "down")])
    def test_each_half_of_each_layer_drops_the_rate(self, half, last, pure, quick_jit):
        """Each block adds the constant 1 to a stream of zeros: what it dropped is where it added nothing."""
        module: Any = nnx.eval_shape(lambda: self.config(nnx.Rngs(0)))
        graph, params = nnx.split(module.blocks)
        values = jax.tree.map(np.zeros_like, pure(GPT).params["blocks"])
        values[half][last]["bias"] += 1

        def run(values):
            nnx.replace_by_pure_dict(params, values)
            blocks = nnx.merge(graph, params)
            keys = jax.random.split(jax.random.key(0), 2)
            x = jnp.zeros((32, 8, 16))
            return [block(x, key) for block, key in zip(unstacked(blocks), keys, strict=True)]

        first, second = (np.asarray(x) == 0 for x in quick_jit(run)(values))
        assert first.mean() == pytest.approx(0.25, abs=0.03)
        assert (first & second).mean() == pytest.approx(0.0625, abs=0.02)


def unstacked(blocks):
    return [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(2)]
