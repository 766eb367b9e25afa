"""Read and format layouts as TOML files, such as the files in `meshes/`. No jax."""

import json
import re
from dataclasses import fields
from pathlib import Path

from shardtrain.errors.messages import near, problems_error
from shardtrain.sharding.layout import Layout
from shardtrain.system.untrusted_data import read_toml

MOST_FILE_BYTES = 1 << 16
"""Limit of a TOML file, whose parser takes time and stack for deep nesting."""


def read_layout(path: Path) -> Layout:
    """Read a layout from a TOML file, whose keys are the fields of `Layout`.

    Raises:
      ValueError: not TOML, an unknown key, or a layout that `Layout` refuses.
    """
    known = [f.name for f in fields(Layout)]
    try:
        values = read_toml(path, MOST_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"there is no layout file {path} to read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a layout in TOML: {error}") from error
    if "islands" in values:
        raise ValueError(
            f"{path} is a cluster file, as it has islands; a layout has none: give it to launch --cluster"
        )
    if not values:
        raise ValueError(f"{path} is empty; a layout file has a table [mesh] with lines such as data = 2")
    if unknown := [key for key in values if key not in known]:
        raise problems_error(f"{path} cannot be read", [f"unknown key {near(key, known)}" for key in unknown])
    try:
        return Layout(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def layout_text(layout: Layout) -> str:
    """Format a layout as TOML, which `read_layout` reads back to an equal one."""
    lines = [
        f"zero = {layout.zero}",
        f"sequence_sharded = {str(layout.sequence_sharded).lower()}",
        f"collective_matmul = {str(layout.collective_matmul).lower()}",
        f'context_attention = "{layout.context_attention}"',
        f'unnamed = "{layout.unnamed}"',
        "\n[mesh]",
        *(f"{axis} = {size}" for axis, size in layout.mesh.items()),
    ]
    for table in ("parameters", "activations"):
        rules = getattr(layout, table)
        if rules:
            lines += [f"\n[{table}]", *(f"{_key_text(dim)} = {json.dumps(a)}" for dim, a in rules.items())]
    return "\n".join(lines) + "\n"


def _key_text(name: str) -> str:
    """Format a TOML key: bare where possible, else quoted."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
