"""Fine-tuning: frozen parameters, low-rank adapters, learning rates by path, momentum in bfloat16."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from fine_tuning import CONSTANT, by_hand, close, initial, paths, run_of
from flax.traverse_util import unflatten_dict
from saved_decoder import save
from tiny_language_model import TinyConfig

from shardtrain.functional.frozen import drop_paths
from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.files import export_model, import_model
from shardtrain.models.lora import Lora
from shardtrain.optim.optimizer import OPTIMIZERS, Optimizer, make_optimizer
from shardtrain.optim.optimizer_state import make_storable
from shardtrain.report.sharding import sharding_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import StartFrom, make_model
from shardtrain.trainer.setup import make_setup
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train
from shardtrain.trainer.trained_model import load

PROGRAMS = Path(__file__).parents[1] / "programs"
MODEL = DecoderConfig(
    vocab=64, seq=8, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp=32, positions="rotary",
    norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
LORA = replace(MODEL, lora=Lora(rank=2, alpha=4, on=("q", "v", "down")))


PLAIN = Optimizer(name="sgd", learning_rate=CONSTANT)
"""Adam would enlarge the rounding of small gradients."""


@cache
def tuned():
    """Parameters of `LORA` whose adapters are not 0."""
    random = np.random.default_rng(0)
    return jax.tree.map(lambda x: random.normal(0, 0.3, x.shape).astype(np.float32), initial(run_of(LORA)))


def params_after(run):
    return jax.device_get(train(run, None).state.params)


MESH = {"data": 2, "fsdp": 2, "tensor": 2}
LAYOUTS = {
    "mesh": Strategy(layout=Layout(mesh=MESH), accumulate=2),
    "pipeline": Strategy(layout=Layout(mesh={"pipeline": 2, "data": 4}), accumulate=2),
}


# adapters are trained on a mesh
@pytest.mark.full
@pytest.mark.parametrize("layout", ["mesh", "pipeline"])
def test_frozen_parameters_keep_their_bits_and_the_others_are_trained_as_without_them(layout, tmp_path):
    run = run_of(TinyConfig(num_layers=2), tmp_path, strategy=LAYOUTS[layout], freeze=("*/up", "embedding"))
    before, after = initial(run), params_after(run)
    np.testing.assert_array_equal(before["blocks"]["up"], after["blocks"]["up"])
    np.testing.assert_array_equal(before["embedding"], after["embedding"])
    close(after, by_hand(run))
    assert not np.array_equal(before["blocks"]["down"], after["blocks"]["down"])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["mesh", "pipeline"])
def test_adapters_alone_are_trained(layout, tmp_path):
    run = run_of(LORA, tmp_path, strategy=LAYOUTS[layout], optimizer=PLAIN)
    before, after = initial(run), params_after(run)
    close(after, by_hand(run))
    pairs = zip(paths(after), jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    places = ("attention/q", "attention/v", "mlp/down")
    wanted = {f"blocks/{place}/lora_{x}" for place in places for x in "ab"}
    assert {path for path, a, b in pairs if (a != b).any()} == wanted


def test_the_table_says_how_many_parameters_are_trained():
    run = run_of(LORA, strategy=LAYOUTS["mesh"])
    size = sum(x.size for x in jax.tree.leaves(initial(run)))
    text = sharding_text(make_setup(run).placement.specs, axis_sizes(MESH, 8))
    assert f"trained: 416 of them ({416 / size:.2%})" in text


def test_an_adapter_is_the_same_as_its_merged_kernel(tmp_path):
    params = tuned()
    flat = {path: np.asarray(x) for path, x in zip(paths(params), jax.tree.leaves(params), strict=True)}
    files = export_model(
        tmp_path / "out", vars(LORA), {p: x.shape for p, x in flat.items()}, flat.__getitem__
    )
    assert "model.safetensors" in files
    plain = import_model(tmp_path / "out")
    assert plain.config == replace(MODEL, head_dim=4)
    tokens = np.arange(8)[None]
    found = convert_model(MODEL).apply(
        unflatten_dict(dict(plain.arrays), sep="/"), {}, jax.random.key(0), False, tokens
    )[0]
    wanted = convert_model(LORA).apply(params, {}, jax.random.key(0), False, tokens)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    base = convert_model(MODEL).apply(
        drop_paths(params, make_model(run_of(LORA)).frozen ^ set(flat)), {}, jax.random.key(0), False, tokens
    )[0]
    assert np.abs(found - base).max() > 1e-3


def test_adapters_are_written_as_peft_has_them(tmp_path):
    params = tuned()
    flat = dict(zip(paths(params), jax.tree.leaves(params), strict=True))
    export_model(tmp_path / "out", vars(LORA), {}, flat.__getitem__, adapters=True)
    about = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (2, 4.0)
    assert about["target_modules"] == ["mlp.down_proj", "self_attn.q_proj", "self_attn.v_proj"]
    found = safetensors.numpy.load_file(tmp_path / "out/adapter_model.safetensors")
    assert len(found) == 2 * 3 * 2
    place = "base_model.model.model.layers.1.self_attn.q_proj"
    a, b = found[f"{place}.lora_A.weight"], found[f"{place}.lora_B.weight"]
    # PEFT adds (alpha / r) B A to a weight (out, in)
    first, second = (np.asarray(flat[f"blocks/attention/q/lora_{x}"])[1] for x in "ab")
    np.testing.assert_allclose(
        (b @ a).T, np.tensordot(first, second, 1).reshape(16, 16), rtol=1e-5, atol=1e-7
    )


def test_adapters_of_another_rank_are_not_replaced_in_silence(tmp_path, one_device):
    save(tmp_path / "two", LORA)
    other = replace(LORA, lora=Lora(rank=3, on=("q", "v", "down")))
    with pytest.raises(ValueError, match=r"saved float32 \(2, 16, 2\), asked for float32 \(2, 16, 3\)"):
        train(run_of(other, tmp_path / "three", start_from=StartFrom(checkpoint=tmp_path / "two")), None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lora": "rank=2,rank=4"}, "rank is given 2 times"),
        ({"lora": "rank=2,on=q+q"}, "q is named 2 times"),
        ({"lora": "rank=2,on=gate", "activation": "gelu"}, "a feed-forward with gelu has no gate"),
    ],
)
def test_adapters_that_cannot_be_made_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        replace(MODEL, **options)


def test_adapters_need_at_most_two_percent_of_the_optimizers_memory():
    llama = DecoderConfig(
        vocab=128_256, seq=1024, embed=2048, num_layers=16, num_heads=32, num_kv_heads=8, mlp=8192,
        positions="rotary", norm="rmsnorm", activation="swiglu", bias=False,
    )  # fmt: skip

    def state_bytes(model):
        run = run_of(model)
        pure = make_model(run)
        optimizer, _ = make_optimizer(run.optimizer, run.steps, pure.dims, frozen=pure.frozen)
        params, _ = jax.eval_shape(pure.init, jax.random.key(0))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(optimizer.init, params)))

    assert state_bytes(replace(llama, lora=Lora(rank=16))) <= 0.02 * state_bytes(llama)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adafactor"])
def test_a_momentum_in_bfloat16_takes_half_the_memory(name):
    dims = convert_model(TinyConfig(num_layers=2)).dims
    params = initial(run_of(TinyConfig(num_layers=2)))

    def sizes(dtype):
        optimizer, _ = make_optimizer(Optimizer(name=name, momentum_dtype=dtype), 10, dims)
        stored = make_storable(optimizer)
        updates, state = jax.jit(lambda params: stored.update(params, stored.init(params), params))(params)
        return updates, sum(x.nbytes for x in jax.tree.leaves(state))

    (exact, whole), (found, narrow) = sizes("float32"), sizes("bfloat16")
    assert whole - narrow == sum(x.nbytes for x in jax.tree.leaves(params)) // 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=1e-6), found, exact)


def test_rates_scale_the_updates_of_their_parameters():
    same = Optimizer(name="sgd", learning_rate=CONSTANT, clip=None)
    run = run_of(TinyConfig(num_layers=2), steps=1, optimizer=same)
    before, plain = initial(run), by_hand(run)
    found = by_hand(replace(run, optimizer=replace(same, rates=("*/up=0", "blocks/*=0.5"))))
    np.testing.assert_array_equal(found["blocks"]["up"], before["blocks"]["up"])
    np.testing.assert_allclose(
        found["blocks"]["down"] - before["blocks"]["down"],
        0.5 * (plain["blocks"]["down"] - before["blocks"]["down"]), rtol=1e-4, atol=1e-7,
    )  # fmt: skip
    np.testing.assert_array_equal(found["embedding"], plain["embedding"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"freeze": ("blocks/dwn",)}, "no parameter matches 'blocks/dwn' (did you mean 'blocks/down'"),
        ({"freeze": ("*",)}, "matches all 3 parameters, so nothing is trained"),
        ({"freeze": ("!*/up",)}, "which excludes parameters and freezes none"),
        ({"optimizer": Optimizer(rates=("head=2",))}, "'head=2' is the first to match no parameter"),
        (
            {"freeze": ("*/up",), "optimizer": Optimizer(rates=("*/up=2",))},
            "'*/up=2' is the first to match no",
        ),
    ],
)
def test_patterns_that_fit_nothing_are_refused(options, text, tmp_path):
    with pytest.raises(ValueError, match=re.escape(text)):
        make_setup(run_of(TinyConfig(), tmp_path, **options))


def test_an_average_of_trained_parameters_is_evaluated_with_the_frozen_ones(tmp_path, one_device):
    run = run_of(
        TinyConfig(num_layers=2), tmp_path, freeze=("embedding",), evaluate_with="ema",
        optimizer=Optimizer(learning_rate=CONSTANT, ema=0.5),
    )  # fmt: skip
    state = train(run, None).state
    loaded = load(tmp_path, run.model)
    np.testing.assert_array_equal(loaded.embedding[...], state.params["embedding"])
    assert not np.array_equal(loaded.blocks.up[...], state.params["blocks"]["up"])


@pytest.mark.full
def test_islands_train_and_send_the_trained_parameters_alone(mpiexec, tmp_path):
    found = mpiexec(2, PROGRAMS / "fine_tuning_islands.py", tmp_path)
    assert found[0] == "replicas True\ndeltas True\n"
