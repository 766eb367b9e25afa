"""Our decoder against Hugging Face transformers: logits and gradients, from the files of make_golden.py."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.models import huggingface

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def golden(request):
    with np.load(GOLDEN / f"{request.param}.npz") as file:
        return {name: file[name] for name in file.files}


def part(golden, prefix):
    return {name.removeprefix(prefix): x for name, x in golden.items() if name.startswith(prefix)}


@pytest.fixture(scope="module")
def ours(golden, pure, quick_jit):
    """Config, logits and gradients of the converted model; the loss is the mean next-token cross-entropy."""
    config, params = huggingface.from_huggingface(json.loads(str(golden["config"])), part(golden, "weight/"))

    def loss(params, tokens):
        logits = pure(config).apply(params, tokens)
        log_p = jax.nn.log_softmax(logits[:, :-1])
        return -jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=-1).mean(), logits

    (value, logits), gradient = quick_jit(jax.value_and_grad(loss, has_aux=True))(params, golden["tokens"])
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
    assert all(np.abs(gradient).max() > 1e-4 for gradient in theirs.values())
    for name, expected in theirs.items():
        np.testing.assert_allclose(written[name], expected, rtol=0, atol=1e-5, err_msg=name)


def test_families_differ_in_what_they_exercise(golden, ours):
    """The golden files hold the options they are there for: grouped queries, head_dim, rope base, biases."""
    config = ours[0]
    if config.positions == "rotary":
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
