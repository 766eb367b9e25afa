"""`shardtrain report RUN`: show what happened in a run whose islands came and went. No device is used."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from shardtrain.cli.arguments import parse_words
from shardtrain.elastic.history import read_history
from shardtrain.errors.exit_codes import DONE
from shardtrain.report.elastic_run import past_text, summarize
from shardtrain.report.plots.figure import check_picture
from shardtrain.report.plots.members import plot_members
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.system import terminal


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Show the epochs and islands of an elastic run, its goodput, and where the rest of the time went.

    Args:
      run: the folder of the run, which may still be training.
      output: draw islands over time, above the loss, into this file, .png or .svg (extra `plots`).
    """

    run: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    output: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 0."""
    options = parse_words(ReportOptions, list(arguments), prog="shardtrain report")
    run, output = options.run, options.output
    if output is not None:
        check_picture(output, "--output", "a plot of islands")
    try:
        history = read_history(run)
    except FileNotFoundError as error:
        if not (run / METRICS).is_file():
            raise
        raise ValueError(
            f"{error}. Of this run there are {run / 'loss.png'}, shardtrain advise speed {run} (what limits"
            f" its speed) and shardtrain checkpoint ls {run}"
        ) from None
    lines = read_jsonl(run / METRICS) if (run / METRICS).is_file() else []
    past = summarize(history, lines, time.time())
    terminal.out(past_text(past))
    if output is not None:
        plot_members(past, lines, output, title=f"islands of {run.resolve().name}")
        terminal.err(f"wrote {output}\n")
    return DONE
