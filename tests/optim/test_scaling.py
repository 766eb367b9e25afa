"""Scaling to more replicas: what is scaled by how much, notes, refused options."""

from dataclasses import replace
from typing import Any

import optax
import pytest

from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.scaling import Scaling, scale_run
from shardtrain.optim.schedules import Schedule, make_schedule
from shardtrain.trainer.config import Run


class NoData:
    def train(self, folder): ...
    def heldout(self, folder): ...


SGD = Optimizer(name="sgd", learning_rate=Schedule(name="constant", peak=0.1))
RUN = Run(model=None, data=NoData(), optimizer=SGD, batch=32, steps=1000)
ALL: Any = {"batch": True, "steps": True}


def schedule_of(run) -> Schedule:
    return run.optimizer.learning_rate


def with_schedule(**changes):
    return replace(RUN, optimizer=replace(SGD, learning_rate=replace(SGD.learning_rate, **changes)))


def test_by_default_and_alone_nothing_changes():
    every = Scaling(rate="linear", batch=True, steps=True, warmup=10)
    for scaling, replicas in ((Scaling(), 8), (every, 1)):
        run, notes = scale_run(RUN, scaling, replicas, "adasum")
        assert run is RUN
        assert notes == ()


@pytest.mark.parametrize(("rate", "factor"), [("none", 1), ("linear", 3), ("sqrt", 3**0.5)])
def test_factors_of_the_rate(rate, factor):
    run = scale_run(RUN, Scaling(rate=rate, batch=True), 3)[0]
    assert schedule_of(run).peak == pytest.approx(0.1 * factor)
    assert replace(schedule_of(run), peak=0.1) == schedule_of(RUN)
    assert (run.batch, run.steps) == (96, 1000)


def test_the_rate_rises_from_that_of_one_replica():
    """Goyal et al. 2017, section 2.2: from eta, by equal amounts, to k * eta."""
    run = scale_run(RUN, Scaling(rate="linear", batch=True, warmup=100), 8)[0]
    rate: Any = make_schedule(schedule_of(run), run.steps)
    found = [float(rate(step)) for step in (0, 50, 100, 900)]
    assert found == pytest.approx([0.1, 0.45, 0.8, 0.8])


def test_a_warmup_of_the_run_stays_from_0():
    run = scale_run(with_schedule(warmup=50), Scaling(rate="linear", batch=True), 8)[0]
    assert (schedule_of(run).warmup, schedule_of(run).start) == (50, 0.0)
    run = scale_run(with_schedule(warmup=50), Scaling(rate="linear", batch=True, warmup=7), 8)[0]
    assert (schedule_of(run).warmup, schedule_of(run).start) == (7, 1 / 8)


@pytest.mark.parametrize(("steps", "replicas", "expected"), [(1000, 3, 333), (5, 8, 1)])
def test_steps_are_divided(steps, replicas, expected):
    run = scale_run(replace(RUN, steps=steps), Scaling(batch=True, steps=True), replicas)[0]
    assert (run.steps, run.batch) == (expected, 32 * replicas)


@pytest.mark.parametrize(("warmup", "expected"), [(0, 0), (1, 1), (50, 7)])
def test_divided_steps_shorten_a_warmup_of_the_run(warmup, expected):
    run = scale_run(with_schedule(warmup=warmup), Scaling(batch=True, steps=True), 8)[0]
    assert schedule_of(run).warmup == expected
    assert schedule_of(run).peak == 0.1


def test_the_pace_and_all_else_stay():
    before = replace(RUN, log_every=7, evaluate_every=11, seed=3)
    after = scale_run(before, Scaling(rate="sqrt", batch=True, steps=True, warmup=5), 4)[0]
    changed = {"optimizer", "batch", "steps"}
    assert {n for n in Run.__dataclass_fields__ if getattr(before, n) != getattr(after, n)} == changed
    assert replace(after.optimizer, learning_rate=schedule_of(before)) == before.optimizer  # type: ignore[arg-type]


def test_the_first_note_says_what_was_changed():
    notes = scale_run(RUN, Scaling(rate="linear", warmup=40, **ALL), 8)[1]
    assert notes == (
        "scaled to 8 replicas: batch 32 -> 256, steps 1000 -> 125, peak rate 0.1 -> 0.8 (linear),"
        " warmup 0 -> 40 steps from 0.1",
    )
    assert scale_run(RUN, Scaling(batch=True), 2)[1] == ("scaled to 2 replicas: batch 32 -> 64",)
    one_step = replace(RUN, steps=1)
    assert scale_run(one_step, Scaling(steps=True), 2)[1][0] == "scaled to 2 replicas: nothing to change"


ADAM = replace(RUN, optimizer=replace(SGD, name="adamw"))
BATCH_IS_SHARED = (
    "the rate is raised (linear), but the batch of 32 is not: the linear rule is for 256 examples in a step;"
    " use scaling.batch, or rate none"
)
NO_WARMUP = (
    "the rate is 8 times that of one replica from the first step on; Goyal et al. let it rise over 5 of 90"
    " epochs: scaling.warmup=56"
)
ONE_RATE = "Horovod's guide takes the best rate of one replica times 1"


@pytest.mark.parametrize(
    ("run", "scaling", "combiner", "notes"),
    [
        (RUN, Scaling(rate="linear", batch=True), "mean", [NO_WARMUP]),
        (RUN, Scaling(rate="linear", warmup=9), "int8+mean", [BATCH_IS_SHARED]),
        (RUN, Scaling(rate="sqrt", batch=True), "mean", []),
        (
            RUN,
            Scaling(steps=True),
            "mean",
            [
                "steps are divided by 8, but 8 replicas share a batch of 32: the run reads 1/8 of the"
                " examples; scaling.batch reads as many as one replica would"
            ],
        ),
        (
            ADAM,
            Scaling(rate="linear", batch=True, warmup=9),
            "mean",
            [
                "the linear rule is that of SGD; for adamw theory has the square root (Malladi et al. 2022),"
                " and with Adam Dong et al. 2019 found it the better one beyond 16 replicas: rate sqrt gives"
                " a peak of 0.2828"
            ],
        ),
        (
            RUN,
            Scaling(rate="linear", warmup=125, **ALL),
            "mean",
            [
                "the warmup of 125 steps is as long as the run of 125: the rate never falls; a warmup of 7"
                " leaves room"
            ],
        ),
        (
            RUN,
            Scaling(rate="linear", batch=True, warmup=9),
            "sum",
            [
                "the sum of 8 gradients is already 8 times their mean; with SGD, rate linear makes it 64"
                " times: use rate none, or the combiner mean"
            ],
        ),
        (RUN, Scaling(batch=True), "sum", []),
        (RUN, Scaling(batch=True), "adasum", []),
        (
            ADAM,
            Scaling(rate="linear", batch=True, warmup=9),
            "int8+adasum:whole",
            [
                f"Adasum needs no scaled rate: {ONE_RATE}, at most 2.5 times it; rate linear makes it 8"
                " times: use rate none and a peak of 0.1"
            ],
        ),
    ],
)
def test_notes(run, scaling, combiner, notes):
    assert list(scale_run(run, scaling, 8, combiner)[1][1:]) == notes


def test_adasum_of_means():
    """Horovod's hierarchical mode: the rate times the replicas that are averaged before Adasum."""
    averaged = f"{ONE_RATE[:-1]}4 (the replicas that are averaged before Adasum)"
    linear = Scaling(rate="linear", batch=True, warmup=9)
    assert scale_run(RUN, Scaling(batch=True), 8, "adasum", 4)[1][1:] == (
        f"{averaged}; the rate is scaled by 1: try a peak of 0.4",
    )
    assert scale_run(RUN, linear, 8, "adasum", 4)[1][1:] == ()
    assert scale_run(RUN, linear, 16, "adasum", 4)[1][1:] == (
        f"Adasum needs no scaled rate: {averaged}, at most 10 times it; rate linear makes it 16 times: use"
        " rate none and a peak of 0.4",
    )
    # twice the rate of one replica is what the guide recommends to try
    assert scale_run(RUN, replace(linear, rate="sqrt"), 4, "adasum")[1][1:] == ()


def test_an_optimizer_given_in_python():
    given = replace(RUN, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError) as error:
        scale_run(given, Scaling(rate="sqrt", batch=True), 8)
    assert str(error.value) == (
        "the learning rate is to be scaled (sqrt) by 2.828 for 8 replicas, but the optimizer is given in"
        " Python (GradientTransformationExtraArgs), and its rate cannot be changed from outside; use an"
        " Optimizer(name=..., learning_rate=Schedule(...)), or multiply its rate by 2.828 yourself and use"
        " rate none"
    )
    run, notes = scale_run(given, Scaling(**ALL), 8, "adasum")
    assert run == replace(given, batch=256, steps=125)
    assert notes[1:] == (
        "steps are divided, but a schedule inside the optimizer, which is given in Python, is not: let it end"
        " after 125 steps",
    )


def test_a_rate_that_is_a_function_is_not_scaled():
    given = replace(RUN, optimizer=Optimizer(learning_rate=Schedule(function=lambda step: 0.1)))
    with pytest.raises(
        ValueError, match=r"but its learning rate is given in Python .* multiply its rate by 8"
    ):
        scale_run(given, Scaling(rate="linear"), 8)
    run, notes = scale_run(given, Scaling(steps=True, batch=True), 8)
    assert run.optimizer == given.optimizer
    assert "a schedule inside the optimizer, which is given in Python" in notes[1]


def test_what_scaling_refuses():
    with pytest.raises(ValueError) as error:
        Scaling(rate="lineal", batch=64, steps=1, warmup=-1)  # type: ignore[arg-type]
    assert str(error.value) == (
        "this scaling cannot be used:"
        "\n  - rate is 'lineal'; allowed: none, linear, sqrt"
        "\n  - batch is 64; give True or False"
        "\n  - steps is 1; give True or False"
        "\n  - warmup is -1 steps; use 0 or more, or None"
    )
    with pytest.raises(ValueError) as error:
        Scaling(warmup=30)
    assert str(error.value) == (
        "this scaling cannot be used:"
        "\n  - warmup is 30 steps, but with rate 'none' there is nothing to rise to; use rate linear or sqrt,"
        " or set optimizer.learning_rate.warmup to 30"
    )
    with pytest.raises(ValueError, match="scaled to 0 replicas; use 1 or more"):
        scale_run(RUN, Scaling(batch=True), 0)
