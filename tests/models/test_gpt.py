"""The GPT of one file: nothing of the package but names of dims, and the step of one device on every mesh."""

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mesh_gradients import compute_gradients

from shardtrain.axes import PIPELINE
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models import gpt
from shardtrain.models.gpt import GptConfig
from shardtrain.sharding.layout import Layout

CONFIG = GptConfig(vocab=32, seq=16, embed=16, num_layers=3, num_heads=4, dropout=0.2)
ROWS = 16


def test_the_file_is_short_and_imports_only_names_of_dims():
    source = Path(gpt.__file__).read_text()
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert {module for module in imported if module and module.startswith("shardtrain")} == {
        "shardtrain.axes"
    }
    assert len(source.splitlines()) <= 150


def test_later_tokens_change_no_earlier_logits():
    model = nnx.jit(nnx.view(CONFIG(nnx.Rngs(params=0, dropout=1)), deterministic=True))
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (2, CONFIG.seq))
    later = tokens.copy()
    later[:, 9:] = (later[:, 9:] + 1) % CONFIG.vocab
    before, after = model(jnp.asarray(tokens)), model(jnp.asarray(later))
    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-6)
    assert np.abs(before[:, 9] - after[:, 9]).max() > 1e-5


@pytest.mark.parametrize("changes", [{"num_heads": 3}, {"num_heads": 0}, {"vocab": -3}, {"dropout": 1.0}])
def test_sizes_that_fit_no_model_are_refused(changes):
    with pytest.raises(ValueError, match="sizes are 1 or more, num_heads divides embed, dropout is in"):
        replace(CONFIG, **changes)


def test_each_call_has_other_dropout():
    model, tokens = CONFIG(nnx.Rngs(params=0, dropout=1)), jnp.zeros((2, CONFIG.seq), int)
    assert np.abs(model(tokens) - model(tokens)).max() > 1e-5


@cache
def gradients(**mesh):
    """Loss and gradients of two microbatches with dropout; the three blocks are two stages of 2 and 1."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (ROWS, CONFIG.seq + 1), np.int32)
    batch = {"tokens": tokens, "weights": np.ones(ROWS, np.float32)}
    counts = (2, 1) if PIPELINE in mesh else ()
    return compute_gradients(from_nnx(CONFIG), Layout(mesh=mesh), batch, 2, counts=counts)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.full),
        {"pipeline": 2, "data": 2, "tensor": 2},
        pytest.param({"context": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.full),
    ],
    ids=lambda mesh: "-".join(mesh),
)
def test_every_mesh_gives_the_step_of_one_device(mesh, assert_same):
    assert_same(gradients(**mesh), gradients(data=1))
