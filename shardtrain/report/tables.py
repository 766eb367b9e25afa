"""Format tables, and the line that describes a mesh."""

import io
import math
from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardtrain.system.terminal import printable


def table_text(header: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> str:
    """Return a table as text, as wide as its cells, without colours; columns of numbers are aligned right.

    Args:
        header: the name of each column.
        rows: one cell per column each; formatted with `str`, never read as markup.
        title: line above the table.

    Returns:
        Lines without trailing blanks, each with a newline.
    """
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        numeric = bool(rows) and all(isinstance(row[number], int | float) for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(str(cell), kept="")) for cell in row))
    console = Console(file=(file := io.StringIO()), width=10_000, color_system=None, force_terminal=False)
    console.print(table)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


def mesh_line(sizes: Mapping[str, int]) -> str:
    """Format a mesh in one line: axes above size 1 and number of devices.

    Args:
        sizes: the size of each axis, slowest first.

    Returns:
        The line, without a newline.

    Examples:
        >>> mesh_line({"pipeline": 1, "data": 2, "fsdp": 1, "tensor": 4})
        'data=2 tensor=4 (8 devices)'
        >>> mesh_line({"data": 1})
        '1 device'
    """
    num_devices = math.prod(sizes.values())
    axes = " ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
    return f"{axes} ({num_devices} devices)" if axes else "1 device"
