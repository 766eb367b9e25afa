"""Gradients of microbatches that are added up in bfloat16: close to those in float32, in half the memory."""

from functools import cache

import jax
import numpy as np
import pytest
from mesh_gradients import compile_gradients
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.trainer.setup import make_setup

ROWS, SEQ = 32, 8
CONFIG = TinyConfig(vocab=64, seq=SEQ, embed=64, mlp=256, num_layers=2)


@cache
def compiled(dtype, microbatches):
    """The compiled gradients of a batch, and their arguments."""
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab, (ROWS, SEQ + 1), np.int32)
    batch = {"tokens": tokens, "weights": np.ones(ROWS, np.float32)}
    layout = Layout(mesh={"data": 2, "fsdp": 2})
    return compile_gradients(from_nnx(CONFIG), layout, batch, microbatches, accumulate_dtype=dtype)[:2]


def gradients(dtype, microbatches=8):
    program, arguments = compiled(dtype, microbatches)
    return jax.tree.map(np.asarray, program(*arguments))


def test_sums_in_bfloat16_are_close_to_those_in_float32():
    exact, found = gradients("float32"), gradients("bfloat16")
    assert found.loss_sum == exact.loss_sum
    for one, other in zip(jax.tree.leaves(exact.grads), jax.tree.leaves(found.grads), strict=True):
        assert other.dtype == np.float32
        # 8 sums, each rounded to 8 bits
        apart = np.linalg.norm(one - other) / np.linalg.norm(one)
        assert 1e-5 < apart < 8 * 2**-9


def test_one_microbatch_is_not_rounded():
    jax.tree.map(np.testing.assert_array_equal, gradients("float32", 1), gradients("bfloat16", 1))


def test_the_sums_take_half_the_memory():
    temporary = {}
    for dtype in ("float32", "bfloat16"):
        memory = compiled(dtype, 8)[0].memory_analysis()
        assert memory is not None
        temporary[dtype] = memory.temp_size_in_bytes
    # of the blocks' parameters a device has half (fsdp=2), and their sums have 2 bytes in place of 4
    params = compiled("float32", 8)[1][0]
    halves = sum(x.size for x in jax.tree.leaves(params["blocks"])) / 2 * 2
    assert temporary["float32"] - temporary["bfloat16"] >= 0.9 * halves


def test_pipelines_add_up_in_float32():
    run = st.Run(
        model=CONFIG,
        data=st.Text(seq=SEQ),
        strategy=st.Strategy(layout=Layout(mesh={"pipeline": 2}), accumulate=2, accumulate_dtype="bfloat16"),
    )
    rows = {"tokens": np.zeros((2, SEQ + 1), np.int32), "weights": np.ones(2, np.float32)}
    mesh = make_mesh(run.strategy.layout, jax.devices()[:2])
    with pytest.raises(ValueError, match="accumulate_dtype is 'bfloat16', and a pipeline adds up") as error:
        make_setup(run, microbatch=rows, mesh=mesh)
    assert "use float32, or no pipeline" in str(error.value)
