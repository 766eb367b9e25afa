"""The check of tables: it refuses every change that would make one wrong, and says what is wrong."""

from dataclasses import replace

import pytest
from allowed_chunks import list_allowed_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.pipeline.schedule import (
    SCHEDULES,
    gpipe,
    one_forward_one_backward,
    zero_bubble,
)
from shardtrain.pipeline.table import Table, Task, check, list_needs


@st.composite
def tables(draw):
    name = draw(st.sampled_from(list(SCHEDULES)))
    chunks = draw(st.sampled_from(list_allowed_chunks(name, 2)))
    return SCHEDULES[name](draw(st.integers(1, 5)), draw(st.integers(1, 7)), chunks, draw(st.booleans()))


def with_tasks(table, tasks):
    return replace(table, tasks=tuple(tasks))


def refused(table):
    with pytest.raises(ValueError) as error:
        check(table)
    return str(error.value)


@settings(deadline=None)
@given(tables(), st.data())
def test_a_task_that_is_moved_before_what_it_needs_is_refused(table, data):
    """Or, where it needs nothing, behind what needs it."""
    task = data.draw(st.sampled_from(table.tasks))
    others = [other for other in table.tasks if other != task]
    inputs = [
        other
        for other in others
        if (other.kind, table.part(other)) in list_needs(table, task) and other.microbatch == task.microbatch
    ]
    if inputs:
        latest = max(inputs, key=lambda other: other.tick)
        same_part = table.part(latest) == table.part(task)
        tick = latest.tick - 1 if same_part and table.lockstep else latest.tick
    else:
        tick = table.num_ticks
    text = refused(with_tasks(table, [*others, task._replace(tick=tick)]))
    assert "move it to tick" in text


@settings(deadline=None)
@given(tables(), st.data())
def test_a_task_that_is_moved_to_another_stage_is_refused(table, data):
    task = data.draw(st.sampled_from(table.tasks))
    elsewhere = task._replace(stage=task.stage + 1)
    text = refused(with_tasks(table, [elsewhere if other == task else other for other in table.tasks]))
    assert f"microbatch {task.microbatch} on stage {task.stage} is missing; add it" in text
    if elsewhere.stage == table.num_stages:
        assert f"stage is {elsewhere.stage}; there are {elsewhere.stage}, 0 to {task.stage}" in text
    else:
        assert f"microbatch {task.microbatch} on stage {elsewhere.stage} occurs 2 times" in text


def test_two_tasks_have_no_place_in_one_tick():
    lockstep = one_forward_one_backward(2, 3, lockstep=True)
    text = refused(replace(lockstep, lockstep=False))
    assert "tick 1 of stage 1 has 2 tasks; allowed: one, or read the table as lock-step" in text
    forwards = [Task(0, 0, 0, microbatch, "forward") for microbatch in range(2)]
    table = Table(num_stages=1, num_microbatches=2, lockstep=True, tasks=tuple(forwards), name="mine")
    assert refused(table) == (
        "schedule 'mine' cannot run:\n"
        "  - tick 0 of stage 0 has 2 tasks of kind 'forward'; allowed: one of each kind in a lock-step tick"
    )


def test_one_task_a_tick_is_also_a_table_for_lockstep():
    for table in (gpipe(3, 4), one_forward_one_backward(4, 6), zero_bubble(4, 6)):
        check(replace(table, lockstep=True))


def test_all_problems_are_told_at_once():
    tasks = (
        Task(0, 0, 0, 0, "forward"),
        Task(0, 1, 0, 0, "forward"),
        Task(1, 1, 0, 0, "backward"),
        Task(1, 0, 0, 0, "backward"),
        Task(2, 0, 0, 1, "forward"),
        Task(-1, 0, 0, 0, "weight"),
    )
    table = Table(num_stages=2, num_microbatches=1, tasks=tasks, name="mine", kinds=("forward", "backward"))
    assert refused(table) == (
        "schedule 'mine' cannot run:\n"
        "  - in tick -1, the weight of microbatch 0 on stage 0: tick is below 0; the first is 0\n"
        "  - in tick -1, the weight of microbatch 0 on stage 0: kind 'weight' (known: forward, backward)\n"
        "  - in tick 2, the forward of microbatch 1 on stage 0: microbatch is 1; there are 1, 0 to 0\n"
        "  - the weight of microbatch 0 on stage 0 is in tick -1, but needs the backward of microbatch 0 on"
        " stage 0, which is in tick 1; move it to tick 2 or later\n"
        "  - the forward of microbatch 0 on stage 1 is in tick 0, but needs the forward of microbatch 0 on"
        " stage 0, which is in tick 0; move it to tick 1 or later\n"
        "  - the backward of microbatch 0 on stage 0 is in tick 1, but needs the backward of microbatch 0 on"
        " stage 1, which is in tick 1; move it to tick 2 or later"
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"placement": "ring"}, "placement 'ring' (known: loop, v)"),
        ({"placement": "v", "num_chunks": 3}, "placement 'v' has at most 2 chunks per stage, and 3 were"),
        ({"num_stages": 0, "num_chunks": -2}, "stages is 0; use 1 or more\n  - chunks is -2; use 1 or more"),
        ({"kinds": ("forward", "wait")}, "kind 'wait' (did you mean 'weight'?)"),
        ({"kinds": ("backward",)}, "its kinds are ['backward']; use ['forward'], ['forward', 'backward'] or"),
    ],
)
def test_sizes_and_kinds_are_checked(changes, text):
    assert text in refused(replace(gpipe(2, 2), **changes))


def test_a_stage_holds_no_more_than_its_bound():
    check(gpipe(2, 5))
    assert refused(replace(gpipe(2, 5), live_bound=(4, 5))) == (
        "schedule 'gpipe' cannot run:\n"
        "  - stage 0 holds 5 microbatches at once, its bound is 4;"
        " do the backward of the first before forward 5"
    )


def test_a_table_is_kept_in_order():
    table = zero_bubble(3, 4, lockstep=True)
    again = replace(table, tasks=tuple(reversed(table.tasks)))
    assert again == table
    assert [task.kind for task in table.tasks if task[:2] == (4, 0)] == ["backward", "weight"]
