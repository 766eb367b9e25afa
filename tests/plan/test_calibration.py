"""Constants of a machine are found again from the times that it predicts; probes differ."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fine_tuning import Numbers, run_of
from saved_decoder import save
from tiny_language_model import TinyConfig

from shardtrain import cli
from shardtrain.islands.cluster import IslandKind
from shardtrain.plan.calibration import choose_spread, fit_rates
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.space import Space, list_allowed_choices
from shardtrain.trainer.planned import make_subjects

DEVICES = 8
SPACE = Space(accumulates=(1, 4), remats=("none", "full"))
START = Machine(
    rates=Rates(flops_per_second=1e9, memory_bytes_per_second=1e9, kernel_seconds=1e-5),
    device_link=Link(bytes_per_second=1e9, latency_seconds=1e-5),
)


@pytest.fixture(scope="module")
def subject():
    run = run_of(TinyConfig(num_layers=4, embed=64, mlp=256), batch=32)
    (found,) = make_subjects(run, Numbers(), [IslandKind(kind="here", devices=DEVICES)])
    return found


def test_a_fit_finds_the_times_of_another_machine(subject):
    link = Link(bytes_per_second=3e8, latency_seconds=4e-5)
    rates = Rates(flops_per_second=3e9, memory_bytes_per_second=5e8, kernel_seconds=3e-5)
    true = replace(START, rates=rates, device_link=link)
    every, _ = list_allowed_choices(subject, DEVICES, SPACE)
    probes = [every[i] for i in choose_spread(predict_choices(subject, START, DEVICES, every), 4)]

    def seconds(machine, choices=probes):
        return [each.seconds.total for each in predict_choices(subject, machine, DEVICES, choices)]

    found = fit_rates(START, seconds, seconds(true))
    assert max(abs(math.log(x)) for x in found.before) > 0.5
    assert max(abs(math.log(x)) for x in found.after) < 0.06
    assert max(abs(math.log(x)) for x in found.left_out) < 0.5
    # also of the ways that were no probes
    others = [choice for choice in every if choice not in probes]
    ratios = np.array(seconds(found.machine, others)) / np.array(seconds(true, others))
    before = np.array(seconds(START, others)) / np.array(seconds(true, others))
    assert np.median(np.abs(np.log(ratios))) < 0.1 < np.median(np.abs(np.log(before)))


def test_probes_differ_and_are_no_slow_ones(subject):
    every, _ = list_allowed_choices(subject, DEVICES, SPACE)
    predicted = predict_choices(subject, START, DEVICES, every)
    chosen = choose_spread(predicted, 6)
    totals = [each.seconds.total for each in predicted]
    assert len(set(chosen)) == 6
    assert totals[chosen[0]] == min(totals)
    assert max(totals[i] for i in chosen) <= 4 * min(totals)
    axes = {axis for i in chosen for axis, size in every[i].layout.mesh.items() if size > 1}
    assert len(axes) >= 3
    assert len(choose_spread(predicted, 10_000)) <= len(every)


def test_a_fit_needs_two_steps():
    with pytest.raises(ValueError, match="1 steps were measured"):
        fit_rates(START, lambda machine: [1.0], [1.0])


RUN = """
from fine_tuning import run_of
from tiny_language_model import TinyConfig

def run():
    return run_of(TinyConfig(num_layers=2))
"""


@pytest.mark.full
def test_calibrate_measures_steps_of_a_run_and_prints_a_device_for_a_cluster_file(tmp_path, capsys):
    (tmp_path / "run.py").write_text(RUN)
    assert cli.main(["calibrate", f"{tmp_path}/run.py", "--probes", "2"]) == 0
    out = capsys.readouterr().out
    assert out.count(" ms; ") == 2
    names = ("teraflops", "memory_gb_per_second", "kernel_us", "link_gb_per_second", "latency_us")
    values = {name: float(out.partition(f"\n{name} = ")[2].partition("\n")[0]) for name in names}
    assert all(0 < value < math.inf for value in values.values())
    assert out.endswith("\nsimulated = true\n")
    assert cli.main(["calibrate", f"{tmp_path}/run.py", "--probes", "1"]) == 2
    assert "--probes is 1; use 2 or more" in capsys.readouterr().err


def past_run(folder, seconds, devices: Any = DEVICES, embed: Any = 8, **options):
    """The folder of a run whose steps took so long: a checkpoint, metrics of five lines, its devices."""
    save(folder, TinyConfig(num_layers=2, embed=embed), batch=8, **options)
    lines = [{"step": 10 * (i + 1), "seconds/step": seconds, "seconds/input": 0.5} for i in range(5)]
    lines = [{**line, "updates_per_second": 1 / (seconds + 0.5)} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = {"ranks": [{"devices": [{"platform": "cpu", "kind": "cpu", "number": devices}]}]}
    (folder / "environment.jsonl").write_text(json.dumps(record) + "\n")


def test_calibrate_takes_the_steps_of_past_runs(tmp_path, capsys):
    (tmp_path / "run.py").write_text(RUN)
    mesh = "strategy.layout.mesh."
    past_run(tmp_path / "data", 0.004, **{f"{mesh}data": 8})
    past_run(tmp_path / "mixed", 0.007, **{f"{mesh}data": 2, f"{mesh}fsdp": 4, "strategy.accumulate": 1})
    folders = [str(tmp_path / name) for name in ("data", "mixed")]
    command = ["calibrate", f"{tmp_path}/run.py", "--probes", "0", "--past"]
    assert cli.main([*command, *folders]) == 0
    out = capsys.readouterr().out
    (step,) = [line for line in out.splitlines() if "--mesh data=2,fsdp=4" in line]
    assert str(tmp_path / "mixed") in step
    ratios = [float(x) for x in step.rpartition(" ms; ")[2].split(", ")]
    # what the metrics say was fitted: the prediction is nearer than it was
    assert abs(math.log(ratios[1])) < abs(math.log(ratios[0]))
    assert "teraflops = " in out
    past_run(tmp_path / "other", 0.1, devices=4, **{f"{mesh}data": 4})
    past_run(tmp_path / "wide", 0.1, embed=16, **{f"{mesh}data": 8})
    past_run(tmp_path / "narrow", 0.1, **{f"{mesh}data": 8, "strategy.compute_dtype": "bfloat16"})
    past_run(tmp_path / "odd", 0.1, **{f"{mesh}data": "8"})
    others = [str(tmp_path / name) for name in ("other", "wide", "narrow", "odd")]
    assert cli.main([*command, *others, str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "it ran on 4 devices of kind cpu, and this machine has 8 of kind cpu" in err
    assert "model.embed was 16, and is 8; give runs of this model and batch" in err
    assert "strategy.compute_dtype was 'bfloat16', and is None; give runs of this model and batch" in err
    assert "its checkpoint has no whole numbers: strategy.layout.mesh.data is '8'" in err
    assert "metrics.jsonl; give the folder of a run" in err
