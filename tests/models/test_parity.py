"""Our decoder and encoder against Hugging Face transformers, from the files of make_golden.py."""

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.models import huggingface
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.huggingface.families import read_config, write_config

GOLDEN = Path(__file__).parent / "golden"


# test_generate.py has the tokens of these, and others here have their options
GENERATED = ("gemma", "llama", "mistral", "phi3", "qwen3")


def cases(full):
    """Those of the files, some with `--full` alone."""
    return [
        pytest.param(path.stem, marks=[pytest.mark.full] * (path.stem in full))
        for path in sorted(GOLDEN.glob("*.npz"))
        if not path.stem.startswith(("vit", "resnet", "t5"))
    ]


@pytest.fixture(scope="module", params=cases(GENERATED))
def golden(request):
    with np.load(GOLDEN / f"{request.param}.npz") as file:
        return {name: file[name] for name in file.files}


def part(golden, prefix):
    return {name.removeprefix(prefix): x for name, x in golden.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def ours(golden, pure, quick_jit):
    """Config, loss, logits and gradients of the converted model; the loss is the mean cross-entropy of each
    next token, or of the chosen ones of a text with padding."""
    config, params = huggingface.from_huggingface(json.loads(str(golden["config"])), part(golden, "weight/"))

    inputs = [golden[name] for name in ("tokens", "mask", "segments") if name in golden]

    def loss(params, inputs):
        logits = pure(config).apply(params, *inputs)
        if "targets" in golden:
            rows, targets, weights = logits, golden["targets"], golden["chosen"]
        else:
            rows, targets = logits[:, :-1], inputs[0][:, 1:]
            weights = np.ones(targets.shape)
        found = -jnp.take_along_axis(jax.nn.log_softmax(rows), targets[..., None], axis=-1)[..., 0]
        return (found * weights).sum() / weights.sum(), logits

    (value, logits), gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))(params, inputs)
    return config, value, logits, jax.tree.map(np.asarray, gradient)


@pytest.mark.parametrize("golden", cases((*GENERATED, "mixtral", "qwen2_moe")), indirect=True)
def test_logits_and_loss(golden, ours):
    _, value, logits, _ = ours
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, golden["loss"], rtol=0, atol=1e-5)


def test_every_gradient(golden, ours):
    """Gradients go through the converter's inverse, which has to reverse every slice and transpose."""
    config, _, _, gradient = ours
    theirs = part(golden, "gradient/")
    written = huggingface.to_huggingface(config, gradient)
    assert written.keys() == theirs.keys()
    # what all keys have in common a softmax does not see
    assert all(np.abs(x).max() > 1e-4 for name, x in theirs.items() if not name.endswith("key.bias"))
    for name, expected in theirs.items():
        np.testing.assert_allclose(written[name], expected, rtol=0, atol=1e-5, err_msg=name)


LLAMA = DecoderConfig(
    vocab=32, seq=12, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp=24,
    positions="rotary", theta=500.0, norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
GEMMA = replace(LLAMA, norm="rmsnorm_plus_one", activation="geglu", tied=True, embed_scale=4.0)
GEMMA_2 = replace(GEMMA, post_norm=True, window=4)
YARN = "yarn:factor=3.0,original_seq=16.0,fast=2.0,slow=0.25"
FACTORS = "short=1.0+1.25,long=1.5+7.0"
LONG = replace(LLAMA, seq=24, embed=32, head_dim=None, rotary_dims=4)
EXPECTED = {
    "gpt2": DecoderConfig(vocab=32, seq=12, embed=16, num_layers=2, num_heads=4),
    "bert": EncoderConfig(vocab=32, seq=12, embed=16, num_layers=2, num_heads=4, mlp=24, segments=3),
    "llama": LLAMA,
    "llama3": replace(LLAMA, rope_scaling="llama3:factor=4.0,original_seq=40.0,low=1.0,high=4.0", tied=True),
    "mistral": replace(LLAMA, window=4),
    "qwen2": replace(LLAMA, embed=32, head_dim=None, theta=100.0, rope_scaling=YARN, qkv_bias=True),
    "qwen3": replace(LLAMA, qk_norm=True),
    "mixtral": replace(LLAMA, experts="num=4,top=2"),
    "qwen2_moe": replace(
        LLAMA, embed=32, head_dim=None, qkv_bias=True, mlp=12,
        experts="num=5,top=3,shared=2,normalised=all,shared_gate=sigmoid",
    ),
    "qwen3_moe": replace(LLAMA, qk_norm=True, mlp=12, experts="num=5,top=2"),
    "phi3": replace(LLAMA, embed=32, head_dim=None, rotary_dims=4, window=4),
    "phi3_long": replace(LONG, rope_scaling=f"longrope:factor=3.0,original_seq=8.0,{FACTORS}"),
    "phi3_short": replace(LONG, rope_scaling=f"longrope:factor=2.0,original_seq=12.0,{FACTORS}"),
    "starcoder2": replace(
        LLAMA, embed=32, head_dim=None, norm="layernorm", activation="gelu", bias=True, tied=True, window=4
    ),
    "olmo2": replace(
        LLAMA, embed=32, head_dim=None, post_norm=True, only_post_norm=True, qk_norm=True, qk_norm_joint=True
    ),
    "gpt_neox": replace(
        LLAMA, embed=32, head_dim=None, num_kv_heads=None, norm="layernorm", activation="gelu_erf", bias=True,
        rotary_dims=2, parallel=True,
    ),
    "gemma": GEMMA,
    "gemma2": replace(
        GEMMA_2, num_layers=3, full_every=2, soft_cap=2.0, logits_soft_cap=3.0, query_scale=5**-0.5
    ),
    "gemma3": replace(
        GEMMA_2, num_layers=4, full_every=3, qk_norm=True, theta=5000.0, window_theta=100.0,
        rope_scaling="linear:factor=4.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_configurations_are_read(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        assert read_config(json.loads(str(file["config"])))[1] == EXPECTED[name]


def test_padding_and_segments_are_in_the_file_of_the_encoder():
    with np.load(GOLDEN / "bert.npz") as file:
        assert (file["mask"].min(), file["segments"].max()) == (0, 2)


def test_versions_are_recorded(golden):
    assert set(json.loads(str(golden["versions"]))) == {"torch", "transformers", "numpy"}


SWITCHED = {
    # golden file: (switches, endings of the names of arrays that then have biases, or have none)
    "llama": ({"attention_bias": True, "mlp_bias": True}, "_proj"),
    "qwen3": ({"attention_bias": True}, "[qkvo]_proj"),
    "qwen3_moe": ({"attention_bias": True}, "[qkvo]_proj"),
    "olmo2": ({"attention_bias": True}, "[qkvo]_proj"),
    "gemma": ({"attention_bias": True}, "[qkvo]_proj"),
    "gemma2": ({"attention_bias": True}, "[qkvo]_proj"),
    "gemma3": ({"attention_bias": True}, "[qkvo]_proj"),
    "gpt_neox": ({"attention_bias": False}, r"attention\.(query_key_value|dense)"),
    "starcoder2": ({"use_bias": False}, "(_proj|c_fc)"),
    "qwen2_moe": ({"qkv_bias": False}, "[qkv]_proj"),
    "vit": ({"qkv_bias": False}, r"attention\.[qkv]_proj"),
}


def switched(name):
    """Return the golden config with biases switched, its state dict, and the changed state dict."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        golden = {each: file[each] for each in file.files}
    entries, ending = SWITCHED[name]
    config, state = json.loads(str(golden["config"])), part(golden, "weight/")
    rng = np.random.default_rng(0)
    changed = {}
    for each, x in state.items():
        layer, _, kind = each.rpartition(".")
        if not (re.search(f"{ending}$", layer) and "experts" not in layer):
            changed[each] = x
        elif kind == "weight":
            changed[each] = x
            if any(entries.values()):
                changed[f"{layer}.bias"] = rng.normal(0, 0.5, len(x)).astype(np.float32)
    assert len(changed) != len(state)
    return {**config, **entries}, config, state, changed


@pytest.mark.parametrize("name", SWITCHED)
def test_families_with_and_without_biases_come_back_bitwise(name):
    hf_config, _, _, state = switched(name)
    config, params = huggingface.from_huggingface(hf_config, state)
    written = huggingface.to_huggingface(config, params)
    assert len(written) == len(state)
    assert name == "vit" or written.keys() == state.keys()  # it has the newer names
    for each in written.keys() & state.keys():
        np.testing.assert_array_equal(written[each], state[each], err_msg=each)
    jax.tree.map(np.testing.assert_array_equal, huggingface.from_huggingface(hf_config, written)[1], params)
    about = write_config(config, hf_config["model_type"])
    assert {entry: about[entry] for entry in SWITCHED[name][0]} == SWITCHED[name][0]
    again = read_config(json.loads(json.dumps(about)))[1]
    assert again.sizes == config.sizes
    assert vars(again) | {"head_dim": None, "mlp": None} == vars(config) | {"head_dim": None, "mlp": None}


@pytest.mark.parametrize("name", ["gpt_neox", "starcoder2"])
def test_a_model_without_biases_is_one_whose_biases_are_zero(name, pure, quick_jit):
    """The logits of the one with biases are those of transformers, see above."""
    hf_config, with_biases, state, changed = switched(name)
    tokens = np.arange(24).reshape(2, 12) % 32
    zeros = {each: changed.get(each, np.zeros_like(x)) for each, x in state.items()}
    logits = []
    for about, arrays in ((hf_config, changed), (with_biases, zeros)):
        config, params = huggingface.from_huggingface(about, arrays)
        logits.append(quick_jit(pure(config).apply)(params, tokens))
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5)


def test_the_logits_of_a_llama_with_biases(pure, quick_jit):
    hf_config, _, _, state = switched("llama")
    config, params = huggingface.from_huggingface(hf_config, state)
    assert (config.bias, config.attention_bias) == (True, None)
    tokens = np.arange(24).reshape(2, 12) % 32
    logits = quick_jit(pure(config).apply)(params, tokens)
    np.testing.assert_allclose(logits, llama_logits(hf_config, state, tokens), rtol=0, atol=1e-5)


def llama_logits(config, state, tokens):
    """The model of transformers in numpy, as modeling_llama.py computes it: float64, eager attention."""
    state = {name: x.astype(np.float64) for name, x in state.items()}
    num, dim, eps = config["num_attention_heads"], config["head_dim"], config["rms_norm_eps"]
    repeats = num // config["num_key_value_heads"]
    seq = tokens.shape[1]

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * state[f"{name}.weight"]

    def linear(x, name):
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    frequencies = config["rope_parameters"]["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    angles = np.tile(np.arange(seq)[:, None] * frequencies, 2)

    def rotated(x):
        turned = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * np.cos(angles) + turned * np.sin(angles)

    x = state["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, f"{layer}input_layernorm")
        q, k, v = (
            linear(h, f"{layer}self_attn.{w}_proj").reshape(len(x), seq, -1, dim).swapaxes(1, 2)
            for w in "qkv"
        )
        k, v = (np.repeat(each, repeats, 1) for each in (rotated(k), v))
        scores = rotated(q) @ k.swapaxes(2, 3) / np.sqrt(dim)
        scores = np.where(np.tri(seq, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        h = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2).reshape(len(x), seq, -1)
        x = x + linear(h, f"{layer}self_attn.o_proj")
        h = norm(x, f"{layer}post_attention_layernorm")
        gate = linear(h, f"{layer}mlp.gate_proj")
        h = gate / (1 + np.exp(-gate)) * linear(h, f"{layer}mlp.up_proj")
        x = x + linear(h, f"{layer}mlp.down_proj")
    return norm(x, "model.norm") @ state["lm_head.weight"].T
