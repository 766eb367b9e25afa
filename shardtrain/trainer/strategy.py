"""The strategy of a run, which distributes it, and its text form in TOML.

Next: `config.py`, the rest of a run.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import tomli_w

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.errors.field_types import fits, wrong_types
from shardtrain.errors.messages import near, refuse
from shardtrain.errors.options import CompactOptions, write_compact
from shardtrain.functional.remat_counts import RematCounts, Remats
from shardtrain.islands.cluster import OF_ISLANDS, island_numbers
from shardtrain.islands.options import Across
from shardtrain.pipeline.options import Pipeline
from shardtrain.plan.advice.bottleneck import PARTS
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.layout_file import MOST_FILE_BYTES
from shardtrain.system.untrusted_data import read_toml


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """The parallelism of a run: plain data that can be printed, compared and saved.

    Args:
      layout: sizes of the mesh axes, and the rules that shard arrays over them.
      accumulate: number of microbatches in a step; their gradients are added up.
      synchronisation: when and how replicas are synchronised.
      across: the exchange between islands, if several were launched.
      pipeline: partition and schedule of a pipeline; its microbatches are those of `accumulate`.
      remat: the values that the backward pass recomputes to save memory: none, weights (casts and gathered
        weights), dots (all except results of matrix products), outputs (all except outputs of blocks), full
        (all except inputs of blocks) or offload (as full, with these inputs in the memory of the host).
        The last three need a model with an option `remat`. Numbers of blocks, such as full=6,none=18 or
        {full = 6, none = 18} in a file, give the first blocks the first policy of this order: full, outputs,
        dots, weights, none. None takes the model's own option.
      compute_dtype: the dtype in which the model computes: float32, bfloat16 or float16 (with a scaled loss).
        None takes the model's own dtype.
      accumulate_dtype: the dtype in which the gradients of several microbatches are added up: float32, or
        bfloat16, which takes half the memory and rounds after each microbatch. Gradients are reduced over
        devices, and used, in float32. A pipeline supports only float32.
      offload: "optimizer" keeps the optimizer's state in the memory of the host between steps; each step
        reads and writes it over the link between host and device. "none" keeps it on the device.
      islands: fields with other values on some islands: islands -> field -> value. Islands are numbers, such
        as "0" or "2-5,8", or a pattern of the kind of their devices, such as "*V100*". If several entries
        match an island, later ones win.
      predicted: the step that a plan predicted: part (compute_seconds, bubble_seconds, collectives_seconds,
        update_seconds, islands_seconds) -> seconds. Only the summary at the end of a run uses it.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    layout: Layout = Layout()
    accumulate: int = 1
    synchronisation: Synchronisation = Synchronisation()
    across: Across = Across()
    pipeline: Pipeline = Pipeline()
    remat: Remats | RematCounts | None = None
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    accumulate_dtype: Literal["float32", "bfloat16"] = "float32"
    offload: Literal["none", "optimizer"] = "none"
    islands: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    predicted: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.accumulate < 1:
            problems.append(f"accumulate is {self.accumulate} microbatches; use 1 or more")
        problems += [f"predicted has {near(str(n), PARTS)}" for n in self.predicted if n not in PARTS]
        problems += [
            f"predicted.{name} is {value!r}; use seconds, 0 or more"
            for name, value in self.predicted.items()
            if name in PARTS and not (fits(value, float) and value >= 0)
        ]
        dtype, by = self.across.reduce_dtype, self.synchronisation.by
        if dtype != "float32" and self.synchronisation.on_deltas:
            problems.append(
                f"reduce_dtype is {dtype!r}, and deltas are float32; use a codec: --combine {dtype}+mean"
            )
        if dtype != "float32" and isinstance(by, str) and "+" in by:
            problems.append(f"reduce_dtype is {dtype!r}, and {by!r} has a codec already; use one of the two")
        if (parts := self.across.num_gradient_programs) > 1 and not self.synchronisation.is_mean:
            problems.append(
                f"gradient_parts is {parts}, and {self.synchronisation.by!r} of {self.synchronisation.on} is"
                " no mean of gradients; only a mean is sent in parts; use 1"
            )
        if not problems:
            if (in_flight := self.pipeline.in_flight) > 1 and self.across.axis != "pipeline":
                problems.append(
                    f"in_flight is {in_flight} batches, which follow each other from island to island; use"
                    " --across pipeline, or in_flight 1"
                )
            for name, section in self.islands.items():
                problems += _section_problems(self, name, section)
        refuse("this strategy cannot be used", problems)

    @property
    def scales_loss(self) -> bool:
        """Whether any island computes in float16, so that every island's state has a loss scale."""
        sections = (section.get("compute_dtype") for section in self.islands.values())
        return "float16" in (self.compute_dtype, *sections)

    def select_island(self, island: int, kind: str) -> "Strategy":
        """Return the strategy of one island, with the fields of its sections.

        Args:
          island: the number of the island.
          kind: the kind of its devices, such as "NVIDIA A100-SXM4-40GB" or "cpu".

        >>> strategy = Strategy(islands={"*v100*": {"compute_dtype": "float16"}, "1-2": {"accumulate": 4}})
        >>> [strategy.select_island(1, kind).compute_dtype for kind in ("Tesla V100-SXM2-32GB", "cpu")]
        ['float16', None]
        """
        found = self
        for name, section in self.islands.items():
            numbers = island_numbers(name)
            if island in numbers if numbers is not None else fnmatchcase(kind.lower(), name.lower()):
                found = _build(found, section, "", [])
        return found


def _section_problems(strategy: Strategy, name: str, section: Any) -> list[str]:
    """Return why a section of the strategy is wrong, one line each."""
    where = f"islands.{name!r}"
    if not isinstance(name, str):
        return [f"{where}: give the islands as text, such as '{name}' or '2-5'"]
    if not isinstance(section, Mapping):
        return [f"{where} is {section!r}; give fields and their values, such as {{'accumulate': 4}}"]
    if unknown := [key for key in section if key not in OF_ISLANDS]:
        return [
            f"{where} has {near(key, list(OF_ISLANDS))}; islands may differ only in these" for key in unknown
        ]
    numbers = island_numbers(name)
    if numbers is not None and not all(island_numbers(each) for each in name.split(",")):
        return [f"{where} has a range without islands; give the lower number first, such as 2-5"]
    if numbers is None and not re.search(r"[^\d ,-]", name):
        return [f"{where} names no islands; give numbers, such as '2-5,8', or a kind of device, '*V100*'"]
    problems: list[str] = []
    if not _is_of_a_file(section):
        return [f"{where} is {dict(section)}; give plain values, as in a file: {{'layout': {{'zero': 2}}}}"]
    try:
        _build(replace(strategy, islands={}), section, "", problems)
    except (ValueError, TypeError, AttributeError) as error:
        problems.append(str(error))
    return [f"{where}: {problem}" for problem in problems]


def _is_of_a_file(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_of_a_file(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_of_a_file, value))
    return isinstance(value, str | bool | int | float)


STRATEGY_FILE = "strategy.toml"
"""Name of the file in the folder of a run."""


def strategy_text(strategy: Strategy) -> str:
    """Format a strategy as TOML, which `read_strategy` reads back to an equal one.

    A value of Python that is not plain, such as a user's combiner, is left out and named in a comment.

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
    """Return the fields of a dataclass as TOML values; None is left out."""
    found: dict[str, Any] = {}
    default = type(value)()
    for each in fields(value):
        item = write_compact(getattr(value, each.name))
        name = f"{path}.{each.name}" if path else each.name
        if is_dataclass(item) and type(item) is type(getattr(default, each.name)):
            found[each.name] = _plain(item, name, left_out)
        elif isinstance(item, Mapping | str | bool | int | float | Path) or type(item) in (list, tuple):
            found[each.name] = str(item) if isinstance(item, Path) else item
        elif item is not None:  # such as a combiner, or an optax transformation, a tuple of functions
            left_out.append(name)
    return found


def read_strategy(path: Path) -> Strategy:
    """Read a strategy from a TOML file with the fields of `Strategy`, nested ones as tables.

    Raises:
      ValueError: not TOML, an unknown key, or values that `Strategy` refuses.
    """
    try:
        values = read_toml(path, MOST_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"the strategy file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a strategy in TOML: {error}") from error
    problems: list[str] = []
    try:
        strategy = _build(Strategy(), values, "", problems)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error
    refuse(f"{path} cannot be read", problems)
    return strategy


def _build(default: Any, values: Mapping[str, Any], path: str, problems: list[str]) -> Any:
    """Return a dataclass like `default` with these values; unknown keys are added to `problems`."""
    known = [each.name for each in fields(default)]
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}.{key}" if path else key
        if key not in known:
            problems.append(f"unknown key {near(key, known)}" + (f" in [{path}]" if path else ""))
            continue
        inner = getattr(default, key)
        nested = is_dataclass(inner) and not isinstance(inner, CompactOptions | type)
        nested = nested and isinstance(value, Mapping)
        found[key] = _build(inner, value, name, problems) if nested else value
    return replace(default, **found) if not problems else default
