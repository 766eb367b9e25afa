"""Read layouts from TOML files, such as the files in `meshes/`. No jax."""

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
