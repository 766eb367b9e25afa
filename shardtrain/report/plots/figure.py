"""Make and save a figure of matplotlib; the colours that all plots share.

matplotlib is imported when a plot is drawn, without pyplot, so that no backend or style changes.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from shardtrain.system.atomic_write import new_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#22262b"


QUIET_INK = "#6b737c"


GRID = "#e6e8eb"


def is_installed() -> bool:
    """Return whether the extra `plots` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_picture(path: Path, option: str, what: str) -> None:
    """Refuse a picture that cannot be drawn, before the work begins.

    Raises:
      ValueError: another kind of file, or matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"{option} is {path}; it is drawn as .png or .svg: use {path.with_suffix('.png')}")
    make_figure(what)


def make_figure(what: str, size: tuple[float, float] = (9, 5)) -> "Figure":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            f"{what} was asked for, but matplotlib is not installed. It comes with the extra 'plots': "
            "install shardtrain[plots], or leave the picture out."
        ) from error
    figure = Figure(figsize=size, dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a figure in the format of its file name, and make its folder; see `new_file`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as file:
        figure.savefig(file, format=path.suffix.removeprefix(".").lower() or "png")
