"""Our models against Hugging Face transformers, from the files of make_golden.py."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import fill
from golden_models import GOLDEN, load_golden, load_model, select

from shardtrain.models import huggingface
from shardtrain.models.huggingface.families import read_config, write_config

# test_generate.py has the tokens of these, and others here have their options
GENERATED = ("gemma", "llama", "mistral", "phi3", "qwen3")


def cases(full):
    """Those of the files with gradients, some with `--full` alone."""
    return [
        pytest.param(path.stem, marks=[pytest.mark.full] * (path.stem in full))
        for path in sorted(GOLDEN.glob("*.npz"))
        if not path.stem.startswith("resnet")
    ]


@pytest.fixture(scope="module", params=cases(GENERATED))
def golden(request):
    return load_golden(request.param)


def read_inputs(golden):
    if "image" in golden:
        return [golden["image"].transpose(0, 2, 3, 1)]
    if "target" in golden:
        return [golden["tokens"], golden["target"][:, :-1], golden["mask"]]
    return [golden[name] for name in ("tokens", "mask", "segments") if name in golden]


def mean_loss(logits, golden):
    """The mean cross-entropy: of classes, chosen tokens of a text with padding, or each next token."""
    rows, weights = logits, 1
    if "label" in golden:
        targets = golden["label"]
    elif "chosen" in golden:
        targets, weights = golden["targets"], golden["chosen"]
    elif "target" in golden:
        targets = golden["target"][:, 1:]
    else:
        rows, targets = logits[:, :-1], golden["tokens"][:, 1:]
    found = -jnp.take_along_axis(jax.nn.log_softmax(rows), targets[..., None], axis=-1)[..., 0]
    return jnp.average(found, weights=jnp.broadcast_to(weights, found.shape))


@pytest.fixture(scope="module")
def ours(golden, quick_jit):
    """Config, loss, logits and gradients of the converted model."""
    about = json.loads(str(golden["config"]))
    config, params = huggingface.from_huggingface(about, select(golden, "weight/"))

    def loss(params, inputs):
        logits = fill(config, params)(*inputs)
        return mean_loss(logits, golden), logits

    compute = quick_jit(jax.value_and_grad(loss, has_aux=True))
    (value, logits), gradient = compute(params, read_inputs(golden))
    return config, value, logits, jax.tree.map(np.asarray, gradient)


@pytest.mark.parametrize("golden", cases((*GENERATED, "mixtral", "qwen2_moe")), indirect=True)
def test_logits_and_loss(golden, ours):
    """Of texts and sources the second one ends in padding, which no half sees."""
    _, value, logits, _ = ours
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, golden["loss"], rtol=0, atol=1e-5)


def test_every_gradient(golden, ours):
    """Gradients go through the converter's inverse, which has to reverse every slice and transpose."""
    config, _, _, gradient = ours
    theirs = select(golden, "gradient/")
    written = huggingface.to_huggingface(config, gradient)
    if "image" in golden:  # written by their newer names
        about = json.loads(str(golden["config"]))
        theirs = huggingface.to_huggingface(config, huggingface.from_huggingface(about, theirs)[1])
    assert written.keys() == theirs.keys()
    # what all keys have in common a softmax does not see
    assert all(np.abs(x).max() > 1e-4 for name, x in theirs.items() if not name.endswith("key.bias"))
    for name, expected in theirs.items():
        np.testing.assert_allclose(written[name], expected, rtol=0, atol=1e-5, err_msg=name)


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
    entries, ending = SWITCHED[name]
    config, state = load_model(name)
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
