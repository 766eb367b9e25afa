"""The first process of an island asks all of its processes for what each does with its own arrays."""

import threading
from queue import SimpleQueue
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.elastic import group as group_module
from shardtrain.elastic.group import Group, GroupProgram, LeaderFailed


class Threads:
    """A channel between threads, which stand for processes."""

    def __init__(self, rank: int, size: int, shared: Any) -> None:
        self.rank, self.size, self._shared = rank, size, shared

    def all_gather(self, name, value):
        self._shared["values"][self.rank] = (name, value)
        self._shared["barrier"].wait()
        names, values = zip(*self._shared["values"], strict=True)
        assert len(set(names)) == 1, names
        self._shared["barrier"].wait()
        return list(values)

    def send(self, array, to):
        self._shared["queues"][self.rank, to].put(array)

    def receive(self, shape, dtype, source):
        found = self._shared["queues"][source, self.rank].get(timeout=10)
        assert (found.shape, found.dtype) == (shape, dtype)
        return found


class Part:
    """A process with as many parameters as its number says, one of them in bfloat16."""

    codecs = ("int8", "")

    def __init__(self, rank):
        self.state = {"a": np.arange(rank + 1.0, dtype=np.float32), "b": jnp.bfloat16(rank)}
        self.batches = []

    def compute(self, step, slots, *batches):
        self.batches += batches
        return {name: x * (step + sum(slots)) for name, x in self.state.items()}

    def apply(self, step, total):
        self.state = {name: x + total[name] for name, x in self.state.items()}


def run_processes(number, lead):
    """Call `lead` with the program of the first process; return its result, and the parts of all."""
    shared = {
        "values": [None] * number,
        "barrier": threading.Barrier(number, timeout=10),
        "queues": {(i, j): SimpleQueue() for i in range(number) for j in range(number)},
    }
    parts, found = [Part(rank) for rank in range(number)], [None] * number

    def run(rank):
        group = Group(Threads(rank, number, shared))
        program = GroupProgram(group, parts[rank])
        try:
            found[rank] = group.run(lambda: lead(program))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(number)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return found, parts


def test_each_process_computes_and_updates_its_own_arrays():
    def lead(program):
        sums = program.compute(2, range(1, 3))
        assert [[x.shape for x in arrays] for arrays in sums] == [[(1,), ()], [(2,), ()], [(3,), ()]]
        assert program.codecs == [["int8", ""]] * 3
        program.compute(2, range(1), range(7, 9))
        program.apply(2, sums)
        before = program.state
        program.state = [[x + 1 for x in arrays] for arrays in before]
        return [[np.float32(x).tolist() for x in arrays] for arrays in before]

    found, parts = run_processes(3, lead)
    # on all processes: the state after x + 5 x
    assert found == [[[[0.0], 0.0], [[0.0, 6.0], 6.0], [[0.0, 6.0, 12.0], 12.0]]] * 3
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part.state["a"], 6 * np.arange(rank + 1.0) + 1)
        assert (part.state["b"].dtype, float(part.state["b"])) == (jnp.bfloat16, 6 * rank + 1)
        assert part.batches == [range(7, 9)]


def test_the_others_end_if_the_first_one_fails(monkeypatch):
    monkeypatch.setattr(group_module, "DEATH_SECONDS", 0.0)

    def lead(program):
        program.compute(0, range(1))
        raise OSError("the disk is full")

    (first, *others), _ = run_processes(3, lead)
    assert isinstance(first, OSError)
    for each in others:
        assert isinstance(each, LeaderFailed)
        assert str(each) == "the first process of this island has ended: OSError: the disk is full"


def test_an_error_within_a_call_is_raised_without_waiting_for_the_others(monkeypatch):
    """They may wait for an array of the first process, and would never ask what is next."""
    monkeypatch.setattr(group_module, "DEATH_SECONDS", 0.0)
    asked = []

    class Waiting(Threads):
        def all_gather(self, name: str, value: Any) -> list[Any]:
            asked.append(value[0])
            return [value] * 2

    group = Group(Waiting(0, 2, {}))
    group.actions |= {"succeed": lambda: None, "fail": lambda: 1 / 0}
    with pytest.raises(ZeroDivisionError):
        group.run(lambda: group.ask("fail"))
    assert asked == ["fail"]

    def lead():
        group.ask("succeed")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        group.run(lead)
    assert asked == ["fail", "succeed", "failed"]


def test_a_single_process_asks_itself():
    group = Group()
    group.actions["double"] = lambda x: 2 * x
    assert group.leads
    assert group.run(lambda: group.ask("double", 3)) == 6
