"""Measured steps beside predicted ones: which phase is named for runs that are slow for a known reason."""

from collections.abc import Mapping

import pytest

from shardtrain import cli
from shardtrain.plan.advice.bottleneck import differences, step_phases
from shardtrain.report.speed import speed_text

PREDICTED = {
    "compute_seconds": 0.08,
    "bubble_seconds": 0.0,
    "collectives_seconds": 0.01,
    "update_seconds": 0.01,
    "islands_seconds": 0.02,
}


def lines(more: Mapping[str, float] = {}, number: int = 8):
    """Lines of metrics, of 10 steps each, of a run that is as fast as predicted but for what is given."""
    usual = {"seconds/input": 0.0, "seconds/step": 1.0, "seconds/islands": 0.2, "seconds/other": 0.0}
    found = [{"step": 10.0 * (i + 1), **usual, **more} for i in range(number)]
    found[0]["seconds/step"] = 60.0  # compiling
    return found


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"seconds/input": 3.0}, "input 300 ms"),
        ({"seconds/step": 2.0}, "step 100 ms"),
        ({"seconds/islands": 1.2}, "islands 100 ms"),
        ({"seconds/stages": 0.5}, "stages 50 ms"),
        ({"seconds/save": 0.4}, "save 40 ms"),
        ({"seconds/step": 0.5}, "less step 50 ms"),
    ],
)
def test_the_phase_that_takes_longer_than_predicted_is_named(more, named):
    text = speed_text(lines(more), PREDICTED)
    assert text is not None
    assert f"most of the difference: {named} (" in text


def test_the_predicted_parts_are_those_of_the_run():
    phases = step_phases(lines())
    assert phases is not None
    assert phases.total == pytest.approx(sum(PREDICTED.values()))
    assert max(map(abs, differences(phases, PREDICTED).values())) < 1e-12


def test_a_rank_that_works_longest_is_named():
    own = {"own_seconds/0": 0.1, "own_seconds/1": 0.2, "own_seconds/2": 0.1}
    text = speed_text(lines({**own, "seconds/islands": 1.2}), PREDICTED)
    assert text is not None
    assert text.endswith("rank 1 works longest, 200 ms a step")
    assert "works longest" not in str(speed_text(lines(dict.fromkeys(own, 0.1)), PREDICTED))


def test_a_compilation_in_the_middle_and_evaluations_change_nothing():
    found = lines({"seconds/evaluation": 5.0})
    found[4]["seconds/step"] = 90.0
    assert speed_text(found, PREDICTED) == speed_text(lines(), PREDICTED)


def test_a_single_line_says_nothing():
    assert speed_text(lines(number=1), PREDICTED) is None
    assert speed_text([], {}) is None


def test_a_past_run_is_judged_by_its_folder(tmp_path, capsys):
    metrics = tmp_path / "metrics.jsonl"
    text = "".join(f'{{"step": {n}, "seconds/step": 1.0, "seconds/input": 4.0}}\n' for n in (10, 20, 30))
    metrics.write_text(text)
    assert cli.main(["advise", "speed", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "measured 500 ms a step, no prediction; longest work outside the step: input 400 ms (waiting for"
        " batches)\n"
    )
    (tmp_path / "strategy.toml").write_text("[predicted]\ncompute_seconds = 0.05\n")
    assert cli.main(["advise", "speed", str(tmp_path)]) == 0
    assert "predicted 50 ms (10.00 times); most of the difference: input" in capsys.readouterr().out
    (tmp_path / "strategy.toml").write_text('[predicted]\ncompute = 0.05\nupdate_seconds = "1"\n')
    assert cli.main(["advise", "speed", str(tmp_path)]) == 2
    problem = capsys.readouterr().err
    assert "predicted has 'compute' (did you mean 'compute_seconds'?)" in problem
    assert "predicted.update_seconds is '1'; use seconds, 0 or more" in problem
    metrics.write_text(text.splitlines()[0] + "\n")
    (tmp_path / "strategy.toml").unlink()
    assert cli.main(["advise", "speed", str(tmp_path)]) == 2
    assert "fewer than two measured lines" in capsys.readouterr().err
