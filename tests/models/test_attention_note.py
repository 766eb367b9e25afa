"""The line that says which attention a traced program computes, and why."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.cli import inspect
from shardtrain.functional.activation_rules import activation_rules, noting
from shardtrain.functional.run_trace import find_model_ops
from shardtrain.models import ops
from shardtrain.models.attention import attend
from shardtrain.plan.compile import Figures
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

CONFIG = TinyConfig()
H100 = SimpleNamespace(device_kind="NVIDIA H100", compute_capability="9.0")


def noted(kind: str = "auto", dtype=jnp.float32, head_dim=8, layout=Layout(mesh={"data": 1})):
    """The lines of a function that is traced twice under the rules of a layout."""
    lines, x = [], jax.ShapeDtypeStruct((4, 8, 2, head_dim), dtype)
    mesh = make_mesh(layout, jax.devices()[: math.prod(layout.mesh.values())])

    def function(x):
        with activation_rules(layout.activation_rules, mesh, *layout.tracing):
            return attend(find_model_ops(), x, x, x, kind) + attend(find_model_ops(), x, x, x, kind)

    with noting(lines.append):
        jax.eval_shape(function, x)
        jax.eval_shape(function, x)
    # nobody asks any more
    jax.eval_shape(function, x)
    return lines


def test_each_line_comes_once():
    assert noted() == [
        "attention: xla, by auto: cudnn needs 16 bits, not float32; NVIDIA GPUs here from"
        " compute capability 8.0, not cpu"
    ]
    assert noted("xla", jnp.bfloat16) == ["attention: xla, as asked for: bfloat16 on cpu"]


def test_flash_attention_is_named_with_its_device(monkeypatch):
    monkeypatch.setattr(ops, "find_devices", lambda: [H100])
    # jax traces cuDNN's attention only where such a device is
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda q, *_, **__: q)
    expected = "attention: cudnn, by auto: bfloat16 on NVIDIA H100 (9.0)"
    assert noted(dtype=jnp.bfloat16, head_dim=64) == [expected]


@pytest.mark.parametrize("kind", ["ring", "all-gather"])
def test_attention_over_an_axis_is_named(kind):
    layout = Layout(mesh={"context": 4}, context_attention=kind)
    expected = f"attention: {kind} over context=4, in plain jax: it has no kernel for any device"
    assert noted(layout=layout) == [expected]


def test_inspect_prints_the_lines_of_the_compiled_step(monkeypatch):
    def compiled(run, kind, sizes):
        layout = Layout(mesh={"data": 1})
        with activation_rules(layout.activation_rules, make_mesh(layout, jax.devices()[:1])):
            x = jax.ShapeDtypeStruct((1, 4, 2, 8), jnp.float32)
            jax.eval_shape(lambda x: attend(find_model_ops(), x, x, x, "xla"), x)
        return Figures(argument_bytes=1, output_bytes=0, alias_bytes=0, temp_bytes=3, collectives=())

    monkeypatch.setattr(inspect, "compile_figures", compiled)
    run = st.Run(model=CONFIG, data=st.Text(seq=8))
    text = inspect._compile(run, inspect.InspectOptions(compile="cpu"), {"data": 1})
    assert text.startswith("attention: xla, as asked for: float32 on cpu\ncompiled for cpu: ")
