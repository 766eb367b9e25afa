"""The strategy of a run, how it is distributed, and its text form: a TOML file that reads back to the same.

Next: `config.py`, the rest of a run.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, problems_error
from shardtrain.islands.options import Across
from shardtrain.pipeline.options import Pipeline
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.layout_file import MOST_FILE_BYTES
from shardtrain.system.untrusted_files import read_text


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The parallelism of a run: plain data that can be printed, compared and saved.

    Args:
      layout: sizes of the mesh axes, and the rules that shard arrays over them.
      accumulate: number of microbatches in a step; their gradients are added up.
      synchronisation: when replicas are synchronised, and how.
      across: what islands exchange, if several were launched.
      pipeline: how a pipeline is partitioned and scheduled; its microbatches are those of `accumulate`.
      remat: what the backward pass of the model computes again, to keep less: none, weights (casts and
        gathered weights), dots (all but the results of matrix products), outputs (all but the outputs of
        blocks) or full (all but the inputs of blocks). The last two need a model with an option of that name.
        None: what the model itself says.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    layout: Layout = Layout()
    accumulate: int = 1
    synchronisation: Synchronisation = Synchronisation()
    across: Across = Across()
    pipeline: Pipeline = Pipeline()
    remat: Literal["none", "weights", "dots", "outputs", "full"] | None = None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.accumulate < 1:
            problems.append(f"accumulate is {self.accumulate} microbatches; use 1 or more")
        if problems:
            raise problems_error("this strategy cannot be used", problems)


STRATEGY_FILE = "strategy.toml"
"""Name of the file in the folder of a run."""


def strategy_text(strategy: Strategy) -> str:
    """Format a strategy as TOML, which `read_strategy` reads back to an equal one.

    What was given in Python and is no plain value, such as a combiner of one's own, is left out, and named in
    a comment.

    >>> print(strategy_text(Strategy(accumulate=4)).partition(chr(10))[0])
    accumulate = 4
    """
    left_out: list[str] = []
    values = _plain(strategy, "", left_out)
    comments = [f"# {path} was given in Python: give it there again\n" for path in left_out]
    # TOML has plain values before tables
    ordered = dict(sorted(values.items(), key=lambda item: isinstance(item[1], dict)))
    return "".join(comments) + tomli_w.dumps(ordered)


def _plain(value: Any, path: str, left_out: list[str]) -> dict[str, Any]:
    """Return the fields of a dataclass as TOML has them; None, which it has not, is left out."""
    found: dict[str, Any] = {}
    default = type(value)()
    for field in fields(value):
        item = getattr(value, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if is_dataclass(item) and type(item) is type(getattr(default, field.name)):
            found[field.name] = _plain(item, name, left_out)
        elif isinstance(item, Mapping):
            found[field.name] = {key: _item(each) for key, each in item.items()}
        elif isinstance(item, str | bool | int | float | Path) or type(item) in (list, tuple):
            found[field.name] = _item(item)
        elif item is not None:  # such as a combiner, or an optax transformation, a tuple of functions
            left_out.append(name)
    return found


def _item(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [_item(each) for each in value] if isinstance(value, list | tuple) else value


def read_strategy(path: Path) -> Strategy:
    """Read a strategy from a TOML file: the fields of `Strategy` by their names, nested ones as tables.

    Raises:
      ValueError: not TOML, an unknown key, or values that `Strategy` refuses.
    """
    try:
        values = tomllib.loads(read_text(path, MOST_FILE_BYTES))
    except OSError as error:
        raise ValueError(f"there is no strategy file {path} to read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a strategy in TOML: {error}") from error
    problems: list[str] = []
    try:
        strategy = _built(Strategy(), values, "", problems)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if problems:
        raise problems_error(f"{path} cannot be read", problems)
    return strategy


def _built(default: Any, values: Mapping[str, Any], path: str, problems: list[str]) -> Any:
    """Return a dataclass like `default` with these values; keys that it has not are added to `problems`."""
    known = [field.name for field in fields(default)]
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        if key not in known:
            problems.append(f"unknown key {near(key, known)}" + (f" in [{path}]" if path else ""))
            continue
        inner = getattr(default, key)
        nested = is_dataclass(inner) and not isinstance(inner, type) and isinstance(value, Mapping)
        found[key] = _built(inner, value, name, problems) if nested else value
    return type(default)(**found) if not problems else default
