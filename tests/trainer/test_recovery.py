"""Runs that go back by themselves: after a spike, a step that is not finite, or a faulty device."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from quiet_training import InMemory, random_tokens, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.data.order import epoch_order
from shardtrain.functional.loss import next_token_loss
from shardtrain.islands.watchdog.stragglers import WINDOW, Stragglers
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.sharding.layout import Layout
from shardtrain.trainer import session
from shardtrain.trainer.config import Run
from shardtrain.trainer.recovery import Recovery, RollBack, Rollbacks, Spikes
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.synchronisation import Divergence

SEQ, BATCH, SAMPLES = 8, 8, 400
BAD = 31
"""A token that only the damaged batch has."""


def damaged(batch: int = 0) -> InMemory:
    """Random tokens; those of one batch (counted from 1, in the order of seed 0) are damaged."""
    samples, order = random_tokens(SAMPLES, vocab=BAD), epoch_order(SAMPLES, 0, 0)
    for position in range((batch - 1) * BATCH, batch * BATCH) if batch else ():
        samples[order(position)] = {"tokens": np.full(SEQ + 1, BAD, np.int32)}
    return InMemory(samples)


def leaping(apply: Any, batch: Any) -> Any:
    total, count = next_token_loss(apply, batch)
    return jnp.where((batch["tokens"] == BAD).any(), total * 50, total), count


def infinite(apply: Any, batch: Any) -> Any:
    total, count = next_token_loss(apply, batch)
    return jnp.where((batch["tokens"] == BAD).any(), jnp.inf, total), count


def start(folder: Path, data: Any, **changes: Any) -> tuple[Any, str, list[dict[str, float]]]:
    run = Run(
        model=TinyConfig(vocab=BAD + 1),
        data=data,
        optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=1e-3)),
        strategy=Strategy(layout=Layout(mesh={"data": -1})),
        batch=BATCH,
        steps=24,
        log_every=1,
        evaluate_every=None,
        checkpoints=CheckpointPolicy(every_steps=5, keep=3),
        run_dir=folder,
    )
    return train_quietly(dataclasses.replace(run, **changes))


def test_a_spike_goes_back_and_on_with_later_data(tmp_path, one_device):
    recovery = Recovery(spike=10, window=16)
    trained, printed, lines = start(tmp_path, damaged(batch=18), loss=leaping, recovery=recovery)
    assert "WARNING: the loss of step 18 is" in printed
    assert "a spike: rolling back to step 17 or before" in printed
    assert "resumed from step 15" in printed
    assert trained.step == 24
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert max(line["train/loss"] for line in lines) < 5


def test_what_was_not_finite_is_left_out_and_the_rest_is_as_if_it_had_never_been(tmp_path, one_device):
    trained, printed, _ = start(tmp_path, damaged(batch=7), loss=infinite, nonfinite="roll_back", steps=12)
    assert "nonfinite is 'roll_back': rolling back to step 6 or before" in printed
    assert "resumed from step 5" in printed
    assert trained.step == 12
    assert int(trained.state.step) == 12


def test_before_the_first_checkpoint_it_begins_anew(tmp_path, one_device):
    _, printed, lines = start(tmp_path, damaged(batch=2), loss=infinite, nonfinite="roll_back", steps=6)
    assert "back to step 1 or before" in printed
    assert "resumed" not in printed
    assert [line["step"] for line in lines] == list(range(1, 7))


def test_after_so_many_times_the_run_ends_and_says_why(tmp_path, one_device):
    def always(apply: Any, batch: Any) -> Any:
        total, count = next_token_loss(apply, batch)
        return total * jnp.nan, count

    with pytest.raises(FloatingPointError, match=r"step 1 was skipped.*rolled back 2 times already"):
        start(tmp_path, damaged(), loss=always, nonfinite="roll_back", recovery=Recovery(rollbacks=2))


@pytest.mark.parametrize("times", [1, 5])
def test_a_faulty_device_is_named_and_its_steps_are_done_again(tmp_path, monkeypatch, times):
    """The device is faulty when its copies are looked at for the third time."""
    looks = []

    def make_find(mesh: Any, shardings: Any) -> Any:
        def find(params: Any) -> list[Divergence]:
            looks.append(params)
            bad = 3 <= len(looks) < 3 + times
            return [Divergence("embedding/table", (mesh.devices.flat[2],))] if bad else []

        return find

    monkeypatch.setattr(session, "make_find_divergence", make_find)
    recovery = Recovery(fingerprint_every=4)
    if times == 5:
        # what is faulty again soon after may have been saved already
        with pytest.raises(
            FloatingPointError, match=r"no checkpoint is as old as step 4.*--checkpoints.keep"
        ):
            start(tmp_path, damaged(), recovery=recovery)
        return
    trained, printed, _ = start(tmp_path, damaged(), recovery=recovery)
    # every fourth step, and before the saves of every fifth
    device = jax.devices()[2]
    assert f"after step 8 copies on {device} of process 0 of embedding/table are not the bits" in printed
    assert "resumed from step 5" in printed
    assert trained.step == 24


@given(st.lists(st.floats(1, 5), min_size=64, max_size=64), st.floats(1.01, 100))
def test_a_loss_is_a_spike_if_it_lies_far_above_the_others(losses, factor):
    spikes = Spikes(8.0, 64)
    spikes._losses.extend(losses)
    limit = spikes.limit()
    assert limit >= np.median(losses)
    assert not spikes.add(limit)
    assert Spikes(8.0, 64).limit() == math.inf
    assert spikes.add(spikes.limit() * factor)


def test_a_steady_fall_is_no_spike_and_a_nan_neither():
    spikes = Spikes(8.0, 16)
    assert not any(spikes.add(5 * 0.98**step) for step in range(300))


def test_rollbacks_go_further_back_only_if_the_fault_comes_again_soon():
    rollbacks = Rollbacks(9)
    assert rollbacks.find_newest_allowed(RollBack(57, "x")) == 56
    rollbacks.restored(50)
    assert rollbacks.find_newest_allowed(RollBack(64, "x")) == 49
    rollbacks.restored(40)
    assert rollbacks.find_newest_allowed(RollBack(500, "x")) == 499
    with pytest.raises(
        FloatingPointError, match=r"^x; look for the cause.*set recovery.rollbacks to 1 in the run file$"
    ):
        Rollbacks(0).find_newest_allowed(RollBack(5, "x"))


def test_wrong_numbers_are_all_named():
    with pytest.raises(ValueError) as error:
        Recovery(spike=0, window=2, rollbacks=-1, fingerprint_every=0, straggler=1)
    for name in ("spike is 0", "window is 2", "rollbacks is -1", "fingerprint_every is 0", "straggler is 1"):
        assert name in str(error.value)


def test_one_slow_step_is_no_slow_island():
    stragglers = Stragglers(["a", "b", "c"], 1.5)
    steps = [[1.0, 9.0 if step % 3 == 0 else 1.0, 1.1] for step in range(4 * WINDOW)]
    assert not any(stragglers.add(step) for step in steps)


def test_tiny_steps_are_nobodys_business():
    stragglers = Stragglers(["a", "b"], 1.5)
    assert not any(stragglers.add([0.001, 0.04]) for _ in range(2 * WINDOW))


def test_an_island_that_gets_slow_is_told_once_and_again_if_another_does():
    stragglers = Stragglers(["a", "b", "c"], 1.5)
    told = [stragglers.add([1.0, 1.0, 3.0]) for _ in range(2 * WINDOW)]
    told += [stragglers.add([4.0, 1.0, 1.0]) for _ in range(2 * WINDOW)]
    lines = [line for line in told if line]
    assert lines[0].startswith("c is slow: its own work takes 3.00 s a step, that of the others 1.00 s")
    assert lines[-1].startswith("a is slow")
    assert "give its island a smaller share of the rows (--shares)" in lines[-1]


@pytest.mark.full
def test_islands_go_back_together_though_one_alone_saw_it(mpiexec, tmp_path):
    program = Path(__file__).parents[1] / "programs" / "recover.py"
    first, second = (json.loads(text) for text in mpiexec(2, program, tmp_path))
    for name in ("mean", "local_steps"):
        step, bits, printed = first[name]
        assert (step, bits) == tuple(second[name][:2]) == (20, bits)
        assert "WARNING: step 12 was" in printed
        assert "back to step 11 or before" in printed
        assert "resumed from step 8" in printed
        steps = [line["step"] for line in read_jsonl(tmp_path / name / "metrics.jsonl")]
        assert steps == sorted(set(steps))
        assert steps[-1] == 20
