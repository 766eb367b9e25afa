"""The peak memory of ranks: what is measured, and the line about it."""

import subprocess
import sys

import pytest

from shardtrain.train_step.stage_links import PipelineGrid
from shardtrain.trainer.usage import PeakMemory, measure_peak_memory, memory_text

MIB = 1 << 20


class Device:
    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


def test_devices_that_tell_their_peak_are_believed():
    devices = [Device({"peak_bytes_in_use": 3 * MIB}), Device({"peak_bytes_in_use": 5 * MIB}), Device(None)]
    assert measure_peak_memory(devices) == PeakMemory(5 * MIB, True)
    assert measure_peak_memory([Device(None)]).of_device is False


def test_the_peak_of_a_process_has_what_it_has_freed():
    program = (
        "from shardtrain.system.host import peak_resident_bytes\n"
        "before = peak_resident_bytes()\n"
        "memory = bytearray(b'x') * (64 << 20)\n"
        "del memory\n"
        "print(before, peak_resident_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 56 * MIB < after - before < 80 * MIB


def test_the_memory_of_the_program_that_started_a_process_is_not_counted():
    program = (
        "from shardtrain.system.host import peak_resident_bytes\n"
        "print(peak_resident_bytes())\n"
        "memory = bytearray(b'x') * (32 << 20)\n"
        "print(peak_resident_bytes())\n"
        "more = bytearray(b'x') * (160 << 20)\n"
        "print(peak_resident_bytes())"
    )
    starter = (
        "import subprocess, sys\n"
        "memory = bytearray(b'x') * (128 << 20)\n"
        f"subprocess.run([sys.executable, '-c', {program!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, text=True, check=True)
    before, below, above = map(int, done.stdout.split())
    assert before < 64 * MIB
    assert 24 * MIB < below - before < 48 * MIB
    assert 184 * MIB < above - before < 208 * MIB


@pytest.mark.parametrize(
    ("num_islands", "num_stages", "text"),
    [
        (2, None, "rank 0 1.0 MiB, rank 1 2.0 MiB"),
        (2, 2, "stage 0 1.0 MiB, stage 1 2.0 MiB"),
        (
            4,
            2,
            "stage 0 of pipeline 0 1.0 MiB, stage 1 of pipeline 0 2.0 MiB,"
            " stage 0 of pipeline 1 3.0 MiB, stage 1 of pipeline 1 4.0 MiB",
        ),
        (20, None, "rank 19 20.0 MiB, the most of 20 ranks"),
    ],
)
def test_the_line_names_every_rank_or_the_one_with_most(num_islands, num_stages, text):
    grid = (
        None if num_stages is None else PipelineGrid(num_islands=num_islands, num_stages=num_stages, island=0)
    )
    peaks = [[(rank + 1) * MIB, False] for rank in range(num_islands)]
    assert memory_text(peaks, grid) == f"peak memory of the process: {text}"
