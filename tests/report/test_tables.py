"""Tables and lines by value."""

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
