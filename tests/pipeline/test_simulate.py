"""Tables on a clock: cases worked by hand, and the law that each task starts as soon as it can."""

from typing import Any

import pytest
from allowed_chunks import list_allowed_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.pipeline.schedule import (
    SCHEDULES,
    Table,
    forward_only,
    gpipe,
)
from shardtrain.pipeline.simulate import simulate
from shardtrain.pipeline.table import list_needs

UNEQUAL = {(0, 0, "forward"): 1.0, (1, 0, "forward"): 3.0, (0, 0, "backward"): 2.0, (1, 0, "backward"): 1.0}


def test_transfers_may_differ_by_part_and_kind():
    """Down to part 1 takes 2 seconds, back up none."""
    asked = []

    def transfer(source, target, kind):
        asked.append((source, target, kind))
        return 2.0 if kind == "forward" else 0.0

    found = simulate(gpipe(2, 1), UNEQUAL, transfer)
    assert found.makespan == 1 + 2 + 3 + 1 + 2
    assert sorted(asked) == [(0, 1, "forward"), (1, 0, "backward")]


def test_lockstep_ticks_last_as_long_as_their_busiest_stage():
    found = simulate(gpipe(2, 2, lockstep=True), UNEQUAL)
    assert found.makespan == 1 + 3 + 3 + 1 + 2 + 2
    assert found.bubble == 1 - 14 / 24
    # the last part sends nothing in its forward, the first nothing in its backward
    found = simulate(gpipe(2, 2, lockstep=True), UNEQUAL, transfer_seconds=0.5)
    assert found.makespan == 12 + 4 * 0.5
    starts = {task[1:]: time for task, time in found.start.items()}
    assert starts[1, 0, 1, "forward"] == 1.5 + 3.5


def test_a_function_gives_the_seconds_of_each_chunk():
    found = simulate(forward_only(2, 1, 2), lambda stage, chunk, kind: 1.0 + stage + 10 * chunk)
    assert found.makespan == 1 + 2 + 11 + 12


@pytest.mark.parametrize("lockstep", [False, True])
def test_no_time_at_all_is_no_bubble(lockstep):
    found = simulate(gpipe(2, 2, lockstep=lockstep), {"forward": 0.0, "backward": 0.0})
    assert (found.makespan, found.bubble) == (0.0, 0.0)


@st.composite
def timed(draw):
    name = draw(st.sampled_from(list(SCHEDULES)))
    chunks = draw(st.sampled_from(list_allowed_chunks(name, 3)))
    table = SCHEDULES[name](draw(st.integers(1, 5)), draw(st.integers(1, 9)), chunks, draw(st.booleans()))
    whole = st.integers(0, 9)
    places = [(s, v, k) for s in range(table.num_stages) for v in range(chunks) for k in table.kinds]
    return table, {place: draw(whole) for place in places}, draw(whole)


def inputs(table: Table, task):
    made = {(other.kind, table.part(other), other.microbatch): other for other in table.tasks}
    return [made[*need, task.microbatch] for need in list_needs(table, task)]


@settings(max_examples=80, deadline=None)
@given(timed())
def test_no_task_starts_early_and_none_waits_in_vain(case):
    table, seconds, transfer = case
    found = simulate(table, seconds, transfer)
    for stage in range(table.num_stages):
        last = 0
        for task in table.order(stage):
            sent = [(found.end[i] + transfer * (i.stage != stage)) for i in inputs(table, task)]
            ready = max([last, *sent])
            last = found.end[task]
            assert last - found.start[task] == seconds[stage, task.chunk, task.kind]
            if table.lockstep:
                assert found.start[task] >= ready
            else:
                assert found.start[task] == ready
    last = max(found.end.values())
    assert found.makespan >= last if table.lockstep else found.makespan == last
    assert found.live == tuple(map(table.live, range(table.num_stages)))
    work = sum(seconds[task.stage, task.chunk, task.kind] for task in table.tasks)
    if found.makespan:
        assert found.bubble == pytest.approx(1 - work / (table.num_stages * found.makespan))


def test_times_that_are_missing_or_negative_are_told():
    times: Any = {(0, 0, "forward"): 1.0, "backward": -1.0}
    with pytest.raises(ValueError) as error:
        simulate(gpipe(2, 1), times, transfer_seconds=float("nan"))
    assert str(error.value) == (
        "schedule 'gpipe' cannot be simulated:\n"
        "  - work of stage 0, chunk 0, kind 'backward' takes -1.0 s; give a number from 0\n"
        "  - work of stage 1, chunk 0, kind 'forward' takes nan s; give a number from 0\n"
        "  - work of stage 1, chunk 0, kind 'backward' takes -1.0 s; give a number from 0\n"
        "  - transfer of stage 0, chunk 0, kind 'forward' takes nan s; give a number from 0\n"
        "  - transfer of stage 1, chunk 0, kind 'backward' takes nan s; give a number from 0"
    )
