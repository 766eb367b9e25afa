"""Batches that follow each other without a flush: every order of stages can run, within its limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.pipeline.in_flight import count_forwards_ahead, count_waves_before_barrier
from shardtrain.pipeline.options import Pipeline
from shardtrain.trainer.strategy import Strategy


def tasks_of(ahead, in_flight, num_batches):
    """The tasks of a stage in order, the last ones drained: update, forward, backward by batch."""
    found = []
    for n in range(1, num_batches + 1):
        found += [("update", n - in_flight)] * (n > in_flight)
        found += [("forward", n)] + [("backward", n - ahead)] * (n > ahead)
    found += [("backward", n) for n in range(max(num_batches - ahead, 0) + 1, num_batches + 1)]
    return found + [("update", n) for n in range(max(num_batches - in_flight, 0) + 1, num_batches + 1)]


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 12))
def test_stages_wait_for_each_other_in_no_circle_and_keep_what_is_in_flight(
    num_stages, in_flight, num_batches
):
    ahead = count_forwards_ahead(num_stages, in_flight)
    left = [tasks_of(each, in_flight, num_batches) for each in ahead]
    done = [set() for _ in range(num_stages)]

    def can_run(stage, kind, n):
        last = num_stages - 1
        if kind == "forward":
            return stage == 0 or ("forward", n) in done[stage - 1]
        if kind == "backward":
            return ("forward", n) in done[stage] and (stage == last or ("backward", n) in done[stage + 1])
        # the sums of an update come from the first stage, which has them after its backward
        before = ("update", n) in done[stage - 1] if stage else True
        return ("backward", n) in done[stage] and before

    while any(left):
        ready = [stage for stage, tasks in enumerate(left) if tasks and can_run(stage, *tasks[0])]
        assert ready, (ahead, left)
        for stage in ready:
            done[stage].add(left[stage].pop(0))
            count = {kind: sum(task[0] == kind for task in done[stage]) for kind in ("forward", "backward")}
            # versions of weights, which are kept from forward to backward
            assert count["forward"] - count["backward"] <= ahead[stage] + 1
    assert ahead[0] == (in_flight - 1 if num_stages > 1 else 0)


@given(st.integers(2, 9), st.integers(1, 5), st.integers(0, 4))
def test_a_barrier_is_requested_for_a_step_that_no_virtual_worker_has_ended(in_flight, every, answered):
    # told when the next wave is pushed, which is while the batch `in_flight` steps later starts
    told_at = (answered + 1) * every + in_flight
    barrier = (answered + 1 + count_waves_before_barrier(in_flight, every)) * every
    assert barrier >= told_at
    assert barrier - told_at < every


def test_what_cannot_be_in_flight_is_refused():
    with pytest.raises(ValueError, match="in_flight is 0 batches; use 1 to flush after each step, or more"):
        Pipeline(in_flight=0)
    with pytest.raises(ValueError, match="the schedule is 'gpipe' with 1 parts on a stage; use 1f1b with 1"):
        Pipeline(in_flight=2, schedule="gpipe")
    with pytest.raises(ValueError) as error:
        Pipeline(in_flight=2, stages="time")
    assert str(error.value) == (
        "this pipeline cannot be made:\n"
        "  - in_flight is 2 batches, and stages is 'time', which counts the time and memory of a pipeline"
        " that is flushed after each step; use stages flops or numbers of blocks, such as --stages 3,1, or"
        " in_flight 1"
    )
    with pytest.raises(ValueError, match="follow each other from island to island; use --across pipeline"):
        Strategy(pipeline=Pipeline(in_flight=2))
