"""Task graphs: queues in time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.plan.simulator.task_graph import Task, TaskGraph

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


@settings(max_examples=40, deadline=None)
@given(graphs())
def test_a_timeline_follows_the_rules(tasks):
    found = TaskGraph(tuple(tasks.values())).timeline
    assert set(found.end) == set(tasks)
    for queue in ("device 0", "device 1", "link"):
        keys = sorted((key for key in tasks if tasks[key].queue == queue), key=lambda k: (found.ready[k], k))
        free = 0.0
        for key in keys:
            assert found.ready[key] == max([found.end[need] for need in tasks[key].needs], default=0.0)
            assert found.start[key] == max(found.ready[key], free)
            assert found.end[key] == free or found.end[key] == found.start[key] + tasks[key].seconds
            free = found.end[key]


def test_of_equal_tasks_the_smaller_number_is_first():
    first = Task((0,), "first", "forward", "device", 1.0)
    slow = Task((1,), "slow", "forward", "device", 5.0, ((0,),))
    fast = Task((2,), "fast", "transfer", "device", 1.0, ((0,),))
    found = TaskGraph((fast, slow, first)).timeline
    assert (found.start[1,], found.start[2,]) == (1.0, 6.0)
