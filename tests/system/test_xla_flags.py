"""Presets of XLA flags beside those of the user; tests/system/test_program_cache.py starts XLA with them."""

import os
import subprocess

import jax
import jax.numpy as jnp
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.cli import compilation
from shardtrain.cli.compilation import set_xla_flags
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.islands.agreement import flags
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.system.xla_flags import PRESETS, apply_preset, preset_text, quick_options
from shardtrain.train_step.placement import init_state, make_placement


@pytest.mark.parametrize("preset", PRESETS)
def test_every_flag_is_added_before_those_of_the_user(preset):
    found = apply_preset(preset, {"XLA_FLAGS": "--xla_dump_to=d"}, "0.10.2")
    assert found.xla_flags.split() == [
        *(f"--{flag.name}={flag.value}" for flag in PRESETS[preset]),
        "--xla_dump_to=d",
    ]
    assert all(flag.source and flag.why for flag in found.added)
    assert all(flag.name in preset_text(preset, found) for flag in found.added)


def test_a_device_with_flags_of_the_user_is_left_alone():
    found = apply_preset("latency-hiding", {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}, "0.10.2")
    assert {flag.device for flag in found.added} == {"cpu"}
    assert preset_text("latency-hiding", found).endswith("; XLA flags for the gpu are those of XLA_FLAGS")


def test_a_file_of_flags_stays_alone():
    found = apply_preset("auto", {"XLA_FLAGS": "flags.txt"}, "0.10.2")
    assert (found.xla_flags, found.added) == ("flags.txt", ())
    assert "XLA flags are those of the file in XLA_FLAGS" in preset_text("auto", found)


def test_another_jaxlib_gets_no_flags():
    found = apply_preset("auto", {}, "0.13.1")
    assert (found.xla_flags, found.added) == ("", ())
    assert preset_text("auto", found) == (
        "XLA flags of the preset 'auto' are not set: they were checked with jaxlib 0.10.x, 0.11.x, 0.12.x,"
        " this is 0.13.1. Set the flags that you want in XLA_FLAGS"
    )


def test_a_command_sets_them(monkeypatch):
    monkeypatch.setattr(compilation, "has_jax_started", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert set_xla_flags(["run.py", "--xla-preset", "none"]) == ""
    assert set_xla_flags(["run.py", "--xla-preset", "no such"]) == ""
    assert os.environ["XLA_FLAGS"] == "--xla_force_host_platform_device_count=2"
    assert "preset auto" in set_xla_flags(["run.py"])
    assert os.environ["XLA_FLAGS"].startswith("--xla_cpu_experimental_ynn_fusion_type=")
    assert os.environ["XLA_FLAGS"].endswith("count=2")
    # islands compare them
    assert f"flags/{PRESETS['auto'][0].name}" in flags(os.environ)


def test_nothing_is_claimed_once_jax_has_started(monkeypatch):
    jax.devices()
    monkeypatch.setenv("XLA_FLAGS", "")
    text = set_xla_flags(["run.py"])
    assert text.startswith("WARNING: the XLA flags of the preset auto are not set, as jax has started")
    assert os.environ["XLA_FLAGS"] == ""


EARLY = """
import jax.numpy as jnp
from shardtrain import Run
from shardtrain.data import Text
from tiny_language_model import TinyConfig
assert jnp.ones(3).sum() == 3
def run():
    return Run(model=TinyConfig(), data=Text(seq=8))
"""


def test_a_run_file_that_starts_jax_has_the_flags(tmp_path, warm_python):
    """`inspect --compile` sets them as `train` does, and keeps its programs."""
    (tmp_path / "early.py").write_text(EARLY)
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    words = ["inspect", "early.py", "--compile", "cpu", "--cpu-devices", "1", "--mesh", "data=1"]
    done = subprocess.run(
        [*warm_python, "-m", "shardtrain", *words, "--batch", "2"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"XLA flags of the preset auto: {PRESETS['auto'][0].name}=" in done.stderr
    assert f" loaded from {os.environ['JAX_COMPILATION_CACHE_DIR']}, " in done.stderr


def test_programs_that_run_once_are_compiled_quickly(monkeypatch):
    """This jaxlib knows the options, and the initial state is compiled with them."""
    options = quick_options("cpu")
    assert options is not None
    double = jax.jit(lambda x: 2 * x, compiler_options=options)
    assert float(double(jnp.float32(3))) == 6
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: 2 * x, compiler_options={**options, "xla_no_such": True})(jnp.float32(3))
    assert quick_options("cpu", "0.13.0") is None
    assert quick_options("cuda") is None

    given = []
    jit = jax.jit

    def recorded(*arguments, **named):
        given.append(named.get("compiler_options"))
        return jit(*arguments, **named)

    monkeypatch.setattr(jax, "jit", recorded)
    model, layout = from_nnx(TinyConfig()), Layout(mesh={"data": 2})
    mesh = make_mesh(layout, jax.devices()[:2])
    placement = make_placement(model, optax.identity(), layout, mesh)
    init_state(model, optax.identity(), placement)
    assert options in given
