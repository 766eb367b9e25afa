"""The timeline of a schedule: as text by value, cut at a width; as a plot with a box per task."""

import re
import sys

import matplotlib.image
import numpy as np
import pytest
from allowed_chunks import list_allowed_chunks
from matplotlib.colors import to_rgb

from shardtrain.pipeline.schedule import make_table
from shardtrain.report.plots.timeline import TASK_COLOURS, plot_timeline
from shardtrain.report.timeline import timeline_text


def test_1f1b_by_value():
    assert timeline_text(make_table("1f1b", 4, 6)) == (
        "schedule 1f1b: 4 stages, 6 microbatches, one task a tick\n"
        "tick     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16 17\n"
        "stage 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5\n"
        "stage 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .\n"
        "stage 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .\n"
        "stage 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .\n"
        "F forward, B backward, then the microbatch; . waits\n"
        "18 ticks; bubble 33.3% where F takes 1, B takes 2; live microbatches by stage: 4 3 2 1\n"
    )


def test_zero_bubble_in_lockstep_by_value():
    """A cell has all tasks of a tick, in their order."""
    assert timeline_text(make_table("zero_bubble", 2, 3, 1, True)) == (
        "schedule zero_bubble: 2 stages, 3 microbatches, lock-step\n"
        "tick     0      1      2      3      4\n"
        "stage 0  F0     F1     F2B0W0 B1W1   B2W2\n"
        "stage 1  .      F0B0   F1B1W0 F2B2W1 W2\n"
        "F forward, B backward, W weight, then the microbatch; . waits\n"
        "5 ticks; bubble 18.2% where F takes 1, B takes 1, W takes 1; live microbatches by stage: 3 2\n"
    )


def test_chunks_are_letters():
    lines = timeline_text(make_table("interleaved", 2, 2, 2)).splitlines()
    assert lines[0] == "schedule interleaved: 2 stages, 2 microbatches, 2 chunks a stage, one task a tick"
    assert lines[2] == "stage 0  F0a F1a F0b F1b .   B0b .   B1b B0a B1a"
    assert lines[4] == "F forward, B backward, then the microbatch, then the chunk (a, b, ...); . waits"
    assert lines[5].endswith("; live (chunk, microbatch) by stage: 4 3")


@pytest.mark.parametrize("width", [30, 41, 42, 100])
def test_wide_tables_are_cut_and_say_so(width):
    table = make_table("1f1b", 4, 32)
    lines = timeline_text(table, width).splitlines()
    shown = len(lines[1].split()) - 1
    ticks = lines[1:6]
    assert max(map(len, ticks)) <= width < max(map(len, ticks)) + 6
    assert shown == {30: 5, 41: 8, 42: 8, 100: 23}[width]
    left = sum(task.tick >= shown for task in table.tasks)
    assert lines[6] == f"ticks {shown} to 69 do not fit here: {left} tasks"
    whole = timeline_text(table).splitlines()
    assert [line.startswith(cut.rstrip()) for line, cut in zip(whole[1:6], ticks, strict=True)] == [True] * 5
    assert lines[-1] == whole[-1]


def test_a_table_that_fits_is_whole():
    table = make_table("1f1b", 2, 2)
    assert timeline_text(table, 26) == timeline_text(table)
    assert "ticks 5 to 5 do not fit here: 1 task\n" in timeline_text(table, 25)
    assert "ticks 1 to 5 do not fit here: 7 tasks\n" in timeline_text(table, 1)


def num_pixels(path, kind):
    image = matplotlib.image.imread(path)[..., :3]
    return int((np.abs(image - np.array(to_rgb(TASK_COLOURS[kind]))).max(axis=-1) < 0.02).sum())


def test_a_png_has_boxes_as_long_as_their_tasks(tmp_path):
    path = plot_timeline(make_table("1f1b", 2, 3), tmp_path / "folder" / "a.png")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    forward, backward = num_pixels(path, "forward"), num_pixels(path, "backward")
    assert forward > 5000
    assert 1.7 < backward / forward < 2.3
    assert num_pixels(path, "weight") == 0
    assert num_pixels(plot_timeline(make_table("zero_bubble", 2, 3), tmp_path / "b.png"), "weight") > 5000


@pytest.mark.parametrize(
    ("name", "lockstep"), [("interleaved", False), ("zero_bubble", True), ("zb_v", False)]
)
def test_an_svg_names_every_task(name, lockstep, tmp_path):
    table = make_table(name, 3, 4, list_allowed_chunks(name)[0], lockstep)
    text = plot_timeline(table, tmp_path / "a.svg").read_text()
    found = re.findall("<!-- ([FBW][0-9]+[ab]?) -->", text)
    assert len(found) == len(table.tasks)
    assert {word[0] for word in found} == {kind[0].upper() for kind in table.kinds}
    assert f"schedule {name}: 3 stages, 4 microbatches" in text


def test_other_kinds_of_file_are_refused(tmp_path):
    with pytest.raises(ValueError) as error:
        plot_timeline(make_table("1f1b", 2, 2), tmp_path / "a.pdf")
    assert str(error.value) == (
        f"a timeline in {tmp_path / 'a.pdf'} was asked for; it is drawn as .svg or .png:"
        f" use {tmp_path / 'a.svg'}"
    )


def test_a_missing_matplotlib_names_what_was_asked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="a timeline was asked for, but matplotlib is not installed"):
        plot_timeline(make_table("1f1b", 2, 2), tmp_path / "a.png")
