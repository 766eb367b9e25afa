"""Functions of the user, called at the events of a run by rank 0, whatever they raise."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from quiet_training import InMemory, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.errors.user_code import UserCodeFailed
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.config import Run
from shardtrain.trainer.hooks import Hook, Hooks
from shardtrain.trainer.metric_log import MetricLog
from shardtrain.trainer.run_folder import ProgramMark

pytestmark = pytest.mark.usefixtures("one_device")
SEQ, VOCAB = 8, 32


@dataclass(frozen=True)
class Tokens:
    """Random tokens; sample `bad` cannot be read."""

    seed: int = 0
    length: int = 64
    bad: int = -1

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise OSError("no such sample")
        random = np.random.default_rng((self.seed, index))
        return {"tokens": random.integers(0, VOCAB, SEQ + 1).astype(np.int32)}


RUN = Run(
    model=TinyConfig(vocab=VOCAB, seq=SEQ),
    data=InMemory(Tokens(), Tokens(1, 5)),
    optimizer=Optimizer(learning_rate=Schedule(peak=1e-2)),
    batch=8,
    steps=6,
    log_every=2,
    evaluate_every=3,
    checkpoints=CheckpointPolicy(every_steps=2, keep=9),
)


class Recorder:
    """A hook that records every event; its folders must have been complete when it was called."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.hook = Hook(
            on_step=lambda step: self.events.append(("step", step)),
            on_log=lambda step, metrics: self.events.append(("log", step, metrics)),
            on_evaluation=lambda step, metrics: self.events.append(("evaluation", step, metrics)),
            on_save=self.save,
            on_end=lambda step, ending: self.events.append(("end", step, ending)),
        )

    def save(self, step: int, folder: Path) -> None:
        assert json.loads((folder / "manifest.json").read_text())["body"]["step"] == step
        self.events.append(("save", step))

    def steps(self, event: str) -> list[int]:
        return [found[1] for found in self.events if found[0] == event]

    def last(self) -> tuple[Any, ...]:
        return self.events[-1]


def start(folder: Path, **changes: Any) -> str:
    return train_quietly(dataclasses.replace(RUN, run_dir=folder, **changes))[1]


def test_every_event_comes_once_with_plain_values_and_again_after_a_resume(tmp_path):
    seen = Recorder()
    start(tmp_path, hooks=[seen.hook], steps=4)
    assert seen.steps("step") == [1, 2, 3, 4]
    assert seen.steps("log") == [2, 3, 4]
    assert seen.steps("evaluation") == [3, 4]
    assert seen.steps("save") == [2, 4]
    assert seen.last() == ("end", 4, "finished")
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [{"step": found[1], **found[2]} for found in seen.events if found[0] == "log"] == lines
    for event, _, *values in seen.events:
        assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values)), event
    evaluated = [found[2] for found in seen.events if found[0] == "evaluation"]
    assert [list(values) for values in evaluated] == [["heldout/loss"]] * 2
    assert evaluated[-1]["heldout/loss"] == lines[-1]["heldout/loss"]

    seen = Recorder()
    start(tmp_path, hooks=[seen.hook])
    assert seen.steps("step") == [5, 6]
    assert seen.steps("save") == [6]
    assert seen.last() == ("end", 6, "finished")


def wrong_log(step: int, metrics: dict[str, float]) -> None:
    raise KeyError("accuracy")


BRACE = "{"


def parsing(step: int) -> None:
    json.loads(BRACE)


def line_of(code: str) -> int:
    """The first line of this file with some code."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.strip().startswith(code))


def test_what_a_hook_raises_is_reported_once_with_its_name_and_line():
    notes: list[str] = []
    hooks = Hooks([Hook(on_log=wrong_log, on_step=parsing)], report=notes.append)
    for step in (1, 2, 3):
        hooks.step(step)
        hooks.log(step, {})
    hooks.end("finished")
    # of an exception in a library the user's own line is shown
    assert notes[0].startswith(
        "WARNING: the hook parsing (on_step) at step 1 raised JSONDecodeError: Expecting"
    )
    assert f"({__file__}:{line_of('json.loads(BRACE)')})" in notes[0]
    assert notes[1:] == [
        "WARNING: the hook wrong_log (on_log) at step 1 raised KeyError: 'accuracy'"
        f" ({__file__}:{line_of('raise KeyError')}); the run continues. To end it instead:"
        " hook_errors='stop'",
        "WARNING: the hook parsing (on_step) raised 3 exceptions in all; the first is above",
        "WARNING: the hook wrong_log (on_log) raised 3 exceptions in all; the first is above",
    ]


def test_a_hook_ends_the_run_where_that_is_asked_for(tmp_path):
    seen = Recorder()
    with pytest.raises(UserCodeFailed) as error:
        start(tmp_path, hooks=[seen.hook, Hook(on_log=wrong_log)], hook_errors="stop")
    assert str(error.value) == (
        "the hook wrong_log (on_log) at step 2 raised KeyError: 'accuracy'; with hook_errors='report' the run"
        " would continue"
    )
    assert seen.last()[2] == "error"


def test_the_end_is_told_also_of_a_run_that_fails_or_is_stopped(tmp_path):
    def after_three(step: int) -> None:
        if step == 3:
            import signal

            signal.raise_signal(signal.SIGTERM)

    seen = Recorder()
    start(tmp_path, hooks=[seen.hook, Hook(on_step=after_three)])
    assert seen.last() == ("end", 3, "signal")
    assert seen.steps("save") == [2, 3]

    def at_the_end(step: int, ending: str) -> None:
        raise RuntimeError("a second failure")

    # a failing end does not hide what ended the run
    hooks = [seen.hook, Hook(on_end=at_the_end)]
    with pytest.raises(UserCodeFailed, match="no such sample"):
        start(
            tmp_path / "failing",
            hooks=hooks,
            data=InMemory(Tokens(bad=3), Tokens(1, 5)),
            hook_errors="stop",
            steps=9,
        )
    assert seen.last()[2] == "error"


@pytest.mark.full
def test_a_step_is_not_waited_for(tmp_path, monkeypatch):
    """Nothing of it is read before the hook returns: its metrics are read two steps later, as without one."""
    events: list[Any] = []
    read = MetricLog._read

    def reading(log: MetricLog, **options: Any) -> None:
        events.append("read")
        read(log, **options)

    monkeypatch.setattr(MetricLog, "_read", reading)
    # programs are waited for when they first run alone
    monkeypatch.setattr(ProgramMark, "first_run", lambda self, program, call: call)
    monkeypatch.setattr(jax, "block_until_ready", lambda tree: pytest.fail("waited for"))
    quiet = {"evaluate_every": None, "data": InMemory(Tokens()), "checkpoints": CheckpointPolicy()}
    start(tmp_path, hooks=[Hook(on_step=events.append)], **quiet)
    assert events[events.index(1) :][:6] == [1, 2, 3, "read", 4, "read"]


def test_each_function_gets_values_of_its_own():
    got: list[dict[str, float]] = []
    hooks = Hooks(
        [Hook(on_log=lambda step, metrics: metrics.clear()), Hook(on_log=lambda step, m: got.append(m))]
    )
    hooks.log(1, {"train/loss": 2.0})
    assert got == [{"train/loss": 2.0}]


def test_what_cannot_be_called_is_refused_before_the_run():
    with pytest.raises(ValueError) as error:
        Hook(on_log=lambda step: None, on_step=3)  # type: ignore[arg-type]
    assert str(error.value).splitlines()[1:] == [
        "  - on_step is 3; give a function or None",
        "  - on_log is test_what_cannot_be_called_is_refused_before_the_run.<locals>.<lambda>(step), and is"
        " called with (step, metrics); let it take these by position",
    ]
    with pytest.raises(ValueError, match="no function is given; give one or more of on_step, on_log"):
        Hook()
    with pytest.raises(ValueError, match=r"hooks is .*; give a list, each item a Hook"):
        dataclasses.replace(RUN, hooks=print)
    with pytest.raises(ValueError, match="hook_errors is 'ignore'; allowed: report, stop"):
        dataclasses.replace(RUN, hook_errors="ignore")
