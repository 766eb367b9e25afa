"""Plot the training and held-out losses of a run over its steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardtrain.report.quantities import loss_text
from shardtrain.report.sinks.json_lines import read_jsonl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from shardtrain.report.plots.figure import GRID, INK, QUIET_INK, make_figure, save_figure

Series = tuple[np.ndarray, np.ndarray]
"""Steps int64 (N,) and values float64 (N,), NaN for values that were not finite."""


TRAIN_COLOUR = "#2f6db3"


HELDOUT_COLOURS = ("#d1495b", "#3a8f5c", "#8c5fb0", "#b7791f", "#4b5563")


def plot_loss_curve(jsonl_path: Path | str, png_path: Path | str, *, title: str) -> Path:
    """Plot the training and held-out losses of a run over its steps.

    Training losses are a light line under a smoothed one. The axis is logarithmic if losses span decades; the
    first hundredth of the steps may be above its range.

    Args:
        jsonl_path: written by `sinks.json_lines.JsonLines`, with `train/loss`, `heldout/loss` or both; each
            `heldout/NAME/loss` has its own line.
        png_path: file to write; its folder is created.
        title: the title of the plot.

    Returns:
        The path of the file.

    Raises:
        ValueError: no line has a loss, a line is invalid, or matplotlib is not installed.
    """
    records = read_jsonl(jsonl_path)
    train, heldout = select_series(records, "train/loss"), select_heldout_series(records)
    if not train[0].size and not heldout:
        raise ValueError(
            f"a loss curve of {jsonl_path} was asked for, but none of its {len(records)} lines has"
            " 'train/loss' or 'heldout/loss'. Point it to the metrics of a run that has logged at least one"
            " step."
        )
    figure = make_figure("a loss curve")
    axes = figure.add_axes((0.085, 0.115, 0.885, 0.68))
    _draw_losses(axes, train, heldout)
    _set_scale(axes, train, heldout)
    _style_axes(axes)
    figure.text(0.085, 0.935, title, fontsize=14, fontweight="bold", color=INK, parse_math=False)
    subtitle = format_final_values(train, heldout)
    figure.text(0.085, 0.875, subtitle, fontsize=min(10, 1000 / len(subtitle)), color=QUIET_INK)
    save_figure(figure, Path(png_path))
    return Path(png_path)


def select_series(records: Sequence[dict[str, float]], name: str) -> Series:
    """Return the steps and values of one metric, in order of step; values that are not finite become NaN.

    Args:
        records: from `sinks.json_lines.read_jsonl`.
        name: the name of the metric; records without it are skipped.

    Returns:
        steps int64 (N,), values float64 (N,).
    """
    points = [(int(record["step"]), record[name]) for record in records if name in record]
    points.sort(key=lambda point: point[0])
    steps = np.array([step for step, _ in points], np.int64)
    values = np.array([value for _, value in points], np.float64)
    return steps, np.where(np.isfinite(values), values, np.nan)


def select_heldout_series(records: Sequence[dict[str, float]]) -> dict[str, Series]:
    """Return label -> the losses of a held-out set: "held-out", or "held-out NAME" of a set with a name.

    >>> list(select_heldout_series([{"step": 1, "heldout/loss": 2.0}, {"step": 2, "heldout/code/loss": 2.0}]))
    ['held-out', 'held-out code']
    """
    logged = dict.fromkeys(name for record in records for name in record)
    names = [name for name in logged if name.startswith("heldout/") and name.endswith("/loss")]
    labels = [f"held-out {name.removeprefix('heldout').removesuffix('/loss')[1:]}".rstrip() for name in names]
    return {label: select_series(records, name) for label, name in zip(labels, names, strict=True)}


def smooth(values: np.ndarray, half_window: int) -> np.ndarray:
    """Return a centred running mean over the finite values.

    Near the start the window is at most a quarter of the steps before, so that the steep first steps are not
    flattened; at the end only its past half remains.

    Args:
        values: float64 (N,), NaN for missing ones.
        half_window: number of values to each side; 0 disables smoothing.

    Returns:
        float64 (N,), NaN where `values` is.
    """
    index = np.arange(values.size)
    half = np.minimum(half_window, index // 4)
    low, high = index - half, np.minimum(index + half + 1, values.size)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    means = (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1)
    return np.where(finite, means, np.nan)


def spans_decades(values: np.ndarray) -> bool:
    """Return whether a logarithmic axis fits: all positive, the largest over 20 times the smallest."""
    finite = values[np.isfinite(values)]
    return bool(finite.size and finite.min() > 0 and finite.max() > 20 * finite.min())


def format_final_values(train: Series, heldout: Mapping[str, Series]) -> str:
    """Format the subtitle: first and last losses, the lowest held-out one, the number of non-finite ones.

    Args:
        train: steps (N,) and losses (N,).
        heldout: label of a held-out set -> steps (M,) and losses (M,), M at least 1.

    Returns:
        One line of text.
    """
    parts = [f"step {max(int(steps[-1]) for steps, _ in (train, *heldout.values()) if steps.size):,}"]
    if train[0].size:
        parts.append(f"training {_first_to_last(train[1])}")
    parts += [f"{label} {_first_to_last(each[1])}{_lowest(*each)}" for label, each in heldout.items()]
    num_not_finite = int(np.isnan(train[1]).sum())
    parts += [f"not finite: {num_not_finite:,} of {train[1].size:,}"] if num_not_finite else []
    return "  ·  ".join(parts)


def _first_to_last(losses: np.ndarray) -> str:
    first, last = loss_text(losses[0]), loss_text(losses[-1])
    return last if losses.size == 1 else f"{first} → {last}"


def _lowest(steps: np.ndarray, losses: np.ndarray) -> str:
    if not np.isfinite(losses).any() or (lowest := int(np.nanargmin(losses))) == losses.size - 1:
        return ""
    return f" (lowest {loss_text(losses[lowest])} at step {steps[lowest]:,})"


def _draw_losses(axes: "Axes", train: Series, heldout: Mapping[str, Series]) -> None:
    steps, losses = train
    half_window = losses.size // 50
    # a line through one point is invisible, so short runs have markers
    marker = "o" if losses.size <= 30 else None
    if half_window:
        axes.plot(steps, losses, color=TRAIN_COLOUR, alpha=0.25, linewidth=0.9)
    if losses.size:
        smoothed = smooth(losses, half_window)
        label = "training, smoothed" if half_window else "training"
        axes.plot(
            steps, smoothed, color=TRAIN_COLOUR, linewidth=1.8, marker=marker, markersize=4, label=label
        )
    style = {"marker": "o", "markersize": 5.5, "markeredgecolor": "white", "markeredgewidth": 0.8}
    for number, (label, each) in enumerate(heldout.items()):
        colour = HELDOUT_COLOURS[number % len(HELDOUT_COLOURS)]
        axes.plot(*each, color=colour, linewidth=1.2, label=label, zorder=3, **style)


def _set_scale(axes: "Axes", train: Series, heldout: Mapping[str, Series]) -> None:
    from matplotlib.ticker import LogLocator

    # the first hundredth is so steep that it would flatten the rest; its value is in the subtitle
    shown = np.concatenate([train[1][train[1].size // 100 :], *(each[1] for each in heldout.values())])
    if spans_decades(shown):
        axes.set_yscale("log")
        axes.set_ylabel("loss (log scale)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.set_ylabel("loss")
    finite = shown[np.isfinite(shown)]
    axes.dataLim.intervaly = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    axes.margins(0.02, 0.06)
    axes.autoscale_view()


def _style_axes(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel("step")
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(QUIET_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=QUIET_INK, length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    # above the plot, where it covers no curve
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=2, frameon=False, fontsize=9.5, labelcolor=INK
    )
