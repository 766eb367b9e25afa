"""The arithmetic of the benchmark of waves."""

import pytest

from shardtrain.islands.parameter_shard import Event
from shardtrain.trainer.waves import WaveLog


@pytest.fixture
def benchmark_of_waves(script):
    return script("waves")


def test_staleness_is_that_of_the_island_furthest_ahead_when_it_pulled(benchmark_of_waves, tmp_path):
    assert benchmark_of_waves.find_staleness(tmp_path) is None
    for shard in range(2):
        log = WaveLog(tmp_path, shard, print)
        log.begin(0)
        # island 1 pulls after two waves, while island 0 has pushed one
        for island, step in [(1, 4), (0, 4), (1, 8)]:
            log.write(Event("push", island, step))
        log.write(Event("pull", 1, 8))
        log.write(Event("push", 1, 12))
        log.close()
    assert benchmark_of_waves.find_staleness(tmp_path) == 4 + 3


def test_an_island_pauses_in_the_steps_that_its_seed_says_and_waits_once(benchmark_of_waves, monkeypatch):
    options = benchmark_of_waves.Options(steps=20, chance=0.5)
    slept, waited = {}, []
    for run, island in enumerate((1, 1, 0)):
        slept[run] = seconds = []
        pauses = benchmark_of_waves.Pauses(
            options, island, lambda seconds=seconds: waited.append(len(seconds))
        )
        monkeypatch.setattr(benchmark_of_waves.time, "sleep", seconds.append)
        for _ in range(20):
            before = len(seconds)
            pauses()
            seconds[before:] = [len(seconds) - before]
    assert slept[0] == slept[1] != slept[2]
    assert {0, 1} == set(slept[1])
    # in the second step, from which on seconds count
    assert waited == [1, 1, 1]


def test_losses_at_equal_time_are_those_when_the_quickest_way_ended(benchmark_of_waves):
    curves = [(0.0, 4.0), (10.0, 3.0), (20.0, 2.0)], [(0.0, 4.0), (10.0, 2.4)]
    slow = benchmark_of_waves.Result("every-step", 2.0, 0.2, 0.5, None, curves[0])
    quick = benchmark_of_waves.Result("waves", 2.1, 0.1, 0.1, 7, curves[1])
    text = benchmark_of_waves.table([slow, quick])
    assert "training loss after 10 s | ratio |" in text
    assert "| every-step | 2.0000 | 1.0000 | 0.2000 | 1.00 | 50% |  | 3.0000 | 1.0000 |" in text
    assert "| waves | 2.1000 | 1.0500 | 0.1000 | 0.50 | 10% | 7 | 2.4000 | 0.8000 |" in text
