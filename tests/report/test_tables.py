"""Tables and lines by value."""

import pytest

from shardtrain.report.tables import table_text

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


def test_a_table_without_rows_has_its_header():
    assert table_text(["name", "bytes"], []).split()[:2] == ["name", "bytes"]


def test_all_uneven_rows_are_listed():
    with pytest.raises(ValueError) as error:
        table_text(["a", "b"], [[1], [1, 2], [1, 2, 3]])
    assert str(error.value) == (
        "a table with the 2 columns ('a', 'b') was asked for, but row 0 has 1, row 2 has 3. "
        "Give each row 2 cells."
    )
