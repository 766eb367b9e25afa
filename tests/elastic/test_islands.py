"""Islands of real processes that come and go: the numbers of one process, and each slot of a step once."""

import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chaos import Run, run_chaos  # adds the folder of programs
from elastic_island import SIZE, SLOTS, Toy, train_alone

from shardtrain.elastic.engine import Restore
from shardtrain.elastic.island import ElasticIsland, StateArrived
from shardtrain.elastic.member import Membership


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


def test_one_that_is_asked_to_end_leaves_and_nothing_is_repeated(run):
    first, _ = run.start(), run.start()
    run.wait_for(lambda: all(each.is_member for each in run.processes))
    first.signal(signal.SIGINT)
    epochs = run.finish()
    assert first.outcome.startswith("left ")
    assert not any(epoch.repeats for epoch in epochs)


def test_when_all_are_dead_a_new_one_goes_on_from_the_checkpoint(run):
    run.start()
    run.wait_for(lambda: "step 45" in run.processes[0].list_texts())
    run.processes[0].signal(signal.SIGKILL)
    run.start()
    epochs = run.finish()
    # saved every 20 steps
    assert [epoch.step for epoch in epochs if epoch.founded] == [0, 40]
    # a finished run is not continued
    again = run.start()
    run.finish()
    assert again.outcome.startswith("stopped 150 ")
    assert not again.is_member


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


def test_other_steps_or_slots_than_those_of_the_run_are_refused(run):
    run.start(2)
    run.wait_for(lambda: all(each.is_member for each in run.processes))
    run.steps = 200
    other = run.start()
    run.wait_for(lambda: other.popen.poll() == 1)
    run.steps = 150
    assert "has num_steps=200, and the run in" in other.output.read_text()
    run.finish()
    # a later start may add steps
    run.steps = 200
    run.start()
    run.finish()
    with pytest.raises(ValueError, match=r"has num_slots=5, and the run in .* has 6; use num_slots=6"):
        ElasticIsland(run.folder, Toy(), Membership(num_slots=5), host="127.0.0.1")


def test_one_that_was_frozen_is_let_go_and_finds_out(run):
    run.start(2)
    run.wait_for(lambda: all(each.is_member for each in run.processes))
    frozen = run.processes[0]
    frozen.signal(signal.SIGSTOP)
    run.wait_for(lambda: any("lost" in text for text in run.processes[1].list_texts()))
    frozen.signal(signal.SIGCONT)
    run.finish()
    # it has applied nothing that the others have not
    outcome, steps, total = frozen.outcome.rsplit(" ", 2)
    assert (outcome, int(total)) == ("excluded", train_alone(int(steps)))
