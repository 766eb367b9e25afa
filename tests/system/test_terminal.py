"""What reaches the terminal cannot control it."""

import io

import pytest
from rich.console import Console

from shardtrain import cli
from shardtrain.report.progress import progress
from shardtrain.report.tables import table_text
from shardtrain.system import terminal
from shardtrain.system.terminal import printable
from shardtrain.trainer.console import say


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


@pytest.mark.parametrize("terminal", [False, True])
def test_notes_and_samples_are_escaped(terminal):
    """By a line and by a bar; rich itself lets an escape through."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, color_system=None, width=80)
    with progress(total_steps=1, start_step=0, unit="tokens", console=console) as bar:
        bar.note("checkpoint skipped: a\x1b]0;title\x07")
    say(console, "sample:\x1b]0;title\x07\x9b2J")
    assert "skipped: a\\x1b]0;title\\x07" in file.getvalue()
    assert "sample:\\x1b]0;title\\x07\\x9b2J" in file.getvalue()
    assert "\x1b]0;" not in file.getvalue()
