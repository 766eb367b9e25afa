"""Whose exception it is: of the user's code, or of this package, which explains what it refuses."""

import sys
from pathlib import Path

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


def test_what_a_model_of_the_package_refuses_passes_through():
    with pytest.raises(ValueError, match="num_heads"), user_code(lambda error: "the model"):
        DecoderConfig(vocab=8, seq=8, embed=8, num_layers=1, num_heads=-1)
