"""A batch that grows: the steps are those of a run that is resumed with the larger batch."""

import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from quiet_training import train_quietly
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.reader import find_readers
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Text
from shardtrain.data.stream import NO_END
from shardtrain.islands.options import Across
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.scaling import Scaling
from shardtrain.optim.schedules import Schedule
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.feed import growth_by_step, parse_growth
from shardtrain.trainer.strategy import Strategy

SEQ = 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """37 windows of text, so an epoch ends within the steps."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 37 * SEQ + 20, np.uint8).tobytes())
    return Run(
        model=TinyConfig(num_layers=2, dropout=0.1),
        data=Text(paths=(path,), seq=SEQ, heldout_fraction=0.06),
        # a rate that does not depend on the last step, at which parts of the run end
        optimizer=Optimizer(learning_rate=Schedule(name="constant", peak=1e-2)),
        batch=8,
        batch_growth="2:2,4:3",
        steps=6,
        seed=3,
        log_every=1,
        evaluate_every=None,
        checkpoints=CheckpointPolicy(every_steps=3, keep=9),
    )


def trained(run, folder):
    """The parameters after a run as bits, and the losses and counts of its steps."""
    found, _, lines = train_quietly(replace(run, run_dir=folder))
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(found.state.params)], [
        (line["step"], line["train/loss"], line["grad_norm"]) for line in lines
    ]


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"data": 2, "fsdp": 2, "tensor": 2}, {"pipeline": 2, "data": 4}])
def test_a_batch_grows_as_if_the_run_were_resumed_with_a_larger_one(run, mesh, tmp_path):
    strategy = Strategy(layout=Layout(mesh=mesh), accumulate=2)
    run = replace(run, strategy=strategy, batch_growth="2:2", steps=4)
    grown = trained(run, tmp_path / "grown")
    # saved in the middle of a stretch, and resumed there
    late = shutil.ignore_patterns("step_00000004*")
    shutil.copytree(tmp_path / "grown", tmp_path / "resumed", ignore=late)
    assert [each.step for each in find_readers(tmp_path / "resumed" / "checkpoints")] == [3]
    assert trained(run, tmp_path / "resumed") == grown
    # by hand: the same data in the same order, and as many times the microbatches
    for steps, factor in ((2, 1), (4, 2)):
        strategy = replace(run.strategy, accumulate=2 * factor)
        part = replace(run, strategy=strategy, batch=8 * factor, batch_growth="", steps=steps)
        by_hand = trained(part, tmp_path / "by_hand")
    assert by_hand == grown


def test_the_text_is_read_by_value():
    assert growth_by_step("", 37, 8) == {}
    assert growth_by_step("500:2, 1000:4", 37, 8) == {500: 2, 1000: 4}
    assert growth_by_step("500:2", NO_END, 8) == {500: 2}
    with pytest.raises(ValueError, match="a stream or a mixture, which has no epochs; give steps"):
        growth_by_step("2 epochs:2", NO_END, 8)
    with pytest.raises(ValueError) as error:
        parse_growth("500:2,400:3,0:1,half:2,600 epochs:3")
    form = (
        "give STEPS:BATCHES for each change, such as 500:2,1000:4, or EPOCHS epochs:BATCHES, such as"
        " 2 epochs:2"
    )
    assert str(error.value) == (
        "batch_growth '500:2,400:3,0:1,half:2,600 epochs:3' cannot be read:\n"
        "  - '400:3' comes after step 500; give the changes in their order\n"
        f"  - '0:1' is not two numbers from 1; {form}\n"
        f"  - 'half:2' is not two numbers from 1; {form}\n"
        "  - '600 epochs:3' comes after step 500; give all changes in steps, or in epochs"
    )


def test_epochs_end_after_as_many_steps_as_their_batches_need():
    # by hand: 37 samples are 5 batches of 8, then 3 of 16, the last of each epoch a short one
    assert growth_by_step("1 epochs:2,3epochs:3", 37, 8) == {5: 2, 11: 3}


def test_where_a_batch_cannot_grow_is_refused(run):
    for strategy, name, why in (
        (
            Strategy(across=Across(axis="pipeline"), pipeline=Pipeline(), accumulate=4),
            "across 'pipeline'",
            "the schedule of its stages has one number of microbatches; use a mesh with the axis pipeline,"
            " or islands without stages",
        ),
        (
            Strategy(across=Across(shares="auto")),
            "shares 'auto'",
            "a step's time then tells no speed; give weights, such as --shares 2,1",
        ),
        (
            Strategy(layout=Layout(mesh={"pipeline": 2}), pipeline=Pipeline(schedule="own.csv")),
            "a schedule from a .csv",
            "its table has one number of microbatches; use a schedule by name, such as --schedule 1f1b",
        ),
        (
            Strategy(synchronisation=Synchronisation(on="deltas", every=2, distance=1)),
            "clock_distance",
            "islands that are ahead would change their batches earlier; use local steps",
        ),
    ):
        with pytest.raises(ValueError) as error:
            replace(run, strategy=strategy)
        assert str(error.value) == (
            "this run cannot be started:\n"
            f"  - batch_growth is '2:2,4:3', which cannot be used with {name}: {why}, or leave batch_growth"
            " out"
        )
        replace(run, strategy=strategy, batch_growth="")
    with pytest.raises(ValueError, match="positions in the data count batches of one size; use examples"):
        replace(run, batch_unit="tokens")
    with pytest.raises(ValueError) as error:
        replace(run, scaling=Scaling(steps=True))
    assert str(error.value) == (
        "this run cannot be started:\n"
        "  - batch_growth is '2:2,4:3', which cannot be used with scaling.steps: it divides the steps of the"
        " run by the replicas, but not those of batch_growth; give both for all replicas, without"
        " scaling.steps, or leave batch_growth out"
    )
    replace(run, scaling=Scaling(steps=True), batch_growth="")
