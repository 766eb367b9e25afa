"""Plain lines and the bar, written to a string under a fake clock."""

import io

from rich.console import Console

from shardtrain.report.progress import ProgressBar, ProgressLines, progress


class Clock:
    def __init__(self):
        self.now_seconds = 0.0

    def __call__(self):
        return self.now_seconds


def plain(**options):
    file, clock = io.StringIO(), Clock()
    shown = progress(console=Console(file=file, force_terminal=False, width=40), clock=clock, **options)
    return shown, file, clock


def test_plain_lines_by_value():
    shown, file, clock = plain(total_steps=1000, plain_every_seconds=0)
    with shown:
        shown.update(100, {"train/loss": 2.5})
        clock.now_seconds = 2.0
        shown.update(
            120, {"train/loss": 2.34117, "heldout/loss": 2.4, "tokens_per_second": 12_345, "grad_norm": 1}
        )
        clock.now_seconds = 4.0
        shown.update(140, {"train/loss": 2.25, "mfu": 0.38249})
        shown.note("saved checkpoint [bold] at step 140")
    assert file.getvalue().splitlines() == [
        "step 100/1000  loss 2.5000",
        "step 120/1000  loss 2.3412  heldout 2.4000  12.3k tokens/s  left 1m28s",
        "step 140/1000  loss 2.2500  12.3k tokens/s  MFU 38.2%  left 1m26s",
        "saved checkpoint [bold] at step 140",
    ]


def test_plain_lines_have_an_interval_except_first_heldout_and_last():
    shown, file, clock = plain(total_steps=6, plain_every_seconds=10)
    with shown:
        for step, now_seconds in enumerate((0.0, 4.0, 8.0, 12.0, 13.0, 14.0), start=1):
            clock.now_seconds = now_seconds
            shown.update(step, {"heldout/loss": 3.0} if step == 3 else {"train/loss": 2.0})
    assert [line.split()[1] for line in file.getvalue().splitlines()] == ["1/6", "3/6", "6/6"]


def test_time_left_of_a_resumed_run_counts_its_own_steps():
    shown, file, clock = plain(total_steps=1000, start_step=900, plain_every_seconds=0)
    with shown:
        shown.update(901, {})
        clock.now_seconds = 1.0
        shown.update(902, {})
    assert file.getvalue().splitlines()[-1] == "step 902/1000  left 1m38s"


def bar(monkeypatch, width=80, **options):
    monkeypatch.setenv("TERM", "xterm")
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=True, width=width, height=20, color_system=None)
    return progress(console=console, clock=clock, **options), file, clock


def test_the_bar_shows_losses_rate_and_times(monkeypatch):
    shown, file, clock = bar(monkeypatch, total_steps=1000, start_step=80)
    assert isinstance(shown, ProgressBar)
    with shown:
        shown.update(100, {"train/loss": 2.5, "heldout/loss": 2.4})
        clock.now_seconds = 2.0
        shown.update(120, {"train/loss": 2.34117, "tokens_per_second": 12_345})
    last = file.getvalue().rpartition("\r")[2]
    assert " 120/1000 " in last
    assert " 0:00:02 loss 2.3412  heldout 2.4000  12.3k tokens/s  left 1m28s" in last


def test_a_note_is_printed_above_the_bar(monkeypatch):
    shown, file, _ = bar(monkeypatch, total_steps=10)
    with shown:
        shown.update(1, {"train/loss": 2.0})
        shown.note("saved [bold]")
    text = file.getvalue()
    assert text.index("saved [bold]\n") < text.rindex("1/10")


def test_progress_depends_on_the_terminal(monkeypatch):
    shown, _, _ = plain(total_steps=1)
    assert isinstance(shown, ProgressLines)
    monkeypatch.setenv("TERM", "dumb")
    dumb = Console(file=io.StringIO(), force_terminal=True)
    assert isinstance(progress(total_steps=1, console=dumb), ProgressLines)
