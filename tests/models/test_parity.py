"""Our decoder and encoder against Hugging Face transformers, from the files of make_golden.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.models import huggingface

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module", params=["gpt2", "llama", "bert"])
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


def test_families_differ_in_what_they_exercise(golden, ours):
    """The golden files hold the options they are there for: grouped queries, head_dim, rope base, biases."""
    config = ours[0]
    if "mask" in golden:
        assert (config.activation, config.tied, config.segments, config.eps) == ("gelu_erf", True, 3, 1e-12)
        assert golden["mask"].min() == 0
        assert golden["segments"].max() == 2
    elif config.positions == "rotary":
        size = config.sizes
        assert (config.norm, config.activation, config.bias, config.tied) == (
            "rmsnorm",
            "swiglu",
            False,
            False,
        )
        assert (size["heads"], size["kv_heads"], size["head_dim"], config.theta) == (4, 2, 8, 500.0)
    else:
        assert (config.norm, config.activation, config.bias, config.tied) == ("layernorm", "gelu", True, True)


def test_versions_are_recorded(golden):
    assert set(json.loads(str(golden["versions"]))) == {"torch", "transformers", "numpy"}
