"""A layout: axis sizes, and the rules that give each dim its axes. No jax.

Also reads and writes the files of `meshes/`. Next: `resolve.py`, which joins a layout with the names
that a model gives its dims.
"""

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from shardtrain import axes
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, problems_error
from shardtrain.system.untrusted_files import read_text, short

Rules = Mapping[str, tuple[str, ...]]
MOST_DEVICES = 1 << 24
MOST_FILE_BYTES = 1 << 16
"""Of a file in TOML, whose parser takes time and stack for what is nested deeply."""

BUILT_AXES = (axes.PIPELINE, axes.DATA, axes.FSDP, axes.TENSOR)
"""Axes that may be larger than 1 today; the others are known words only."""

PARAMETER_RULES: Rules = {
    axes.SEQ: (),
    axes.EMBED: (axes.FSDP,),
    axes.HEADS: (axes.TENSOR,),
    axes.KV_HEADS: (axes.TENSOR,),
    axes.HEAD_DIM: (),
    axes.MLP: (axes.TENSOR,),
    axes.VOCAB: (axes.TENSOR,),
    axes.LAYERS: (axes.PIPELINE,),
    axes.EXPERTS: (axes.EXPERT,),
    axes.SEGMENTS: (),
    axes.HEIGHT: (),
    axes.WIDTH: (),
    axes.CHANNELS_IN: (axes.FSDP,),
    axes.CHANNELS_OUT: (axes.TENSOR,),
}
"""Parameters, gradients and optimizer state: Megatron's split over tensor, ZeRO's over fsdp."""

ACTIVATION_RULES: Rules = {
    axes.BATCH: (axes.DATA, axes.FSDP),
    axes.SEQ: (),
    axes.RESIDUAL_SEQ: (),
    axes.EMBED: (),
    axes.HEADS: (axes.TENSOR,),
    axes.KV_HEADS: (axes.TENSOR,),
    axes.HEAD_DIM: (),
    axes.MLP: (axes.TENSOR,),
    axes.VOCAB: (axes.TENSOR,),
    axes.LAYERS: (),
    axes.EXPERTS: (axes.EXPERT,),
    axes.SEGMENTS: (),
    axes.HEIGHT: (),
    axes.WIDTH: (),
    axes.CHANNELS_IN: (),
    axes.CHANNELS_OUT: (axes.TENSOR,),
}
"""Activations, and weights where they are used: `embed` is whole there, so fsdp gathers it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Axis sizes, and the rules that give each dim its axes.

    Args:
      mesh: axis -> size; axes that are not named have size 1, one size may be -1 (the rest).
      zero: what `fsdp` shards. 3: parameters, gradients and optimizer state; 2: gradients and
        optimizer state; 1: optimizer state (Rajbhandari et al. 2020, ZeRO, section 5). 1 and 2 compile
        to the same step: gradients are whole while they are added up, and in shards right after.
      sequence_sharded: activations between blocks are sharded over tensor along the sequence
        (Korthikanti et al. 2022, section 4.2.2).
      parameters: dim -> axes for parameters, where they differ from `PARAMETER_RULES`.
      activations: dim -> axes for activations, where they differ from `ACTIVATION_RULES`. A dim of one's
        own that has a rule among the parameters alone has the same axes here, without data and fsdp.
      unnamed: what to do, on a mesh of several devices, with arrays whose dims have no names and with
        names that have no rule: "refuse" or "replicate".

    Short forms: axis sizes, as a dict or as the text `data=2,fsdp=-1`.

    Raises:
      ValueError: an unknown axis, a bad size or option; all of them at once.

    >>> Layout(mesh={"data": 2, "tensor": 4}).batch_axes
    ('data', 'fsdp')
    """

    mesh: Mapping[str, int] = field(default_factory=lambda: {axes.DATA: -1})
    zero: int = 3
    sequence_sharded: bool = False
    parameters: Rules = field(default_factory=dict)
    activations: Rules = field(default_factory=dict)
    unnamed: str = "refuse"

    @staticmethod
    def short(value: object) -> dict[str, object] | None:
        """The fields that a bare value stands for; None: it is no short form."""
        if isinstance(value, str):
            return {"mesh": parse_mesh(value)}
        return {"mesh": value} if isinstance(value, Mapping) else None

    def __post_init__(self) -> None:
        problems = [*wrong_types(self), *mesh_problems(self.mesh)]
        for table in ("parameters", "activations"):
            given = getattr(self, table)
            problems += [
                f"rule {table}.{dim} is {value!r}; write a list of axes, {dim} = ['fsdp'], or []"
                for dim, value in given.items()
                if not _is_axes(value)
            ]
            rules = {dim: tuple(value) for dim, value in given.items() if _is_axes(value)}
            object.__setattr__(self, table, rules)
            for dim, dim_axes in rules.items():
                problems += [
                    f"rule {table}.{dim}: axis {near(axis, axes.AXES)}"
                    for axis in dim_axes
                    if axis not in axes.AXES
                ]
                problems += [
                    f"rule {table}.{dim}: axis {a!r} stands {n} times" for a, n in repeated(dim_axes)
                ]
        if self.zero not in (1, 2, 3):
            problems.append(f"zero is {self.zero!r}; allowed: 1, 2 or 3")
        if self.unnamed not in ("refuse", "replicate"):
            problems.append(f"unnamed is {self.unnamed!r}; allowed: 'refuse' or 'replicate'")
        if problems:
            raise problems_error("this layout cannot be used", problems)

    @property
    def sharded_rules(self) -> Rules:
        """dim -> axes of whatever is fully sharded: optimizer state, and parameters at zero=3."""
        return {**PARAMETER_RULES, **self.parameters}

    @property
    def parameter_rules(self) -> Rules:
        """dim -> axes of the parameters as they are stored."""
        if self.zero == 3:
            return self.sharded_rules
        return {d: _without(dim_axes, (axes.FSDP,)) for d, dim_axes in self.sharded_rules.items()}

    @property
    def activation_rules(self) -> Rules:
        """dim -> axes of activations, and of weights where they are used."""
        residual = (axes.TENSOR,) if self.sequence_sharded else ()
        # weights are gathered over the axes that shard the batch, as `embed` is
        used = {dim: _without(dim_axes, (axes.DATA, axes.FSDP)) for dim, dim_axes in self.parameters.items()}
        itself = {axis: (axis,) for axis in axes.AXES}
        return {**used, **itself, **ACTIVATION_RULES, axes.RESIDUAL_SEQ: residual, **self.activations}

    def rules_of_replica(self) -> Rules:
        """`activation_rules` inside one replica: without the axes whose indices are replicas."""
        replicas = self.replica_axes
        return {dim: _without(dim_axes, replicas) for dim, dim_axes in self.activation_rules.items()}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that share out the examples of a batch."""
        return self.activation_rules[axes.BATCH]

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The batch axes over which parameters are whole: each index computes a gradient of its own."""
        sharding = {axis for dim_axes in self.parameter_rules.values() for axis in dim_axes}
        return tuple(axis for axis in self.batch_axes if axis not in sharding)


def _without(dim_axes: tuple[str, ...], taken: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in dim_axes if axis not in taken)


def _is_axes(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(axis, str) for axis in value)


def mesh_problems(mesh: Mapping[str, int]) -> list[str]:
    """What is wrong with these axis sizes, one sentence each."""
    problems = [f"axis {near(axis, axes.AXES)}" for axis in mesh if axis not in axes.AXES]
    for axis, size in mesh.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            problems.append(
                f"axis {axis!r} has size {short(size)}; allowed: a whole number from 1, or -1 (the rest)"
            )
        elif size > MOST_DEVICES:
            problems.append(f"axis {axis!r} has size {short(size)}; allowed: at most {MOST_DEVICES}")
        elif axis in axes.AXES and axis not in BUILT_AXES and size != 1:
            problems.append(
                f"axis {axis!r} has size {size}, but is not built yet;"
                f" use {axis}=1 (built: {', '.join(BUILT_AXES)})"
            )
    rest = [axis for axis, size in mesh.items() if size == -1]
    if len(rest) > 1:
        problems.append(f"axes {rest} are all -1; at most one can be the rest")
    return problems


def repeated(names: Iterable[str]) -> list[tuple[str, int]]:
    """The names that stand more than once, with their counts."""
    return [(name, n) for name, n in Counter(names).items() if n > 1]


def parse_mesh(text: str) -> dict[str, int]:
    """Read axis sizes such as `data=2,fsdp=-1`.

    Raises:
      ValueError: a part that is not `axis=number`, an axis given twice.

    >>> parse_mesh("data=2,fsdp=-1")
    {'data': 2, 'fsdp': -1}
    """
    sizes: dict[str, int] = {}
    problems = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, equals, size = (p.strip() for p in part.partition("="))
        if not equals or not re.fullmatch("-?[0-9]{1,9}", size):
            problems.append(f"{short(part)} is not AXIS=NUMBER, as in data=2")
        elif axis in sizes:
            problems.append(f"axis {axis!r} is given twice: {sizes[axis]} and {size}; give it once")
        else:
            sizes[axis] = int(size)
    if problems:
        raise problems_error(f"mesh {text!r} cannot be read", problems)
    return sizes


def axis_sizes(layout: Layout, num_devices: int) -> dict[str, int]:
    """The size of every axis, with -1 replaced by what `num_devices` leaves.

    Raises:
      ValueError: the sizes do not multiply to `num_devices`.

    >>> axis_sizes(Layout(mesh={"data": 2, "tensor": -1}), 8)["tensor"]
    4
    """
    sizes = {axis: layout.mesh.get(axis, 1) for axis in axes.AXES}
    asked = ",".join(f"{axis}={size}" for axis, size in layout.mesh.items())
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest = [axis for axis, size in sizes.items() if size == -1]
    if rest and num_devices % fixed == 0:
        sizes[rest[0]] = num_devices // fixed
    if math.prod(sizes.values()) != num_devices:
        raise ValueError(mesh_size_text(asked, fixed, bool(rest), num_devices))
    return sizes


def _divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def mesh_size_text(asked: str, fixed: int, has_rest: bool, num_devices: int) -> str:
    """The error for a mesh that does not use exactly the devices there are."""
    divisors = ", ".join(map(str, _divisors(num_devices)))
    change = f"make the sizes multiply to {num_devices} (its divisors: {divisors}), or let one size be -1"
    if has_rest:
        change = f"make the other sizes multiply to a divisor of {num_devices} ({divisors})"
    needs = f"a multiple of {fixed} devices" if has_rest else f"{fixed} device{'s' if fixed > 1 else ''}"
    return (
        f"mesh {asked!r} needs {needs}, and there are {num_devices}; {change}."
        " On a CPU, --cpu-devices N simulates N devices."
    )


def read_layout(path: Path) -> Layout:
    """Read a layout from a TOML file: the fields of `Layout` by their names.

    Raises:
      ValueError: not TOML, an unknown key, or a layout that `Layout` refuses.
    """
    known = [f.name for f in fields(Layout)]
    try:
        values = tomllib.loads(read_text(path, MOST_FILE_BYTES))
    except OSError as error:
        raise ValueError(f"there is no layout file {path} to read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a layout in TOML: {error}") from error
    if unknown := [key for key in values if key not in known]:
        raise problems_error(f"{path} cannot be read", [f"unknown key {near(key, known)}" for key in unknown])
    try:
        return Layout(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: {error}") from error


def layout_text(layout: Layout) -> str:
    """A layout as TOML that `read_layout` reads back to an equal one."""
    lines = [
        f"zero = {layout.zero}",
        f"sequence_sharded = {str(layout.sequence_sharded).lower()}",
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
    """A TOML key: bare where it can be."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
