"""What reaches the terminal cannot control it."""

import pytest

from shardtrain import cli, terminal
from shardtrain.report.tables import table_text
from shardtrain.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x9bm\x7f", "a\\rb\\x9bm\\x7f"),
        ("\u202eabc\u2066\u200b\u2028", "\\u202eabc\\u2066\\u200b\\u2028"),
        ("\udcff", "\\udcff"),
        (
            "lines\n\tstay, and f\u00fcnf \u20ac \U0001f600 too",
            "lines\n\tstay, and f\u00fcnf \u20ac \U0001f600 too",
        ),
    ],
)
def test_control_characters_are_escaped(text, shown, capsys):
    assert printable(text) == shown
    terminal.out(text)
    terminal.err(text)
    assert tuple(capsys.readouterr()) == (shown, shown)


def test_a_cell_of_a_table_stays_in_its_line():
    assert "a\\nstep 9  whole\\x1b[2J" in table_text(("name",), [("a\nstep 9  whole\x1b[2J",)])


def test_messages_of_the_command_line_are_escaped(tmp_path, capsys):
    assert cli.main(["checkpoint", "ls", str(tmp_path / "a\x1b[2Jb")]) == 2
    assert f"there is no folder {tmp_path}/a\\x1b[2Jb;" in capsys.readouterr().err
    (tmp_path / "run\x1b[2J").mkdir()
    assert cli.main(["checkpoint", "ls", str(tmp_path / "run\x1b[2J")]) == 2
    assert "\x1b" not in "".join(capsys.readouterr())
    assert cli.main(["tr\x1bain"]) == 2
    assert "\x1b" not in "".join(capsys.readouterr())
