"""`--profile`: the steps asked for are in the trace, no others, and its summary says what they computed."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from shardtrain.report.trace import UNTIMED, find_operations, read_trace
from shardtrain.report.trace_programs import read_sources
from shardtrain.trainer import session
from shardtrain.trainer.session import ProfiledStep, parse_steps


class Counted(NamedTuple):
    step: jax.Array
    values: jax.Array


@jax.jit
def plain_step(state, batch):
    with jax.named_scope("attention"):
        values = 0.75 * jnp.tanh(state.values)
    return Counted(state.step + 1, values @ batch), {"loss": values.sum()}


@pytest.mark.full
def test_the_steps_asked_for_are_traced(tmp_path):
    reports = []
    # a run that was resumed after step 10
    numbers = iter(range(11, 17))
    step = ProfiledStep(plain_step, parse_steps("13-14"), lambda: next(numbers), tmp_path, reports.append)
    state, batch = Counted(jnp.int32(10), jnp.ones((64, 64))), jnp.ones((64, 64))
    for _ in range(6):
        state, _ = step(state, batch)
        # an evaluation, which is no part of the steps
        with step.untimed():
            jax.block_until_ready(batch @ batch)
    step.close()
    (text,) = reports
    assert text.startswith("profile of 2 steps, ")
    assert " matmul 0%" not in text
    (path,) = tmp_path.glob("profile/plugins/profile/*/*.trace.json.gz")
    assert text.endswith(str(path))
    origin = read_sources(next(path.parent.glob("*.xplane.pb")))
    events = read_trace(path)
    (found,) = find_operations(events, origin).values()
    assert {"matmul", "attention"} <= {op.kind for op in found}
    products = [op for op in found if op.kind == "matmul"]
    assert len(products) == 2 * len({op.name for op in products})
    # without the time of the evaluation between them
    (untimed,) = [event for event in events if event.get("name") == UNTIMED]
    (whole,) = find_operations([event for event in events if event.get("name") != UNTIMED], origin).values()
    assert len(whole) > len(found)
    left_out = (whole[-1].end - whole[0].start) - (found[-1].end - found[0].start)
    assert left_out == pytest.approx(untimed["dur"])


def test_a_rollback_ends_the_trace(tmp_path, monkeypatch):
    reports: list[Any] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **options: reports.append("begun"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: reports.append("ended"))
    monkeypatch.setattr(session, "profile_text", lambda folder, num_steps: num_steps)
    numbers = iter([1, 2, 3, 2, 3, 4])
    step = ProfiledStep(plain_step, parse_steps("2-4"), lambda: next(numbers), tmp_path, reports.append)
    state, batch = Counted(jnp.int32(0), jnp.ones((8, 8))), jnp.ones((8, 8))
    for _ in range(4):
        state, _ = step(state, batch)
    assert reports == ["begun", "ended", 2]
    for _ in range(2):
        state, _ = step(state, batch)
    step.close()
    assert len(reports) == 3


def test_steps_that_were_not_run_are_named(tmp_path):
    reports = []
    step = ProfiledStep(plain_step, parse_steps("3"), lambda: 8, tmp_path, reports.append)
    step(Counted(jnp.int32(7), jnp.ones((2, 2))), jnp.ones((2, 2)))
    step.close()
    assert reports.pop() == "WARNING: --profile 3-3: this start ran no such step, so there is no trace"
    step.close()
    assert reports == []
    step = ProfiledStep(plain_step, parse_steps("30-31"), lambda: 8, tmp_path, reports.append)
    step(Counted(jnp.int32(7), jnp.ones((2, 2))), jnp.ones((2, 2)))
    step.close()
    assert reports == ["WARNING: --profile 30-31: this start ran no such step, so there is no trace"]


@pytest.mark.parametrize("text", ["1-2", "5-3", "x", "", "2-", "-3"])
def test_other_values_are_refused(text):
    with pytest.raises(ValueError, match=f"--profile is '{text}'; give the first and the last step"):
        parse_steps(text)
