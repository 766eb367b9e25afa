"""A layout: axis sizes, and the rules that give each dim its axes. No jax.

Its file is read in `layout_file.py`. Next: `resolve.py`, which joins a layout with the dim names of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardtrain import axes
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, problems_error
from shardtrain.sharding.axis_sizes import mesh_problems, parse_mesh
from shardtrain.sharding.rules import ACTIVATION_RULES, PARAMETER_RULES, Rules, repeated


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
