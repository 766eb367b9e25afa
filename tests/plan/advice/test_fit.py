"""Predictions from rows: known laws are found, real rows of unseen models predicted, wrong files refused."""

from pathlib import Path

import pytest

from shardtrain import cli
from shardtrain.plan.advice.fit import (
    QUANTITIES,
    MeasuredRow,
    error_by_model,
    fit,
    fits,
    read_rows,
)

# throughput of MPT models of 0.8 to 70 billion parameters on 8 to 64 H100, 2,048 tokens: llm-foundry's table
H100 = Path(__file__).parent / "h100_rows.csv"


def test_a_law_of_two_kinds_of_devices_is_found():
    def seconds(kind, work, devices, mb, operations):
        base, rate = {"a": (0.1, 0.02), "b": (0.3, 0.005)}[kind]
        sent = 2 * mb * (devices - 1) / devices
        return base + rate * work / devices + 0.001 * sent + 2e-5 * operations

    rows = [
        MeasuredRow(
            model=f"m{work}",
            device=kind,
            devices=devices,
            teraflops=work,
            operations=operations,
            parameter_mb=10 * work**0.5,
            step_seconds=seconds(kind, work, devices, 10 * work**0.5, operations),
        )
        for kind in "ab"
        for work, operations in ((10.0, 900.0), (40.0, 300.0), (90.0, 2000.0), (200.0, 500.0))
        for devices in (1, 2, 8)
    ]
    found = fits(QUANTITIES[0], rows)
    assert found["a"].coefficients == pytest.approx((0.1, 0.02, 0.001, 2e-5))
    assert found["b"].coefficients == pytest.approx((0.3, 0.005, 0.001, 2e-5))
    assert max(error_by_model(QUANTITIES[0], rows).values()) < 1e-6


def test_no_coefficient_is_negative():
    found = fit([(1, 1.0), (1, 2.0), (1, 3.0)], [3.0, 2.0, 1.0])
    assert min(found.coefficients) >= 0


def test_real_rows_of_a_model_that_was_left_out_are_predicted():
    errors = error_by_model(QUANTITIES[0], read_rows(H100))
    assert set(errors) == {"70b", "30b", "13b", "7b", "3b", "1b", "760m"}
    assert sum(errors.values()) / len(errors) < 0.15


def test_rows_answer_on_the_command_line(capsys):
    words = ["advise", "predict", str(H100), "--device", "H100", "--devices", "16", "--teraflops", "20000"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "error on a model that was left out" in text
    assert "predicted step_seconds: 2.7" in text


def test_wrong_rows_are_refused(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    path.write_text("model,device,step_second\n")
    assert cli.main(["advise", "predict", str(path)]) == 2
    assert "unknown column 'step_second' (did you mean 'step_seconds'" in capsys.readouterr().err
    path.write_text("model,device,devices,step_seconds\na,b,1.5,2\n,b,2,-1\n")
    assert cli.main(["advise", "predict", str(path)]) == 2
    problem = capsys.readouterr().err
    assert "line 2: devices is '1.5'; use a whole number from 1" in problem
    assert "line 3 has no model" in problem
    assert "line 3: step_seconds is '-1'; use a number above 0, or nothing" in problem
    path.write_text("model,device,step_seconds\na,b,1\n")
    assert cli.main(["advise", "predict", str(path)]) == 2
    assert "nothing can be predicted from 1 rows: step_seconds needs teraflops" in capsys.readouterr().err
