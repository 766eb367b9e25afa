"""Tables and lines by value."""

import io

import pytest
from rich.console import Console

from shardtrain.report.tables import mesh_line, table, table_text

HEADER = ("parameter", "sharding", "MiB")
ROWS = [("wte", "[vocab] (tensor,)", 12), ("blocks.mlp.up", "()", 3.5)]


def test_a_table_as_text():
    assert table_text(HEADER, ROWS, title="parameters") == (
        "parameters\n"
        "  parameter       sharding            MiB\n"
        " ─────────────────────────────────────────\n"
        "  wte             [vocab] (tensor,)    12\n"
        "  blocks.mlp.up   ()                  3.5\n"
    )


def test_text_is_as_wide_as_its_cells():
    assert "x" * 300 in table_text(["name"], [["x" * 300]])


def test_a_table_without_rows_has_its_header():
    assert table_text(["name", "bytes"], []).split()[:2] == ["name", "bytes"]


def test_a_narrow_console_wraps_cells():
    file = io.StringIO()
    Console(file=file, width=20).print(table(["name"], [["abcdefghijklmnopqrstuvwxyz"]]))
    assert "".join(file.getvalue().split()).endswith("abcdefghijklmnopqrstuvwxyz")


def test_all_uneven_rows_are_listed():
    with pytest.raises(ValueError) as error:
        table(["a", "b"], [[1], [1, 2], [1, 2, 3]])
    assert str(error.value) == (
        "a table with the 2 columns ('a', 'b') was asked for, but row 0 has 1, row 2 has 3. "
        "Give each row 2 cells."
    )


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ({"pipeline": 1, "data": 2, "fsdp": 1, "tensor": 4}, "data=2 tensor=4 (8 devices)"),
        ({"data": 1, "tensor": 1}, "1 device"),
        ({}, "1 device"),
    ],
)
def test_mesh_line(sizes, line):
    assert mesh_line(sizes) == line
