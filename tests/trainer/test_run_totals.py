"""Metrics of every line: updates per second, the wall time over all starts, the share of clipped updates."""

import itertools
from dataclasses import replace

import pytest
from quiet_training import train_quietly
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import Text
from shardtrain.optim.optimizer import Optimizer
from shardtrain.sharding.layout import Layout
from shardtrain.trainer import train as training
from shardtrain.trainer.config import Run, Strategy
from shardtrain.trainer.usage import RunTotals

ONE_DEVICE = pytest.mark.usefixtures("one_device")


@pytest.fixture
def run(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(97, 122)) * 40)
    return Run(
        model=TinyConfig(), data=Text(paths=(text,), seq=8), batch=8, steps=5, log_every=2,
        run_dir=tmp_path / "run",
    )  # fmt: skip


def train(run):
    _, printed, lines = train_quietly(run)
    return lines, printed


@ONE_DEVICE
def test_wall_time_is_the_sum_of_all_starts(run, monkeypatch):
    # a clock that each call advances by a second, and that begins elsewhere in every start
    monkeypatch.setattr(training, "RunTotals", lambda: RunTotals(itertools.count(1000.0).__next__))
    first, printed = train(run)
    assert [line["step"] for line in first] == [2, 4, 5]
    assert [line["wall_seconds"] for line in first] == [1.0, 2.0, 3.0]
    assert "\n5 steps in " in printed
    lines, printed = train(replace(run, steps=9))
    # the last step was saved after its line
    assert [line["wall_seconds"] for line in lines] == [1.0, 2.0, 3.0, 5.0, 6.0, 7.0]
    assert "\n9 steps in " in printed
    assert "; this start: 4 updates, " in printed
    assert all(line["updates_per_second"] > 0 for line in lines if line["step"] not in (2, 6))


@ONE_DEVICE
@pytest.mark.parametrize(("clip", "share"), [(1e-6, 1.0), (None, None)])
def test_the_share_of_clipped_updates_is_in_every_line(clip, share, run):
    lines, printed = train(replace(run, optimizer=Optimizer(clip=clip)))
    assert [line.get("clipped") for line in lines] == [share] * 3
    assert ("% clipped" in printed) == (share is not None)


@ONE_DEVICE
def test_the_share_is_over_the_updates_since_the_last_line(run):
    every, _ = train(replace(run, log_every=1))
    # between the norms of the first two steps: one of them is clipped
    norms = [line["grad_norm"] for line in every]
    clip = sum(norms[:2]) / 2
    other = replace(run, run_dir=run.run_dir.with_name("other"), optimizer=Optimizer(clip=clip))
    assert train(other)[0][0]["clipped"] == 0.5


@pytest.mark.full
def test_with_deltas_each_replica_clips_and_no_share_is_known(run):
    strategy = Strategy(
        layout=Layout(mesh={"data": 2, "fsdp": -1}), synchronisation=Synchronisation(on="deltas")
    )
    lines, _ = train(replace(run, strategy=strategy))
    assert all("clipped" not in line for line in lines)
