"""Plot the frontier of a plan: memory of a device against the time of a step."""

from collections.abc import Sequence
from pathlib import Path

from shardtrain.plan.search import RankedChoice
from shardtrain.plan.space import mesh_text
from shardtrain.report.plots.figure import GRID, INK, QUIET_INK, check_picture, make_figure, save_figure

LINE_COLOUR, LIMIT_COLOUR, POINT_COLOUR = "#2f6db3", "#d1495b", "#b9c0c8"

GIB = 2**30

FAR = 10
"""Largest memory limit that is drawn, relative to the largest choice."""

MOST_NAMES = 8
"""Largest number of choices that are named in the plot."""


def check_frontier(path: Path) -> None:
    """Refuse a plot that cannot be drawn, before the work begins.

    Raises:
      ValueError: another kind of file, no such folder, or matplotlib is not installed.
    """
    check_picture(path, "--frontier", "the frontier of a plan")
    if not path.parent.is_dir():
        raise ValueError(f"--frontier is {path}, and there is no folder {path.parent}; make it first")


def plot_frontier(
    best: Sequence[RankedChoice],
    points: Sequence[tuple[float, float]],
    memory_bytes: float,
    path: Path,
    *,
    title: str,
) -> None:
    """Plot the frontier of a plan, both axes logarithmic.

    Args:
      best: the frontier, the smallest first; at least one.
      points: (bytes, seconds) of the other choices.
      memory_bytes: usable memory of a device; inf if not known.
      path: file to write, .png or .svg.
      title: the title of the plot.
    """
    figure = make_figure("the frontier of a plan")
    axes = figure.add_axes((0.09, 0.12, 0.88, 0.74))
    axes.scatter(
        [num_bytes / GIB for num_bytes, _ in points],
        [seconds for _, seconds in points],
        s=5,
        color=POINT_COLOUR,
        linewidths=0,
        label=f"{len(points):,} ways without a pipeline",
    )
    memory = [one.prediction.memory.total / GIB for one in best]
    times = [one.prediction.seconds.total for one in best]
    axes.plot(
        memory, times, color=LINE_COLOUR, marker="o", markersize=4, label="no other is smaller and faster"
    )
    # a device with far more memory would squeeze the ways into a corner
    if memory_bytes < FAR * GIB * memory[-1]:
        axes.axvline(memory_bytes / GIB, color=LIMIT_COLOUR, linestyle="--", label="memory that can be used")
    # names of some, evenly along the line
    step = -(-len(best) // MOST_NAMES)
    for one, x, y in list(zip(best, memory, times, strict=True))[::step]:
        text = f"{mesh_text(one.choice.layout).removeprefix('--mesh ')}, {one.choice.remat or 'as it is'}"
        axes.annotate(text, (x, y), (4, 5), textcoords="offset points", fontsize=6.5, color=INK, rotation=20)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xlabel("memory of a device, GiB", color=QUIET_INK)
    axes.set_ylabel("time of a step, s", color=QUIET_INK)
    axes.grid(color=GRID, which="both")
    axes.legend(fontsize=8, frameon=False, loc="upper right")
    figure.text(0.09, 0.92, title, fontsize=13, fontweight="bold", color=INK, parse_math=False)
    save_figure(figure, path)
