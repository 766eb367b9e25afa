"""Islands of real processes that come and go: the numbers of one process, and each slot of a step once."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chaos import Run, run_chaos  # adds the folder of programs
from elastic_island import SIZE, SLOTS, Toy

from shardtrain.elastic.engine import Checkpoint, FindCheckpoint, Restore
from shardtrain.elastic.epoch import Epoch, Peer, found_epoch
from shardtrain.elastic.island import ElasticIsland, StateArrived
from shardtrain.elastic.member import Membership
from shardtrain.elastic.messages import to_json
from shardtrain.elastic.run_files import RunFiles


@pytest.fixture
def run(tmp_path, warm_python):
    run = Run(warm_python, tmp_path, steps=150, seconds=0.004)
    yield run
    run.end()


def test_they_are_killed_frozen_stopped_and_started(tmp_path, warm_python):
    run = Run(warm_python, tmp_path, steps=500)
    try:
        killed = run_chaos(run, seed=1, events=10)
        epochs = run.finish()
    finally:
        run.end()
    assert killed
    assert "lost" in " ".join(epoch.why for epoch in epochs)


def test_without_a_checkpoint_a_run_is_founded_at_its_begin(tmp_path):
    """Also by an island that has received the state of one that died since."""
    island = ElasticIsland(tmp_path, toy := Toy(), Membership(num_slots=SLOTS), host="127.0.0.1")
    island._checkpoints.find()
    later = jax.tree.leaves({**toy.state, "x": np.full(SIZE, 3), "step": np.array(5)})
    island._do(StateArrived("a", 5, later))
    assert toy.state["step"] == 5
    island._do(Restore(0))
    assert toy.state["step"] == 0
    np.testing.assert_array_equal(toy.state["x"], np.arange(SIZE))
    island.close()


def test_a_run_that_was_continued_without_islands_has_read_one_batch_in_each_step_since(tmp_path):
    class Members(Toy):
        def compute(self, step, slots, batches):
            return super().compute(step, slots)

    members = tuple(Peer(name=name, address="") for name in "ab")
    slots = tuple(tuple(range(first, first + SLOTS)) for first in (0, SLOTS))
    two = Epoch(
        number=2, step=4, members=members, slots=slots, why="joined b", member_slots=SLOTS, first_batch=4
    )
    files = RunFiles(tmp_path / "elastic")
    for epoch in (found_epoch(1, members[0], 0, SLOTS, first_batch=0), two):
        files.propose(epoch.number, json.dumps(to_json(epoch)).encode())
    files.mark_plain(9)
    (tmp_path / "elastic" / "checkpoints" / "step-11-epoch-2").mkdir(parents=True)
    options = Membership(num_slots=SLOTS, batch="members")
    island = ElasticIsland(tmp_path, Members(), options, host="127.0.0.1")
    island._do(FindCheckpoint())
    assert island._events.get() == Checkpoint(11, 4 + 2 * 5 + 2)
    island.close()


def test_other_steps_or_slots_than_those_of_the_run_are_refused(run):
    run.start(2)
    run.wait_for(lambda: all(each.is_member for each in run.processes))
    run.steps = 200
    other = run.start()
    run.wait_for(lambda: other.popen.poll() == 1)
    run.steps = 150
    assert "has num_steps=200, and the run in" in other.output.read_text()
    run.finish()
    # a finished run is not continued, and a later start may add steps
    again = run.start()
    run.finish()
    assert again.outcome.startswith("stopped 150 ")
    assert not again.is_member
    run.steps = 200
    run.start()
    # from the checkpoint of its last step
    assert [epoch.step for epoch in run.finish() if epoch.founded] == [0, 150, 150]
    with pytest.raises(
        ValueError, match=r"has num_slots=5, and the run in .* has 6; use num_slots=6 \(--elastic.slots 6\)"
    ):
        ElasticIsland(run.folder, Toy(), Membership(num_slots=5), host="127.0.0.1")
    with pytest.raises(ValueError, match=r"has batch=members, and the run in .* has fixed; use batch=fixed"):
        ElasticIsland(run.folder, Toy(), Membership(num_slots=SLOTS, batch="members"), host="127.0.0.1")
