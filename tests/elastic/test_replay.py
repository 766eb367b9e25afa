"""Steps computed anew from epochs; `test_train.py` compares them with islands of real processes."""

import sys
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "programs"))
from elastic_island import Toy

from shardtrain.elastic.codecs import Plain
from shardtrain.elastic.epoch import Epoch, Peer, found_epoch
from shardtrain.elastic.flat_sum import FlatSum, cut_chunk
from shardtrain.elastic.replay import hash_arrays, list_differences, replay_steps, sum_as_ring

A, B, C = (Peer(name=name, address="") for name in "abc")


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_sum_is_bitwise_that_of_a_ring(size):
    sums = [np.random.default_rng(i).standard_normal(11, np.float32) for i in range(size)]
    found = sum_as_ring([FlatSum([x], [Plain(x.dtype)]) for x in sums]).arrays[0]
    for chunk in range(size):
        # it begins at the member of its number
        parts = [cut_chunk([sums[(chunk + i) % size]], chunk, size, [1])[0] for i in range(size)]
        np.testing.assert_array_equal(cut_chunk([found], chunk, size, [1])[0], reduce(add, parts))


class OnMesh(Toy):
    """A toy whose state says by which meshes it was updated."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.state["by"] = np.zeros(10, np.int64)

    def apply(self, step, total):
        by = self.state["by"].copy()
        by[step] = self.mesh
        super().apply(step, total)
        self.state["by"] = by


def test_each_mesh_has_its_own_state_and_a_new_one_copies_that_of_the_oldest_member():
    meshes = {"a": 1, "b": 2, "c": 3}
    epochs = [
        found_epoch(1, A, 0, 6),
        Epoch(number=2, step=2, members=(A, B), slots=((0, 1, 2), (3, 4, 5)), why="joined b"),
        Epoch(number=3, step=4, members=(B,), slots=((3, 4, 5, 0, 1, 2),), why="lost a", kept=(3,)),
        found_epoch(4, C, 3, 6),
    ]
    by = {1: [1], 3: [1, 1, 1], 5: [1, 1, 1, 3, 3]}
    for last, expected in by.items():
        programs = {mesh: OnMesh(mesh) for mesh in (1, 2, 3)}
        chief = replay_steps(programs, meshes, epochs, 0, last)
        assert chief == expected[-1]
        assert programs[chief].state["by"].tolist()[:last] == expected
    # as it was before the founder came: c's checkpoint is not of this past
    programs = {mesh: OnMesh(mesh) for mesh in (1, 2)}
    assert replay_steps(programs, meshes, epochs[:3], 0, 6) == 2
    assert programs[2].state["by"].tolist()[:6] == [1, 1, 2, 2, 2, 2]


def test_differences_have_names():
    state = {"params": {"w": np.array([1, 2], np.float32)}, "step": np.int64(3)}
    other = {"params": {"w": np.array([1, 2.5], np.float32)}, "step": np.int64(3)}
    assert list_differences(state, state) == []
    assert list_differences(state, other) == ["params/w: by up to 0.5"]
    zeros = {"params": {"w": np.array([0.0], np.float32)}}
    assert list_differences(zeros, {"params": {"w": np.array([-0.0], np.float32)}}) == [
        "params/w: by up to 0"
    ]
    assert hash_arrays(state) == hash_arrays(dict(state)) != hash_arrays(other)
