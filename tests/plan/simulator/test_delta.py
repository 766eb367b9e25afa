"""Task graphs: queues in time, and the same timeline after any change by simulating only what changes."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.plan.simulator import delta
from shardtrain.plan.simulator.delta import DeltaSimulation
from shardtrain.plan.simulator.task_graph import Task, TaskGraph
from shardtrain.plan.simulator.timeline import timeline

# equal and zero durations make many tasks ready at the same time
SECONDS = st.sampled_from([0.0, 0.0, 0.1, 0.25, 1.0, 2.0]) | st.floats(0, 3)
KEYS = st.tuples(st.integers(0, 5), st.integers(0, 3))


@st.composite
def tasks_of(draw, key, others):
    """A task that needs some of the others with smaller numbers."""
    smaller = [other for other in others if other < key]
    needs = draw(st.lists(st.sampled_from(smaller), unique=True, max_size=3)) if smaller else []
    queue = draw(st.sampled_from(["device 0", "device 1", "link"]))
    return Task(key, "work", "forward", queue, draw(SECONDS), tuple(needs))


@st.composite
def graphs(draw):
    keys = draw(st.lists(KEYS, unique=True, max_size=20))
    return {key: draw(tasks_of(key, keys)) for key in keys}


@st.composite
def changes(draw, tasks):
    """Tasks of one operator replaced, removed and added; those that needed a removed one no longer do."""
    operator = draw(st.integers(0, 5))
    own = [(operator, number) for number in range(4)]
    removed = {key for key in own if key in tasks and draw(st.booleans())}
    put = [key for key in own if key not in removed and draw(st.booleans())]
    left = (set(tasks) - removed) | set(put)
    new = {key: draw(tasks_of(key, sorted(left))) for key in put}
    for key in left - set(new):
        if kept := removed & set(tasks[key].needs):
            needs = tuple(need for need in tasks[key].needs if need not in kept)
            new[key] = replace(tasks[key], needs=needs)
    return removed, new


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_delta_simulation_is_full_simulation(data):
    with pytest.MonkeyPatch.context() as patch:
        # after how many tasks all that is ready later is simulated anew; with 64 never in graphs this small
        patch.setattr(delta, "FIRST_LOOK", data.draw(st.sampled_from([1, 2, 4, 64])))
        patch.setattr(delta, "MOST_FOLLOWED", 0.0)
        change_and_compare(data)


def change_and_compare(data):
    tasks = data.draw(graphs())
    simulation = DeltaSimulation(TaskGraph(tasks.values()))
    for _ in range(4):
        before, kept = simulation.timeline, dict(simulation.tasks)
        removed, new = data.draw(changes(kept))
        simulation.change(remove=removed, put=new.values())
        tasks = {key: task for key, task in kept.items() if key not in removed} | new
        full = timeline(TaskGraph(tasks.values()))
        assert simulation.tasks == tasks
        assert simulation.timeline == full
        assert simulation.makespan == full.makespan
        if data.draw(st.booleans()):
            simulation.undo()
            assert simulation.tasks == kept
            assert simulation.timeline == before


def random_task(rng, key, others):
    """A task of a random duration, often 0, that needs up to 3 of the others."""
    needs = tuple(rng.sample(others, min(len(others), rng.randrange(4))))
    return Task(key, "work", "forward", f"device {rng.randrange(3)}", rng.choice([0.0, 0.1, 1.0, 2.5]), needs)


@pytest.mark.parametrize("first_look", [1, 8, 64])
def test_many_changes_of_a_larger_graph_are_each_full_simulation(first_look, monkeypatch):
    # where a change is followed, where the rest is simulated anew after a few tasks, and where both happen
    monkeypatch.setattr(delta, "FIRST_LOOK", first_look)
    rng = random.Random(first_look)
    tasks = {(i,): random_task(rng, (i,), [(j,) for j in range(max(0, i - 9), i)]) for i in range(60)}
    simulation = DeltaSimulation(TaskGraph(tasks.values()))
    for _ in range(60):
        some = set(rng.sample(range(60), rng.randrange(1, 9)))
        removed = {(i,) for i in some if (i,) in tasks and rng.random() < 0.7}
        left = {(i,) for i in some} - removed
        kept = sorted((set(tasks) - removed) | left)
        put = {key: random_task(rng, key, [other for other in kept if other < key][-9:]) for key in left}
        for key in set(kept) - left:
            if removed & set(tasks[key].needs):
                needs = tuple(need for need in tasks[key].needs if need not in removed)
                put[key] = replace(tasks[key], needs=needs)
        before = simulation.timeline
        simulation.change(remove=removed, put=put.values())
        new = {key: put.get(key) or tasks[key] for key in kept}
        assert simulation.tasks == new
        assert simulation.timeline == timeline(TaskGraph(new.values()))
        if rng.random() < 0.4:
            simulation.undo()
            assert simulation.tasks == tasks
            assert simulation.timeline == before
        else:
            tasks = new


@given(graphs())
def test_a_timeline_follows_the_rules(tasks):
    found = timeline(TaskGraph(tasks.values()))
    assert set(found.end) == set(tasks)
    for queue in ("device 0", "device 1", "link"):
        keys = sorted((key for key in tasks if tasks[key].queue == queue), key=lambda k: (found.ready[k], k))
        free = 0.0
        for key in keys:
            assert found.ready[key] == max([found.end[need] for need in tasks[key].needs], default=0.0)
            assert found.start[key] == max(found.ready[key], free)
            assert found.end[key] == free or found.end[key] == found.start[key] + tasks[key].seconds
            free = found.end[key]


def chains(num_devices, length):
    """Devices that each do a chain of tasks; all wait for each other at the end."""
    tasks = [
        Task((step, device), "work", "forward", f"device {device}", 1.0, ((step - 1, device),) * (step > 0))
        for device in range(num_devices)
        for step in range(length)
    ]
    last = tuple((length - 1, device) for device in range(num_devices))
    return [*tasks, Task((length,), "join", "collective", "link", 1.0, last)]


def test_only_what_changes_is_simulated_again():
    tasks = chains(8, 100)
    simulation = DeltaSimulation(TaskGraph(tasks))
    assert simulation.num_simulated == 801
    by_key = {task.key: task for task in tasks}
    # a task of one device, 10 before the end: the rest of its chain, and the join
    simulation.change(put=[replace(by_key[90, 3], seconds=2.0)])
    assert simulation.makespan == 102.0
    assert simulation.num_simulated == 801 + 10 + 1
    # a change that moves everything is no more work than simulating everything, beside what was followed
    simulation.change(put=[replace(by_key[0, device], seconds=3.0) for device in range(8)])
    assert simulation.makespan == 104.0
    assert simulation.num_simulated <= 812 + 801 * 1.2
    simulation.undo()
    assert simulation.makespan == 102.0


def test_of_equal_tasks_the_smaller_number_is_first():
    first = Task((0,), "first", "forward", "device", 1.0)
    slow = Task((1,), "slow", "forward", "device", 5.0, ((0,),))
    fast = Task((2,), "fast", "transfer", "device", 1.0, ((0,),))
    found = timeline(TaskGraph([fast, slow, first]))
    assert (found.start[1,], found.start[2,]) == (1.0, 6.0)


def test_tasks_that_are_no_graph_are_refused():
    good = Task((0,), "a", "forward", "device", 1.0)
    bad = [
        good,
        good,
        Task((1,), "b", "sleep", "device", -1.0, ((2,), (0, 5))),
        Task((2,), "c", "forward", "device", float("nan"), ((2,),)),
    ]
    with pytest.raises(ValueError, match="these tasks are no graph") as caught:
        TaskGraph(bad)
    assert str(caught.value).splitlines()[1:] == [
        "  - task (0,) is there twice; give each a number of its own",
        "  - task (1,) has kind 'sleep'; use one of forward, backward, update, transfer, collective",
        "  - task (1,) takes -1.0 s; give a number from 0",
        "  - task (1,) needs task (2,); number tasks so that each needs smaller ones",
        "  - task (1,) needs task (0, 5), which is not there; add it, or leave the need out",
        "  - task (2,) takes nan s; give a number from 0",
        "  - task (2,) needs task (2,); number tasks so that each needs smaller ones",
    ]


def test_changes_that_leave_no_graph_change_nothing():
    tasks = chains(2, 3)
    simulation = DeltaSimulation(TaskGraph(tasks))
    before = simulation.timeline
    with pytest.raises(ValueError, match=r"task \(1, 0\) is removed, and task \(2, 0\) needs it"):
        simulation.change(remove=[(1, 0)])
    with pytest.raises(ValueError, match=r"task \(9,\) is not there to remove"):
        simulation.change(remove=[(9,)])
    with pytest.raises(ValueError, match=r"needs task \(0, 0\), which is not there"):
        simulation.change(remove=[(0, 0)], put=[tasks[1]])
    with pytest.raises(ValueError, match="is both removed and put"):
        simulation.change(remove=[(0, 0)], put=[tasks[0]])
    assert simulation.timeline == before
