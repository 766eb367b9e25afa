"""The arithmetic of the benchmark of waves."""

from dataclasses import replace

import pytest

from shardtrain.islands.parameter_shard import Event
from shardtrain.trainer.waves import WaveLog


@pytest.fixture
def benchmark_of_waves(script):
    return script("waves")


def test_staleness_is_that_of_the_island_furthest_ahead_when_it_pulled(benchmark_of_waves, tmp_path):
    options = benchmark_of_waves.Options()
    assert benchmark_of_waves.find_staleness(tmp_path, 2, options) is None
    for shard in range(2):
        log = WaveLog(tmp_path, shard, print)
        log.begin(0)
        # island 1 pulls after two waves, while island 0 has pushed one
        for island, step in [(1, 4), (0, 4), (1, 8)]:
            log.write(Event("push", island, step))
        log.write(Event("pull", 1, 8))
        log.write(Event("push", 1, 12))
        log.close()
    assert benchmark_of_waves.find_staleness(tmp_path, 2, options) == 4 + 3
    # batches in flight were started before their pipeline pulled
    for shard in (2, 3):
        log = WaveLog(tmp_path, shard, print)
        log.begin(0)
        log.close()
    assert benchmark_of_waves.find_staleness(tmp_path, 4, replace(options, num_stages=2), 3) == 4 + 3 + 2


def test_a_pipeline_pauses_in_the_same_steps_whatever_its_microbatches(benchmark_of_waves, monkeypatch):
    options = benchmark_of_waves.Options(steps=20, chance=0.5)
    slept, waited = {}, []
    for microbatches in (1, 3):
        slept[microbatches] = seconds = []
        pauses = benchmark_of_waves.Pauses(
            options, 1, microbatches, lambda seconds=seconds: waited.append(len(seconds))
        )
        monkeypatch.setattr(benchmark_of_waves.time, "sleep", seconds.append)
        for _ in range(20):
            before = len(seconds)
            for _ in range(microbatches):
                pauses()
            seconds[before:] = [len(seconds) - before]
    assert slept[1] == slept[3]
    assert {0, 1} == set(slept[1])
    # before the second step, from which on seconds count
    assert waited == [1, 1]


def test_losses_at_equal_time_are_those_when_the_quickest_way_ended(benchmark_of_waves):
    slow = benchmark_of_waves.Result(
        "every-step", 2.0, 0.2, 0.5, None, [(1, 0.0, 4.0), (2, 10.0, 3.0), (3, 20.0, 2.0)]
    )
    quick = benchmark_of_waves.Result("wsp", 2.1, 0.1, 0.1, 7, [(1, 0.0, 4.0), (2, 10.0, 2.4)])
    text = benchmark_of_waves.table([slow, quick], (2.5,))
    assert "training loss after 10 s | ratio | steps to 2.5 | s to 2.5" in text
    assert "| every-step | 2.0000 | 1.0000 | 0.2000 | 1.00 | 50% |  | 3.0000 | 1.0000 | 3 | 20.0 |" in text
    assert "| wsp | 2.1000 | 1.0500 | 0.1000 | 0.50 | 10% | 7 | 2.4000 | 0.8000 | 2 | 10.0 |" in text
