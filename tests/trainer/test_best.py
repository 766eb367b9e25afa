"""A run keeps the checkpoint with the best evaluation, whatever interrupts it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from quiet_training import InMemory, random_tokens, train_quietly
from repeatable_metrics import metrics_of
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.evaluations import find_best_saved
from shardtrain.checkpoints.paths import find_finished_steps
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.trainer import session
from shardtrain.trainer.config import Run, StartFrom
from shardtrain.trainer.sources import describe_data, is_other_data
from shardtrain.trainer.trained_model import load

pytestmark = pytest.mark.usefixtures("one_device")
LOSSES = {1: 5.0, 2: 4.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 3.0, 7: 0.5, 8: 0.7}


SAMPLES = random_tokens()
RUN = Run(
    model=TinyConfig(vocab=32),
    data=InMemory(SAMPLES, SAMPLES[:8]),
    batch=8,
    steps=6,
    log_every=1,
    evaluate_every=1,
    checkpoints=CheckpointPolicy(keep=1, best="heldout/loss"),
)


class Killed(Exception):
    """Stands for the end of a process."""


def start(folder: Path, patch: pytest.MonkeyPatch, die_at: int = 0, **changes: Any) -> str:
    """Train; the evaluation of each step gives its value of `LOSSES`, and that of one step never returns."""

    def given(*arguments: Any) -> Any:
        def evaluate(state: Any) -> dict[str, float]:
            step = int(state.step)
            if step == die_at:
                raise Killed
            return {"heldout/loss": LOSSES[step]}

        return evaluate

    with patch.context() as inside:
        inside.setattr(session, "make_evaluation", given)
        return train_quietly(dataclasses.replace(RUN, run_dir=folder, **changes))[1]


@pytest.mark.parametrize("change", ["another number", pytest.param("other contents", marks=pytest.mark.full)])
def test_the_best_step_is_that_of_the_held_out_data_of_now(change, tmp_path, monkeypatch):
    start(tmp_path, monkeypatch, steps=4)
    assert kept(tmp_path) == ([3, 4], 3)
    others = {"another number": SAMPLES[:7], "other contents": SAMPLES[8:16]}[change]
    text = start(tmp_path, monkeypatch, steps=6, data=InMemory(SAMPLES, others))
    assert "the held-out data has changed since the checkpoint" in text
    assert kept(tmp_path) == ([5, 6], 5)


def test_a_source_that_grew_is_other_data():
    before, after = (describe_data([0] * number, {}, with_contents=False) for number in (40, 56))
    assert is_other_data(before, after)
    assert not is_other_data(before, before)


def kept(folder: Path) -> tuple[list[int], int | None]:
    """The steps that are there, and the best of them."""
    steps = list(find_finished_steps(folder / "checkpoints"))
    best = find_best_saved(folder / "checkpoints", steps)
    return steps, best and best.step


def test_the_best_step_is_saved_and_kept_also_over_a_resume(tmp_path, monkeypatch):
    printed = start(tmp_path, monkeypatch)
    # each evaluation that was better than all before was saved, and the last step as always
    saved = [line.removeprefix("saving step ") for line in printed.splitlines() if "saving step" in line]
    assert saved == ["1", "2", "3", "6"]
    assert kept(tmp_path) == ([3, 6], 3)
    # a better one replaces it
    start(tmp_path, monkeypatch, steps=8)
    assert kept(tmp_path) == ([7, 8], 7)
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(1, 9))
    assert "starts from the parameters of step 7" in start(
        tmp_path / "other", monkeypatch, start_from=StartFrom(checkpoint=tmp_path, step="best"), steps=1
    )
    model = load(tmp_path, RUN.model, step="best")
    assert model.embedding[...].shape == (32, 8)


@pytest.mark.parametrize("die_at", [3, pytest.param(4, marks=pytest.mark.full)])
def test_a_run_that_is_killed_in_an_evaluation_keeps_the_same_step(die_at, tmp_path, monkeypatch):
    """Also where the step was saved before it was evaluated: every second one."""
    policy = CheckpointPolicy(keep=1, best="heldout/loss", every_steps=2)
    with pytest.raises(Killed):
        start(tmp_path, monkeypatch, die_at, checkpoints=policy)
    printed = start(tmp_path, monkeypatch, checkpoints=policy)
    assert f"resumed from step { {3: 2, 4: 4}[die_at] }" in printed
    assert kept(tmp_path) == ([3, 6], 3)


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ({}, "checkpoints.best is 'heldout/loss', and the data has no held-out samples; use None"),
        (
            {"a": SAMPLES[:8]},
            "checkpoints.best is 'heldout/loss', and an evaluation gives heldout/a/loss; use one of these, or"
            " None",
        ),
    ],
)
def test_a_metric_that_is_not_evaluated_is_refused_before_the_first_step(sets, told, tmp_path, monkeypatch):
    with pytest.raises(ValueError) as error:
        start(tmp_path, monkeypatch, data=InMemory(SAMPLES, sets))
    assert str(error.value) == told
