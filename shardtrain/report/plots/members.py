"""Plot the islands of a run over time, and its loss below them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardtrain.report.elastic_run import ElasticPast
from shardtrain.report.plots.figure import GRID, INK, QUIET_INK, make_figure, save_figure

LINE_COLOUR, LOST_COLOUR, LEFT_COLOUR = "#2f6db3", "#d1495b", "#3a8f5c"
END_COLOURS = {"lost": LOST_COLOUR, "excluded": LOST_COLOUR, "left": LEFT_COLOUR}
MOST_NAMES = 40
"""Largest number of islands that are named."""


def plot_members(past: ElasticPast, lines: Sequence[Mapping[str, float]], path: Path, *, title: str) -> None:
    """Plot a line for each island from its first epoch to its last, above the loss over time.

    Args:
      past: what happened.
      lines: lines of metrics; without any there is no loss.
      path: file to write, .png or .svg; its folder is made.
      title: the title of the plot.
    """
    height = 3.0 + 0.16 * min(len(past.islands), MOST_NAMES) + (2.0 if lines else 0.0)
    figure = make_figure("a plot of islands", (9, height))
    rows = 2 if lines else 1
    axes = figure.add_subplot(rows, 1, 1)
    for row, island in enumerate(past.islands):
        axes.plot([island.came, island.gone], [row, row], color=LINE_COLOUR, linewidth=3)
        if island.why in END_COLOURS:
            colour, marker = END_COLOURS[island.why], "o" if island.why == "left" else "x"
            axes.plot([island.gone], [row], color=colour, marker=marker, markersize=6, linestyle="none")
    axes.set_ylim(len(past.islands) - 0.5, -0.5)
    if len(past.islands) <= MOST_NAMES:
        axes.set_yticks(range(len(past.islands)), [island.name for island in past.islands], fontsize=7)
    else:
        axes.set_ylabel("islands", color=QUIET_INK)
    every = [axes]
    if lines:
        below = figure.add_subplot(rows, 1, 2, sharex=axes)
        points = [
            (find_seconds(past, line["step"]), line["train/loss"]) for line in lines if "train/loss" in line
        ]
        below.plot(*zip(*points, strict=True), color=LINE_COLOUR, linewidth=1.2)
        below.set_ylabel("loss", color=QUIET_INK)
        every.append(below)
    every[-1].set_xlabel("seconds since the first epoch", color=QUIET_INK)
    for each in every:
        each.grid(axis="x", color=GRID)
        each.tick_params(colors=QUIET_INK, length=0)
        each.spines[:].set_visible(False)
    figure.subplots_adjust(left=0.2, right=0.97, top=1 - 0.6 / height, bottom=0.6 / height, hspace=0.12)
    figure.text(0.02, 1 - 0.35 / height, title, fontsize=12, fontweight="bold", color=INK, parse_math=False)
    note = "x: lost or excluded, o: left"
    figure.text(0.97, 1 - 0.35 / height, note, fontsize=8, color=QUIET_INK, ha="right")
    save_figure(figure, path)


def find_seconds(past: ElasticPast, step: float) -> float:
    """Return about when a number of steps was done: the steps of an epoch are spread over its time."""
    for each in past.epochs:
        if each.steps and step <= each.steps.stop:
            return each.began + each.seconds * (step - each.steps.start) / len(each.steps)
    return past.wall_seconds
