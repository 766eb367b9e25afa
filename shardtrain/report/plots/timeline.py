"""Plot a pipeline schedule: a row per stage, a box per task.

`report/timeline.py` formats it as text.
"""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from shardtrain.pipeline.simulate import SimulatedTimes
from shardtrain.pipeline.table import Table
from shardtrain.report.timeline import figures, heading, simulate_units, task_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from shardtrain.report.plots.figure import GRID, INK, QUIET_INK, make_figure, save_figure

TASK_COLOURS = {"forward": "#2f6db3", "backward": "#d1495b", "weight": "#4c956c"}


def plot_timeline(table: Table, path: Path | str) -> Path:
    """Plot a schedule: a row per stage, a box per task as long as its time, gaps where a stage waits.

    A forward takes 1, a backward 2, or 1 for each half.

    Args:
        table: one that can run.
        path: file to write, .svg or .png; its folder is created.

    Returns:
        The path of the file.

    Raises:
        ValueError: another kind of file, or matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        use = path.with_suffix(".svg")
        raise ValueError(f"a timeline in {path} was asked for; it is drawn as .svg or .png: use {use}")
    found = simulate_units(table)
    height = 1.9 + 0.42 * table.num_stages
    width = min(60, max(9, 0.28 * table.num_ticks * (1.6 if table.lockstep else 1)))
    figure = make_figure("a timeline", (width, height))
    axes = figure.add_axes((0.75 / width, 0.6 / height, 1 - 1 / width, 1 - 1.6 / height))
    _draw_tasks(axes, table, found, points=72 * (width - 1))
    _style_axes(axes, table, found)
    lines = (
        (0.4, 13, INK, "bold", heading(table)),
        (0.7, 9.5, QUIET_INK, "normal", figures(table, found)),
    )
    for down, most, colour, weight, text in lines:
        size = min(most, 72 * (width - 1) / (0.62 * len(text)))
        position = {"x": 0.75 / width, "y": 1 - down / height, "parse_math": False}
        figure.text(s=text, fontsize=size, fontweight=weight, color=colour, **position)
    save_figure(figure, path)
    return path


def _draw_tasks(axes: "Axes", table: Table, found: SimulatedTimes, points: float) -> None:
    """Draw a box per task; `points` is the width of the axes, text is drawn if it fits."""
    rows: defaultdict[tuple[int, int, str], list[tuple[float, float]]] = defaultdict(list)
    for task in table.tasks:
        start, length = found.start[task], found.end[task] - found.start[task]
        rows[task.stage, task.chunk, task.kind].append((start, length))
        text = task_text(task, table.num_chunks)
        size = min(8.0, points * length / found.makespan / (0.72 * len(text)))
        if size >= 3:
            alignment = {"ha": "center", "va": "center", "color": "white", "clip_on": True}
            axes.text(start + length / 2, task.stage, text, fontsize=size, **alignment)
    for (stage, chunk, kind), boxes in rows.items():
        # later chunks are darker, so that the rounds of an interleaved schedule can be seen
        alpha = 0.55 + 0.45 * (chunk + 1) / table.num_chunks
        style = {"facecolor": TASK_COLOURS[kind], "edgecolor": "white", "linewidth": 0.6, "alpha": alpha}
        axes.broken_barh(boxes, (stage - 0.43, 0.86), **style)


def _style_axes(axes: "Axes", table: Table, found: SimulatedTimes) -> None:
    from matplotlib.patches import Patch

    axes.set_xlim(0, found.makespan)
    axes.set_ylim(table.num_stages - 0.5, -0.5)
    axes.set_yticks(range(table.num_stages), [f"stage {stage}" for stage in range(table.num_stages)])
    axes.set_xlabel("time", color=QUIET_INK)
    axes.tick_params(which="both", colors=QUIET_INK, length=0, labelsize=9)
    axes.set_facecolor(GRID)
    axes.spines[:].set_visible(False)
    boxes = [Patch(color=TASK_COLOURS[kind], label=kind) for kind in table.kinds]
    style = {"frameon": False, "fontsize": 9.5, "labelcolor": INK, "ncols": 4, "borderaxespad": 0.2}
    axes.legend(
        handles=[*boxes, Patch(color=GRID, label="waits")],
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        **style,
    )
