"""Tables as files: what is written is read again, and what cannot be read is told line by line."""

import os
from dataclasses import replace

import pytest
from allowed_chunks import list_allowed_chunks

from shardtrain.pipeline.schedule import SCHEDULES
from shardtrain.pipeline.table_file import read_table, write_table


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_written_is_read_again(name, tmp_path):
    table = SCHEDULES[name](3, 4, list_allowed_chunks(name)[0], True)
    path = tmp_path / "folder" / "mine.csv"
    write_table(table, path)
    written = ["tick,stage,chunk,microbatch,kind", "0,0,0,0,forward"]
    if table.placement != "loop":
        written = [f"{written[0]},part", f"{written[1]},0"]
    assert path.read_text().splitlines()[:2] == written
    assert read_table(path, lockstep=True) == replace(table, name="mine.csv", live_bound=None)


def test_columns_in_any_order_without_chunks(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("kind, stage, microbatch, tick\nbackward, 0, 0, 1\n forward ,0,0,0\n")
    table = read_table(path)
    assert (table.num_stages, table.num_microbatches, table.num_chunks) == (1, 1, 1)
    assert [task.kind for task in table.tasks] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("tick,stag,kind\n", ["column 'stag' (did you mean 'stage'?)", "column 'microbatch' is missing"]),
        ("tick,stage,microbatch,kind\n", ["it has no tasks; write one a line, as 0,0,0,0,forward"]),
        (
            "tick,stage,microbatch,kind\n0,0,zero,forward\n1,0,0,backwards\n1,0,0\n1,-1,0,backward\n",
            [
                "line 2: microbatch is 'zero'; write a whole number from 0",
                "line 3: kind 'backwards' (did you mean 'backward'",
                "line 4 has more or fewer cells than the header",
                "line 5: stage is '-1'; write a whole number from 0",
            ],
        ),
        (
            "tick,stage,microbatch,kind\n0,0,0,forward\n0,0,0,backward\n",
            ["tick 0 of stage 0 has 2 tasks", "move it to tick 1 or later"],
        ),
        ("", ["column 'tick' is missing"]),
        (
            "tick,stage,chunk,microbatch,kind,part\n0,0,0,0,forward,1\n1,1,0,0,forward,0\n"
            "0,0,1,0,forward,2\n1,1,1,0,forward,3\n",
            ["put the parts 0, 1, ... on stages 0,1,0,1 (loop) or 0,1,1,0 (v)"],
        ),
    ],
)
def test_what_cannot_be_read_is_told(content, expected, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_table(path)
    for text in expected:
        assert text in str(error.value)


def test_a_file_that_is_not_text_is_told(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"mine\.csv is not a CSV file"):
        read_table(path)
    with pytest.raises(ValueError, match="there is no schedule file"):
        read_table(tmp_path / "other.csv")


def test_numbers_that_no_table_has_are_refused_at_once(tmp_path):
    path = tmp_path / "mine.csv"
    lines = ["tick,stage,chunk,microbatch,kind", "0,0,0,0,forward", "1,99999999999,0,0,forward"]
    path.write_text("\n".join([*lines, f"{'9' * 9999},0,0,1,forward"]))
    with pytest.raises(ValueError, match="cannot be read") as error:
        read_table(path)
    assert str(error.value).splitlines()[1:] == [
        "  - line 3: stage is '99999999999', and the file has 3 tasks; write a number below 24",
        f"  - line 4: tick is '{'9' * 56}..., and the file has 3 tasks; write a number below 24",
    ]
    rows = "".join(f"{i},{i},0,{i},forward\n" for i in range(50))
    path.write_text(f"tick,stage,chunk,microbatch,kind\n{rows}")
    with pytest.raises(ValueError, match=r"50 \* 1 \* 50 = 2500 tasks of each kind, and the file has 50"):
        read_table(path)


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "mine.csv")
    with pytest.raises(ValueError, match=r"mine\.csv is a FIFO, not a regular file"):
        read_table(tmp_path / "mine.csv")
