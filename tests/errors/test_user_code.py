"""Whose exception it is: of the user's code, or of this package, which explains what it refuses."""

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardtrain
from shardtrain.errors.user_code import UserCodeFailed, user_code, user_traceback
from shardtrain.models.decoder import DecoderConfig

ROOT = Path(shardtrain.__file__).parent


@pytest.mark.parametrize("module", ["shardtrain_experiments.run", "run"])
def test_a_folder_whose_name_begins_like_the_package_is_the_users(module):
    path = f"{ROOT}_experiments/run.py"
    names = {"__name__": module}
    exec(compile("def sample():\n    raise ValueError('theirs')\n", path, "exec"), names)
    with pytest.raises(UserCodeFailed, match="sample 3 raised ValueError: theirs") as failed:
        with user_code(lambda error: "sample 3"):
            names["sample"]()
    assert f'File "{path}", line 2, in sample' in user_traceback(failed.value)


def test_an_exit_of_the_users_code_is_no_end_of_the_run():
    with (
        pytest.raises(UserCodeFailed, match=r"sample 3 called sys\.exit\(0\)"),
        user_code(lambda error: "sample 3"),
    ):
        sys.exit(0)


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("if x.sum() > 0: pass", "in the place of if, while, and, or, use jnp.where(condition, a, b)"),
        ("float(x[0])", "use jax.numpy in the place of numpy, float(), int() and .item()"),
        ("numpy.asarray(x)", "use jax.numpy in the place of numpy"),
        ("range(x[0].astype(int))", "use jnp.take, jax.lax.dynamic_slice"),
        ("x[x > 0]", "in the place of x[mask] use jnp.where(mask, x, 0)"),
    ],
)
def test_code_that_needs_the_value_of_a_traced_array_is_named_and_no_function_of_ours(line, change, tmp_path):
    path = tmp_path / "loss.py"
    path.write_text(f"def loss(x):\n    {line}\n")
    names: dict[str, Any] = {"__name__": "loss", "numpy": np}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(UserCodeFailed) as failed, user_code(lambda error: "the loss"):
        jax.eval_shape(names["loss"], jnp.ones(3))
    text = str(failed.value)
    assert text.startswith(f"the loss needs the value of an array at {path}:2 ({line}), and steps are traced")
    assert change in text
    shown = user_traceback(failed.value)
    assert shown.startswith("Traceback (most recent call last):\n")
    assert f'File "{path}", line 2, in loss' in shown
    for each in (text, shown):
        assert str(ROOT) not in each
        assert "while tracing" not in each


def test_what_a_model_of_the_package_refuses_passes_through():
    with pytest.raises(ValueError, match="num_heads"), user_code(lambda error: "the model"):
        DecoderConfig(vocab=8, seq=8, embed=8, num_layers=1, num_heads=-1)
