"""Models and losses as people write them train, or are refused in one sentence with the user's line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from shardtrain.cli import main
from shardtrain.cli.run_file import load_run
from shardtrain.trainer.sources import find_source_warnings, make_batches

# ruff: noqa: E501  (a row is a line)

FILE = Path(__file__).parent / "programs" / "own_runs.py"
LINES = FILE.read_text().splitlines()
DRAWS = "its key is not derived from the key that the model gets, so each microbatch and replica would get the same numbers, in every step; use apply.key in the loss"
CONSTANT = "gives other numbers each time that it is traced | they would be constants | draw with the key of the step"


def line(text):
    """The file and line of the runs that has a text."""
    (number,) = (number for number, each in enumerate(LINES, 1) if text in each)
    return f"own_runs.py:{number}"


REFUSED = {
    "own_key": f"{line('super().__call__(x + jax.random.normal(key, x.shape))')} | {DRAWS}",
    "key_in_call": f"{line('PRNGKey(3)')} | {DRAWS}",
    "key_of_rows": f"{line('jax.random.split(jax.random.key(1)')} | {DRAWS}",
    "key_as_state": f"{line('return x + jax.random.normal(key, x.shape), None')} | {DRAWS}",
    "key_as_attribute": "Own keeps the random key key, which would draw the same numbers in every step | self.rngs = rngs",
    "numpy_noise": f"{line('np.random.normal(size=4)})')} {CONSTANT}",
    "python_noise": f"{line('random.random()')} {CONSTANT}",
    "count_of_none": "the count of the loss is 0 for the first batch, and a step divides by it; return the number of examples",
    "whole_numbers": "sum is int32, which has no gradient; return a float",
    "unknown_field": f"{line('return st.Run(model=model')}: Run has no field 'bacth' (did you mean 'batch'",
    "unknown_field_of_a_part": f"{line('evry_steps')}: CheckpointPolicy has no field 'evry_steps' (did you mean 'every_steps'",
    "more_arguments": "model is Sized, which needs width, and a run gives rngs alone; write model=lambda rngs: Sized(width=..., rngs=rngs)",
    "no_arguments": "model is <lambda>, which takes no random streams | write model=lambda rngs: MyModule(",
    "instance": "model is an nnx module Net that is already initialised | give its class, Net",
    "linen_class": "model is the class Own of linen modules, whose inputs are not known; write from_linen(module,",
    "no_module": "model <lambda> gives tuple; it must return an nnx.Module, or be a class of them",
    "no_call": "model Own has no __call__; a loss calls it, as apply(inputs)",
    "whole_number_parameters": "parameters are trained, so they are floats; make these constants | - table is int32",
    "sets_a_parameter": "a call of the model sets its parameter up/bias, which only the optimizer changes, so what was set would be lost",
    "explicit_shardings": f"{line('jnp.matmul(x, jnp.eye(4), out_sharding')}: the model gives out_sharding to a function of jax | nn.with_logical_constraint(x,",
    "optimizer_of_other_shapes": "the optimizer gives updates of another structure or of other shapes than the parameters",
    "grown_state": "a step must keep it; initialise each array with the shape that it has after a call: - mean: () -> (1, 4)",
}  # fmt: skip
"""Run -> parts of its message, between bars; with exit code 2."""

FAILED = {
    "wrong_name": "return undefined_thing | NameError: name 'undefined_thing' is not defined | the run of | raised NameError",
    "optimizer_without_name": "undefined_rate * step | the optimizer raised NameError: name 'undefined_rate' is not defined",
    "evaluated_without_name": "lambda opt_state, params: undefined_average | evaluate_with raised NameError",
    "broken_constructor": "self.up = nnx.Linear(4, rngs=rngs) | the constructor of the model, Own, raised TypeError: Linear.__init__() missing 1",
    "broken_call": "return super().__call__(x.reshape(-1, 3)) | the loss squares, given a batch of 'weights' float32 (8,), 'x' float32 (8, 4)",
}  # fmt: skip
"""Likewise for what raises: with the user's lines alone, and exit code 1."""

TRAINED = {
    "key_from_samples": "",
    "fixed_features": "",
    "step_key_with_metrics": "",
    "numpy_rows": f"WARNING: | {line('+ noise.astype(np.float32)')} has a constant with numbers for each row of a batch",
    "broadcast": f"WARNING: | {line('return make(loss=lambda apply, batch: weigh(')} broadcasts arrays of shapes (rows, 1) and (rows,), which gives a number for each pair of rows",
    "without_weights": "WARNING: batch['weights'] do not change the sum or the count of the loss | return (losses * batch['weights']).sum(), batch['weights'].sum()",
    "array_without_elements": "",
    "no_streams": "",
    "more_arguments_given": "",
    "spectral_norm": "",
    "kept_dims": f"WARNING: | {line('super().__call__(x - jax.lax.stop_gradient(self.mean')} gives each row a number that is computed from all rows",
}  # fmt: skip
"""Run -> parts of what is logged; of those without any there is no warning."""

SAME = (
    "step_key", "streams_kept", "arrays_kept", "options_by_name", "options_by_place", "key_by_annotation",
    "linen_key", "shardings_of_outputs",
)  # fmt: skip
"""Runs with the same losses for any split of a batch."""


@pytest.fixture
def run_one(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("COLUMNS", "1000")

    def train(name, *options):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        command = ["train", f"{FILE}:{name}", "--run-dir", str(tmp_path / "run"), "--unnamed", "replicate"]
        code = main([*command, *options])
        printed = capfd.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    return train


def check(text, parts):
    for part in parts.split(" | "):
        assert part in text
    for inner in ("site-packages", "shardtrain/checks", "shardtrain/functional", "shardtrain/trainer"):
        assert f'File "{inner}' not in text
        assert f"{inner}/" not in text


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name, run_one):
    code, text = run_one(name, "--mesh", "data=8")
    check(text, REFUSED[name])
    assert "Traceback" not in text
    assert code == 2


@pytest.mark.parametrize("name", FAILED)
def test_what_raises_has_the_lines_of_the_user(name, run_one):
    code, text = run_one(name, "--mesh", "data=8")
    check(text, FAILED[name])
    assert code == 1


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_right_or_may_be_meant_trains(name, run_one):
    code, text = run_one(name, "--mesh", "data=8")
    check(text, TRAINED[name])
    assert ("WARNING" in text) == bool(TRAINED[name])
    assert code == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("other_samples", "WARNING: sample 0 of Changing has other values when it is read again, of 'x'"),
        ("few_samples", "WARNING: batch is 8, and the data has 5 samples, so in every batch 3 rows are padding of weight 0; use --batch 5 or less"),
    ],
)  # fmt: skip
def test_what_is_odd_about_samples_is_said(name, text):
    run = load_run(f"{FILE}:{name}")
    assert any(
        each.startswith(text) for each in find_source_warnings(make_batches(run, run.data.train(FILE)), run)
    )


def test_a_key_of_the_loss_is_refused_in_any_layout(run_one):
    assert "use apply.key in the loss" in run_one("own_key", "--mesh", "tensor=8")[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (number % 2)) for number, name in enumerate(SAME)]
)
def test_losses_are_those_of_any_split(name, run_one, tmp_path):
    losses = []
    for options in (["--mesh", "tensor=8"], ["--mesh", "data=2,fsdp=2,tensor=2", "--accumulate", "2"]):
        code, text = run_one(name, *options)
        assert code == 0, text
        rows = list(map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()))
        logged = ("train/loss", "heldout/loss")
        losses.append([row[each] for each in logged for row in rows if each in row])
    assert len(losses[0]) == 2 + (name == "step_key")
    assert losses[0][0] != losses[0][1]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=1e-6)


def test_a_path_has_letters(run_one):
    with_empty = run_one("step_key", "--run-dir", "")
    assert with_empty[0] == 2
    assert "--run-dir is ''; give a path, such as . for the current folder" in with_empty[1]
