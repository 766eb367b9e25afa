"""Advice: each formula against what it was derived from, simulated or computed in another way."""

import json
import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from shardtrain import cli
from shardtrain.plan.advice.checkpoint_interval import daly_interval, estimate_seconds, young_interval
from shardtrain.plan.advice.efficiency import compute_most_devices, compute_speedup
from shardtrain.plan.advice.noise_scale import gradient_noise, rate_factor, steps_factor
from shardtrain.plan.advice.revocable import RevocableRun, best_hosts, compute_outcome, simulate_outcome

RUN = RevocableRun(
    hosts=4,
    work_seconds=36000,
    interval_seconds=1800,
    save_seconds=60,
    host_life_seconds=40000,
    replace_seconds=600,
    price_per_hour=2.0,
)
SHORT = replace(RUN, work_seconds=7200, interval_seconds=300, save_seconds=10)


@pytest.mark.parametrize("overhead", [0.001, 0.02, 0.1, 1.0])
@pytest.mark.parametrize("efficiency", [0.5, 0.8, 0.95])
def test_the_number_of_devices_is_the_last_that_is_efficient(overhead, efficiency):
    """The speedup is counted from the time of a step: computation shared, overhead not."""
    most = int(compute_most_devices(overhead, efficiency))
    achieved = [(1 + overhead) / (1 / n + overhead) / n for n in (most, most + 1)]
    assert achieved[0] >= efficiency - 1e-9 or most == 1
    assert achieved[1] < efficiency
    assert compute_speedup(overhead, most) == pytest.approx(most * achieved[0])


def test_the_noise_scale_of_known_gradients_is_found():
    """Gradients of examples are drawn with a known mean and variance."""
    draw, dims, noise = np.random.default_rng(0), 20, 3.0
    gradient = np.full(dims, 0.5)

    def mean_square(batch):
        # the mean over a batch is drawn directly: normal, with the variance over the batch
        found = gradient + draw.normal(0, noise / math.sqrt(batch), (20000, dims))
        return float((found**2).sum(axis=1).mean())

    found = gradient_noise(8, mean_square(8), 64, mean_square(64))
    assert found.gradient_square == pytest.approx(dims * 0.25, rel=0.03)
    assert found.scale == pytest.approx(dims * noise**2 / (dims * 0.25), rel=0.03)


def test_one_step_gets_nearest_to_the_least_loss_with_the_advised_rate():
    """A quadratic loss: the best rate of a noisy step is searched, and its ratio for two batches compared."""
    noise_scale, rates = 50.0, np.linspace(0.001, 1.2, 5000)

    def best_rate(batch):
        # E loss(x - e g) = (1 - e)^2 / 2 |G|^2 + e^2 / 2 tr / B, with |G|^2 = 1, curvature 1
        return rates[np.argmin((1 - rates) ** 2 + rates**2 * noise_scale / batch)]

    assert best_rate(200) / best_rate(10) == pytest.approx(rate_factor(10, 200, noise_scale), rel=0.01)
    assert steps_factor(noise_scale, noise_scale) == 2


@pytest.mark.parametrize(("save", "failure"), [(300, 86400), (60, 21600), (30, 3600), (300, 900)])
def test_dalys_interval_is_the_best(save, failure):
    intervals = np.geomspace(save / 5, 20 * failure, 4000)
    least = min(estimate_seconds(1e7, float(each), save, failure, 600) for each in intervals)
    daly = estimate_seconds(1e7, daly_interval(save, failure), save, failure, 600)
    young = estimate_seconds(1e7, young_interval(save, failure), save, failure, 600)
    assert daly <= least * 1.002
    assert daly <= young <= least * 1.25


OUTCOMES = [
    *(
        (replace(RUN, others=others, hosts=hosts, work_seconds=144000 / hosts), 0.02)
        for others, hosts in product(("wait", "continue"), (1, 3, 8))
    ),
    # a replacement takes as long as, or longer than, it takes until the next host is lost
    *(
        (replace(SHORT, hosts=hosts, host_life_seconds=600 * hosts, replace_seconds=seconds), 0.03)
        for hosts, seconds in ((1, 600), (4, 1500), (2, 900))
    ),
]


@pytest.mark.parametrize(("run", "near"), OUTCOMES)
def test_expected_outcomes_are_those_of_simulated_runs(run, near):
    expected, simulated = compute_outcome(run), simulate_outcome(run, 1500, seed=run.hosts)
    assert simulated.seconds == pytest.approx(expected.seconds, rel=near)
    assert simulated.revocations == pytest.approx(expected.revocations, rel=0.06)
    assert simulated.cost == pytest.approx(expected.cost, rel=near)
    assert run.hosts - 1 < expected.cost / (run.price_per_hour * expected.seconds / 3600) <= run.hosts
    assert simulate_outcome(run, 20, seed=1) == simulate_outcome(run, 20, seed=1)


def test_a_short_run_is_saved_once_and_a_long_step_is_said(capsys):
    words = "interval --save-seconds 300 --failure-hours 24 --work-hours 1 --step-seconds 10"
    assert cli.main(["advise", *words.split()]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines() if "order" in line]
    assert len(rows) == 2
    assert all("once, at the end" in [cell.strip() for cell in row] for row in rows)
    words = "interval --save-seconds 1 --failure-hours 1 --step-seconds 600"
    assert cli.main(["advise", *words.split()]) == 0
    shown = capsys.readouterr().out
    assert "a step takes 10m00s, longer than an interval of 1m24s: more than one save a step" in shown
    assert shown.count("10m00s") == 3


def test_without_revocations_a_run_takes_its_work_and_its_saves():
    run = replace(RUN, host_life_seconds=1e15)
    for others in ("wait", "continue"):
        found = compute_outcome(replace(run, others=others))
        assert found.seconds == pytest.approx(36000 + 20 * 60, rel=1e-6)
        assert found.cost == pytest.approx(4 * 2.0 * 37200 / 3600, rel=1e-6)
    # the others work on: that is never slower than waiting for a new host and working again
    waits, continues = (compute_outcome(replace(RUN, others=others)) for others in ("wait", "continue"))
    assert continues.seconds < waits.seconds
    assert [count for count, _ in best_hosts(RUN, [2, 8])] == [2, 8]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("interval --save-seconds 300 --failure-hours 24", "1h56m"),
        ("batch --small 16 --small-norm 7.141428 --large 64 --large-norm 3.674235", "scale 800"),
        (
            "revocable --hosts 2 --work-hours 1 --save-minutes 20 --save-seconds 9 --life-hours 9",
            "2, simulated",
        ),
    ],
)
def test_each_question_is_answered(words, shown, capsys):
    assert cli.main(["advise", *words.split()]) == 0
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "interval --save-seconds 0 --failure-hours nan",
            "an interval was asked for:\n  - --save-seconds is 0; use a finite number above 0\n"
            "  - --failure-hours is nan; use a finite number above 0",
        ),
        (
            "interval --save-seconds 3 --failure-hours -6 --step-seconds 0",
            "  - --failure-hours is -6; use a finite number above 0\n  - --step-seconds is 0; use",
        ),
        (
            "revocable --hosts 2 --work-hours 1 --save-minutes 9 --save-seconds 9 --life-hours 9 --compare 0",
            "--compare, number 1, is 0; use a finite number above 0",
        ),
        (
            "batch --small 16 --small-norm 7 --large 64 --large-norm 3 --learning-rate -1",
            "--learning-rate is -1; use a finite number above 0",
        ),
        ("batch --small 64 --small-norm 1 --large 16 --large-norm 1", "batches of 64 and 16; give two"),
        ("devices --overhead 0.1", "no question 'devices' any more; use shardtrain plan RUN --advise: eff"),
        ("intervals", "there is no question 'intervals' (did you mean 'interval'?)"),
    ],
)
def test_wrong_numbers_are_refused(words, problem, capsys):
    assert cli.main(["advise", *words.split()]) == 2
    assert problem in capsys.readouterr().err


def test_a_run_that_makes_no_progress_never_ends(capsys):
    run = replace(RUN, hosts=1000, host_life_seconds=1000, save_seconds=1e5)
    assert compute_outcome(run).seconds == math.inf
    with pytest.raises(ValueError, match="a simulation of 200 runs was asked for: inf revocations"):
        simulate_outcome(run)
    words = "revocable --hosts 9 --work-hours 1e6 --save-minutes 1e6 --save-seconds 9 --life-hours 0.1"
    assert cli.main(["advise", *words.split()]) == 0
    assert "never ends" in capsys.readouterr().out


def test_a_batch_is_advised_from_a_run_folder(tmp_path, capsys):
    """The newer half of the steps counts, each line by its steps, and numerator and denominator are apart."""
    lines = [(10, 9.0, 1.0, 32.0), (20, 1.0, 300.0, 64.0), (25, 2.0, 900.0, 64.0), (40, 3.0, 1400.0, 64.0)]
    names = ("step", *(f"train/gradient_{name}" for name in ("square", "trace", "batch")))
    lines = [dict(zip(names, line, strict=True)) for line in lines]
    lines.insert(2, {"step": 22, "train/loss": 1.0})
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert cli.main(["advise", "batch", "--run", str(tmp_path), "--learning-rate", "0.001"]) == 0
    # step 25 stands for the 3 steps since 22, and step 40 for 15
    scale = (3 * 900 + 15 * 1400) / (3 * 2 + 15 * 3)
    found = capsys.readouterr().out
    assert f"gradient noise scale {scale:.4g}: the critical batch" in found
    assert any(
        line.split()[0] == "64" and line.split()[-2:] == ["0.001", "now"] for line in found.splitlines()[3:-1]
    )


def test_a_batch_is_asked_for_in_one_way(tmp_path, capsys):
    for words in ([], ["--run", str(tmp_path), "--small", "3"], ["--small", "3", "--large", "9"]):
        assert cli.main(["advise", "batch", *words]) == 2
        assert (
            "give either --run, the folder of a run, or all four of --small, --small-norm"
            in capsys.readouterr().err
        )
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    assert cli.main(["advise", "batch", "--run", str(tmp_path)]) == 2
    assert "train with --gradient-noise-scale" in capsys.readouterr().err
