"""Runs as a whole: interrupted and resumed is the same as never interrupted, on this mesh or another."""

import dataclasses
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from quiet_training import train_quietly
from repeatable_metrics import metrics_of
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.differences import Allow
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Text
from shardtrain.functional.loss import next_token_loss
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.system.stop_signals import StopSignals
from shardtrain.trainer import session
from shardtrain.trainer.config import Run, StartFrom
from shardtrain.trainer.setup import make_microbatch, make_setup
from shardtrain.trainer.strategy import Strategy

SEQ = 8
MODEL = TinyConfig(num_layers=2, dropout=0.1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """37 windows of training text: an epoch of 5 batches of 8, the last one short."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 37 * SEQ + 20, np.uint8).tobytes())
    return path


def make_run(text: Path, folder: Path, **changes: Any) -> Run:
    run = Run(
        model=MODEL,
        data=Text(paths=(text,), seq=SEQ, heldout_fraction=0.06),
        optimizer=Optimizer(learning_rate=Schedule(peak=1e-2, warmup=2)),
        strategy=Strategy(layout=Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2})),
        batch=8,
        steps=12,
        seed=3,
        log_every=1,
        evaluate_every=4,
        checkpoints=CheckpointPolicy(every_steps=5, keep=2),
        run_dir=folder,
    )
    return dataclasses.replace(run, **changes)


def start(run: Run, **options: Any) -> tuple[Any, str]:
    return train_quietly(run, **options)[:2]


@dataclass(frozen=True)
class Interrupting:
    """The text of a run, with a signal to this process at a certain number of samples."""

    text: Text
    after: int

    def train(self, folder: Path) -> Any:
        return _Interrupting(self.text.train(folder), self.after)

    def heldout(self, folder: Path) -> Any:
        return self.text.heldout(folder)


class _Interrupting:
    def __init__(self, source: Any, after: int):
        self.source, self.left, self.fingerprint = source, after, source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGTERM)
        return self.source[index]


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trained, printed = start(make_run(text, folder))
    return trained, printed, folder


def test_a_run_leaves_what_it_says(whole):
    trained, printed, folder = whole
    assert trained.step == 12
    assert trained.stopped_by is None
    names = {path.name for path in folder.iterdir()}
    assert {"run.txt", "metrics.jsonl", "loss.png", "checkpoints", "tensorboard"} <= names
    assert [line["step"] for line in metrics_of(folder)] == list(range(1, 13))
    assert [line["step"] for line in metrics_of(folder) if "heldout/loss" in line] == [4, 8, 12]
    assert "mesh: data=2 fsdp=2 tensor=2 (8 devices)" in printed
    assert "parameters: 2,560, 10.0 KiB; 2.5 KiB per device" in printed
    assert "batch = 8\n" in (folder / "run.txt").read_text()
    assert sorted(p.name for p in (folder / "checkpoints").glob("step_*")) == [
        "step_00000010",
        "step_00000012",
    ]


@pytest.mark.full
def test_an_evaluation_that_is_cut_short_after_the_save_is_done_again(whole, text, tmp_path, monkeypatch):
    """Its step is saved by then, and not done again: its line is, whole and once."""
    make_evaluation = session.make_evaluation

    def failing(*arguments: Any) -> Any:
        evaluate, calls = make_evaluation(*arguments), []

        def evaluated(state: Any) -> dict[str, float]:
            calls.append(state)
            if len(calls) == 2:
                raise FloatingPointError("the end of this life")
            return evaluate(state)

        return evaluated

    run = make_run(text, tmp_path, checkpoints=CheckpointPolicy(every_steps=4))
    monkeypatch.setattr(session, "make_evaluation", failing)
    with pytest.raises(FloatingPointError, match="the end of this life"):
        start(run)
    monkeypatch.setattr(session, "make_evaluation", make_evaluation)
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(1, 8))
    _, printed = start(run)
    assert "resumed from step 8" in printed
    assert metrics_of(tmp_path) == metrics_of(whole[2])


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """The same run, stopped by the time limit after its first step."""
    folder = tmp_path_factory.mktemp("stopped")
    return *start(make_run(text, folder), stop=StopSignals(until_seconds=time.monotonic())), folder


def test_the_time_limit_stops_and_saves(stopped):
    trained, printed, folder = stopped
    assert (trained.step, trained.stopped_by, trained.time_over) == (1, None, True)
    assert "stopped by the time limit after step 1, which is saved" in printed
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_00000001"]


@pytest.mark.parametrize("after_samples", [pytest.param(20, marks=pytest.mark.full), 70])
def test_interrupted_and_resumed_is_bitwise_the_same(whole, text, tmp_path, after_samples):
    trained, _, folder = whole
    run = make_run(text, tmp_path)
    stopped, printed = start(dataclasses.replace(run, data=Interrupting(run.data, after_samples)))
    assert stopped.stopped_by == signal.SIGTERM
    assert stopped.step < 12
    assert "stopped by SIGTERM" in printed
    resumed, printed = start(run)
    assert stopped.step == 0 or f"resumed from step {stopped.step}" in printed
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(trained.state), strict=True):
        np.testing.assert_array_equal(a, b)
    keep = [line for line in metrics_of(tmp_path) if line["step"] != stopped.step]
    assert keep == [line for line in metrics_of(folder) if line["step"] != stopped.step]
    assert [line["train/loss"] for line in metrics_of(tmp_path)] == [
        line["train/loss"] for line in metrics_of(folder)
    ]


@pytest.mark.full
def test_the_factors_of_power_sgd_resume_bitwise(text, tmp_path):
    synchronisation = Synchronisation(by="power_sgd:2+mean")
    layout = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2})
    strategy = Strategy(layout=layout, synchronisation=synchronisation)
    policy = CheckpointPolicy(every_steps=2, keep=2)
    run = make_run(text, tmp_path / "whole", strategy=strategy, steps=4, checkpoints=policy)
    whole, _ = start(run)
    lost = shutil.ignore_patterns("step_00000004*")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts", ignore=lost)
    resumed, printed = start(dataclasses.replace(run, run_dir=tmp_path / "parts"))
    assert "resumed from step 2" in printed
    assert "dropped" not in printed
    factors = [x for x in jax.tree.leaves(whole.state.combine_state) if x.shape[-1] == 2]
    assert len(factors) == 5  # of the table, and of each layer's two matrices
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("other", "rtol"),
    [
        pytest.param(
            Strategy(layout=Layout(mesh={"fsdp": 4, "tensor": 2}, zero=2), accumulate=2),
            1e-5,
            marks=pytest.mark.full,
        ),
        (
            Strategy(
                layout=Layout(mesh={"pipeline": 2, "data": 2, "tensor": 2}),
                accumulate=2,
                pipeline=Pipeline(schedule="gpipe"),
            ),
            1e-4,
        ),
    ],
    ids=["another mesh", "a pipeline"],
)
def test_it_resumes_on_another_layout_with_the_same_losses(whole, stopped, text, tmp_path, other, rtol):
    """Restored bits, for many more layouts: test_restore_matrix."""
    _, _, folder = whole
    shutil.copytree(stopped[2], tmp_path / "resumed")
    _, printed = start(make_run(text, tmp_path / "resumed", strategy=other))
    assert "resumed from step 1" in printed
    assert "changed since then: strategy.accumulate: 1 -> 2" in printed
    for name in ("train/loss", "grad_norm", "heldout/loss"):
        got, expected = (
            [line[name] for line in metrics_of(path) if name in line]
            for path in (tmp_path / "resumed", folder)
        )
        np.testing.assert_allclose(got, expected, rtol=rtol, err_msg=name)
        assert len(got) == (3 if name == "heldout/loss" else 12)


def test_a_finished_run_says_so(whole, text):
    _, _, folder = whole
    before = metrics_of(folder)
    trained, printed = start(make_run(text, folder))
    assert trained.step == 12
    assert "12 steps are done, and --steps is 12" in printed
    assert metrics_of(folder) == before


def test_a_broken_checkpoint_is_named_and_skipped(whole, text, tmp_path):
    trained, _, folder = whole
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints/step_00000012"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    resumed, printed = start(make_run(text, tmp_path))
    assert "checkpoint skipped: step_00000012: broken" in printed
    assert "resumed from step 10" in printed
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(trained.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(1, 13))


def test_another_model_in_the_same_folder_is_refused(whole, text):
    _, _, folder = whole
    other = make_run(text, folder, model=dataclasses.replace(MODEL, mlp=64))
    with pytest.raises(ValueError, match=r"model.mlp: 16 -> 64; put it back, or .*--allow.changed model.mlp"):
        start(other)
    with pytest.raises(ValueError, match="holds another state than this run has") as error:
        start(dataclasses.replace(other, allow=Allow(changed=("model.mlp",))))
    assert "params/blocks/up" in str(error.value)


@pytest.mark.full
def test_options_that_change_no_sample_and_no_model_may_differ(stopped, text, tmp_path):
    shutil.copytree(stopped[2], tmp_path, dirs_exist_ok=True)
    changed = dataclasses.replace(MODEL, dropout=0.5)
    with pytest.raises(ValueError, match=r"--allow.changed model.dropout"):
        start(make_run(text, tmp_path, steps=3, log_every=2, model=changed))
    allowed = Allow(changed=("model.dr*",))
    _, printed = start(make_run(text, tmp_path, steps=3, log_every=2, model=changed, allow=allowed))
    assert "changed since then: model.dropout" in printed
    assert "changed since then: log_every" in printed
    assert "resumed from step 1" in printed


@pytest.mark.full
def test_a_run_begins_with_the_parameters_of_another(whole, text, tmp_path):
    """Fine-tuning: a longer table is new, everything else is taken."""
    before, _, folder = whole
    longer, start_from = dataclasses.replace(MODEL, vocab=MODEL.vocab + 8), StartFrom(checkpoint=folder)
    still = Optimizer(learning_rate=Schedule(name="constant", peak=1e-30), weight_decay=0)
    tuned = make_run(text, tmp_path, model=longer, steps=1, start_from=start_from, optimizer=still)
    with pytest.raises(
        ValueError, match=r"holds another state than this run has; [^\n]*:\n  - params/embedding"
    ):
        start(tuned)
    tuned = dataclasses.replace(tuned, allow=Allow(missing=("params/embed*",)))
    after, printed = start(tuned)
    assert "starts from the parameters of step 12" in printed
    for name, x in before.state.params["blocks"].items():
        np.testing.assert_array_equal(x, after.state.params["blocks"][name])
    # its own checkpoint goes before the other's
    _, printed = start(dataclasses.replace(tuned, steps=2))
    assert "resumed from step 1" in printed
    assert "starts from" not in printed


def test_another_seed_in_the_same_folder_is_refused(whole, text):
    _, _, folder = whole
    with pytest.raises(ValueError, match=r"seed is 4, but .* started with seed 3.* Use --seed 3, or another"):
        start(make_run(text, folder, seed=4))


def test_other_data_in_the_same_folder_starts_over(stopped, text, tmp_path):
    shutil.copytree(stopped[2], tmp_path, dirs_exist_ok=True)
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    _, printed = start(make_run(other, tmp_path, steps=3))
    assert "the data has changed since the checkpoint" in printed


def explode(apply: Any, batch: Any) -> Any:
    """Infinite from a certain token on."""
    total, count = next_token_loss(apply, batch)
    return jax.numpy.where((batch["tokens"][:, 0] == ord("a")).any(), jax.numpy.inf, total), count


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
def test_steps_that_are_not_finite_are_skipped_or_stop_the_run(text, tmp_path, nonfinite, one_device):
    given = {"strategy": Strategy(), "evaluate_every": None}
    run = make_run(text, tmp_path, loss=explode, nonfinite=nonfinite, **given)
    if nonfinite == "stop":
        with pytest.raises(FloatingPointError, match=r"step \d+ was skipped: loss inf"):
            start(run)
        return
    trained, printed = start(run)
    skipped = [line["step"] for line in metrics_of(tmp_path) if line["skipped"]]
    assert skipped
    assert f"WARNING: step {int(skipped[0])} was skipped" in printed
    assert np.isfinite(
        jax.tree.leaves(jax.tree.map(lambda x: float(abs(x).max()), trained.state.params))
    ).all()


def test_a_folder_that_cannot_be_written_warns_and_goes_on(text, tmp_path, monkeypatch, one_device):
    from shardtrain.checkpoints.checkpointer import Checkpoints
    from shardtrain.checkpoints.save import SaveFailed

    save, failures = Checkpoints.save, [5]

    def failing(self: Checkpoints, step: int, state: Any, *rest: Any) -> None:
        if step in failures:
            failures.remove(step)
            raise SaveFailed("step 5 is not saved: no space", step=step)
        save(self, step, state, *rest)

    monkeypatch.setattr(Checkpoints, "save", failing)
    trained, printed = start(make_run(text, tmp_path, strategy=Strategy()))
    assert trained.step == 12
    assert "WARNING: step 5 is not saved: no space" in printed
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == [
        "step_00000010",
        "step_00000012",
    ]


BROKEN = optax.stateless(lambda updates, params: jax.tree.map(lambda g: g / 0.0, updates))


def test_parameters_that_are_not_finite_are_never_saved(text, tmp_path, one_device):
    """From a finite gradient: only the optimizer can do that."""
    run = make_run(text, tmp_path, optimizer=BROKEN, steps=3, strategy=Strategy())
    with pytest.raises(FloatingPointError, match=r"parameters are not finite after step 3.* since step None"):
        start(run)
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_a_run_that_only_skips_ends(text, tmp_path, monkeypatch, one_device):
    monkeypatch.setattr("shardtrain.trainer.metric_log.MOST_SKIPPED", 3)
    given = {"strategy": Strategy(), "checkpoints": CheckpointPolicy()}
    run = make_run(text, tmp_path, optimizer=BROKEN, **given)
    with pytest.raises(FloatingPointError, match="these were 3 steps in a row"):
        start(run)


def test_two_runs_in_one_folder_are_refused(text, tmp_path):
    import fcntl

    with (tmp_path / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is training in"):
            start(make_run(text, tmp_path))
    assert not (tmp_path / "checkpoints").exists()


def test_an_evaluation_that_fails_comes_after_the_save(text, tmp_path, monkeypatch, one_device):
    def fail(run: Run, *arguments: Any) -> Any:
        def values(state: Any) -> dict[str, float]:
            raise OSError("the held-out file is gone")

        return values

    monkeypatch.setattr("shardtrain.trainer.session.make_evaluation", fail)
    with pytest.raises(OSError, match="held-out file is gone"):
        start(make_run(text, tmp_path, strategy=Strategy(), checkpoints=CheckpointPolicy(every_steps=4)))
    assert (tmp_path / "checkpoints/step_00000004/manifest.json").exists()


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (lambda total, count: total / count, "the loss returned an array of shape ()"),
        (lambda total, count: (total, count, {"loss": (total, count)}), "'loss' has a name that"),
        (lambda total, count: (total, count, {"right": total}), "metric 'right' is an array of shape ()"),
        (lambda total, count: (total[None], count), "sum is an array of shape (1,), not a scalar"),
    ],
)
def test_a_loss_that_cannot_be_added_up_is_refused_before_the_first_step(text, tmp_path, returned, told):
    run = make_run(text, tmp_path, loss=lambda apply, batch: returned(*next_token_loss(apply, batch)))
    with pytest.raises(ValueError) as error:
        start(run)
    assert told in str(error.value)


def test_what_was_read_and_left_out_is_told(text, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_bytes(text.read_bytes())
    (tmp_path / "texts/b.bin").write_bytes(b"\x00\xff")
    data = Text(paths=(tmp_path / "texts",), seq=SEQ, heldout_fraction=0.06)
    data.train(tmp_path / "run")
    told = data.summary(tmp_path / "run")
    assert "text: 1 files, 317 bytes; left out 1 that are not UTF-8 text, or not readable:" in told
    assert "b.bin" in told


def test_an_optimizer_that_reads_the_order_of_layers_is_refused_in_stage_order(text, tmp_path):
    strategy = Strategy(layout=Layout(mesh={"pipeline": 2, "data": 4}))
    noisy = optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1))
    run = make_run(text, tmp_path, model=TinyConfig(num_layers=3), strategy=strategy, optimizer=noisy)
    with pytest.raises(ValueError, match="the mesh stores blocks in the order of its stages"):
        make_setup(run, microbatch=make_microbatch(run, run.data.train(tmp_path)))
