"""Values that merge, rates by a fake clock, and sinks read back from the disk."""

import json
import math
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.record_writer import masked_crc32c

from shardtrain.report.metrics import Mean, Rate
from shardtrain.report.sinks.json_lines import JsonLines, read_jsonl
from shardtrain.report.sinks.sink import Sinks
from shardtrain.report.sinks.tensorboard import TensorBoard


@given(st.lists(st.integers(-1000, 1000), min_size=1, max_size=20), st.data())
def test_uneven_parts_give_the_mean_of_all(values, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=4)))
    parts = [values[low:high] for low, high in zip([0, *cuts], [*cuts, len(values)], strict=True)]
    merged = sum((Mean(sum=sum(part), count=len(part)) for part in parts), Mean())
    assert merged.value == sum(values) / len(values)


def rate_of(*marks, **options):
    rate = Rate(**options)
    for now_seconds, units in marks:
        rate.add(now_seconds=now_seconds, units=units)
    return rate


def test_the_rate_leaves_out_the_step_that_compiles():
    assert rate_of().per_second is None
    assert rate_of((100.0, 64)).per_second is None
    assert rate_of((100.0, 64), (102.0, 64)).per_second == 32.0
    assert rate_of((100.0, 64), (102.0, 64), (103.0, 256)).per_second == (64 + 256) / 3


def test_the_rate_slides_over_its_window():
    rate = rate_of((0.0, 9.0), (1.0, 1000.0), (2.0, 10.0), (4.0, 20.0), window_steps=2)
    assert rate.per_second == (10 + 20) / (4 - 1)


def test_a_pause_is_not_counted():
    rate = rate_of((0.0, 1), (1.0, 10))
    rate.pause(5.0)
    rate.add(now_seconds=7.0, units=10)
    assert rate.per_second == 10.0


def write_steps(sink, steps, **values):
    for step in steps:
        sink.write(step, {"train/loss": 10.0 / step, **values})
    sink.close()


def test_what_is_not_finite_is_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, resume_after=None)
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    sink.close()

    def refuse(constant):
        raise AssertionError(constant)

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    (back,) = read_jsonl(path)
    assert math.isnan(back["a"])
    assert (back["b"], back["c"]) == (math.inf, -math.inf)


def test_null_reads_as_nan(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": null}\n')
    assert math.isnan(read_jsonl(path)[0]["train/loss"])


@pytest.mark.parametrize(
    "torn", ['{"step": 3, "train/l', '{"step": 3, "train/loss": 2.5', '{"st\n', "\0\0\0\0"]
)
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonLines(path, resume_after=None), [1, 2])
    with path.open("a") as file:
        file.write(torn)
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]
    write_steps(JsonLines(path, resume_after=5), [6])
    assert [record["step"] for record in read_jsonl(path)] == [1, 2, 6]


def test_a_last_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "train/loss": 2.5}')
    write_steps(JsonLines(path, resume_after=1), [2])
    assert [record["step"] for record in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"train/loss": 1.0}', '{"step": 2, "train/loss": "x"}'])
def test_a_broken_line_in_the_middle_is_named_and_the_file_left(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        JsonLines(path, resume_after=3)
    assert str(error.value) == (
        f"metrics were read from {path}, but line 2 is not a record. Each line is one JSON object"
        " with an integer 'step' and numbers; only the last may be incomplete. Delete line 2, or move the"
        " file away."
    )
    assert path.read_text() == text


def test_a_crash_while_cutting_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write_steps(JsonLines(path, resume_after=None), range(1, 8))
    before = path.read_text()

    def crash(file):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        JsonLines(path, resume_after=4)
    assert path.read_text() == before


def test_a_metric_named_step_is_refused(tmp_path):
    sink = JsonLines(tmp_path / "metrics.jsonl", resume_after=None)
    with pytest.raises(ValueError) as error:
        sink.write(1, {"step": 2.0})
    sink.close()
    assert str(error.value) == (
        "a metric named 'step' was written, but each line has that key. Give it another name."
    )


def read_events(path):
    """Read a record file: length, its checksum, the bytes, their checksum."""
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        body = data[12 : 12 + length]
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        assert struct.unpack("<I", data[12 + length : 16 + length]) == (masked_crc32c(body),)
        events.append(Event.FromString(body))
        data = data[16 + length :]
    return events


def scalars(events):
    return [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]


def test_a_resumed_tensorboard_hides_what_came_after_in_a_file_of_its_own(tmp_path):
    write_steps(TensorBoard(tmp_path, resume_after=None), [1, 2, 4])
    write_steps(TensorBoard(tmp_path, resume_after=2), [5])
    first, second = sorted(tmp_path.iterdir())
    assert [step for step, _, _ in scalars(read_events(first))] == [1, 2, 4]
    events = read_events(second)
    starts = [event.step for event in events if event.HasField("session_log")]
    assert starts == [3]
    assert [step for step, _, _ in scalars(events)] == [5]


class Recorder:
    def __init__(self, *, fails=False):
        self.closed, self.fails = False, fails

    def write(self, step, values):
        pass

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("disk full")


def test_sinks_close_all_even_if_one_fails():
    recorders = [Recorder(), Recorder(fails=True), Recorder()]
    with pytest.raises(OSError, match="disk full"):
        Sinks(*recorders).close()
    assert [recorder.closed for recorder in recorders] == [True, True, True]


def test_metrics_and_reports_import_neither_jax_nor_an_extra():
    code = """
import sys
import shardtrain.report.metrics, shardtrain.report.progress, shardtrain.report.sinks
import shardtrain.report.tables, shardtrain.report.plots.timeline
loaded = {name.partition(".")[0] for name in sys.modules}
sys.exit(", ".join(sorted(loaded & {"jax", "jaxlib", "flax", "matplotlib", "tensorboardX"})) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_is_written_through_a_link_or_a_second_name(tmp_path):
    """A run folder may come from somebody else."""
    theirs = tmp_path / "theirs"
    line = '{"step": 1, "loss": 2.0}\n'
    theirs.write_text(line)
    for make in (os.link, os.symlink):
        path = tmp_path / "metrics.jsonl"
        path.unlink(missing_ok=True)
        make(theirs, path)
        sink = JsonLines(path, resume_after=1)
        sink.write(2, {"loss": 1.0})
        sink.close()
        assert [record["step"] for record in read_jsonl(path)] == [1, 2]
        assert theirs.read_text() == line
    path.unlink()
    path.symlink_to(theirs)
    with pytest.raises(OSError, match="is a link, which is not followed; remove it"):
        JsonLines(path, resume_after=None)
    assert theirs.read_text() == line
