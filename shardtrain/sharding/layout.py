"""A layout: sizes of mesh axes, and rules that map each dim to the axes that shard it. No jax.

Next: `layout_file.py` reads it from a file; `resolve.py` joins it with the dim names of a model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardtrain import axes
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import near, refuse
from shardtrain.sharding.axis_sizes import find_mesh_problems, parse_mesh
from shardtrain.sharding.rules import ACTIVATION_RULES, PARAMETER_RULES, Rules, find_repeated
from shardtrain.sharding.single_arrays import Shards, find_form_problems, is_operator

ContextAttentions = Literal["ring", "all-gather", "all-to-all"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of mesh axes, and rules that map each dim to the axes that shard it.

    Args:
      mesh: axis -> size; axes that are left out have size 1, one size may be -1 (the remaining devices).
      zero: which arrays the axis fsdp shards. 3: parameters, gradients and optimizer state; 2: gradients and
        optimizer state; 1: optimizer state (Rajbhandari et al. 2020, ZeRO, section 5). 1 and 2 compile
        to the same step: gradients are replicated while they are accumulated, and sharded afterwards.
      sequence_sharded: sequence parallelism: shard activations between blocks along the sequence, over the
        axis tensor (Korthikanti et al. 2022, section 4.2.2).
      collective_matmul: with `sequence_sharded`, models of this library multiply one part of a sequence
        while the next part is sent, instead of gathering the sequence before a matrix product and summing
        the results after it (Wang et al. 2023, Overlap Communication with Dependent Computation via
        Decomposition, section 3).
      context_attention: how attention is computed if the axis context shards sequences. "ring": keys and
        values are sent around a ring of devices, and causal work is balanced (Liu et al. 2023, Ring
        Attention, section 3); "all-gather": each device gathers all keys and values; "all-to-all": devices
        exchange sequences for heads, which context must divide (Jacobs et al. 2023, DeepSpeed Ulysses,
        section 3).
      parameters: dim -> axes for parameters; dims that are left out have the default rules of
        `sharding/rules.py`.
      activations: dim -> axes for activations; dims that are left out have the default rules. A custom dim
        with a rule only for parameters has the same axes here, without data and fsdp.
      operators: shardings of single operators and parameters in place of rules: the name of an operator, such
        as "blocks/up/kernel:dot_general", or the path of a parameter -> axis (data, fsdp or tensor) -> the
        dim that it splits: "0" or "1" of a result or a parameter, or "sum0", which an operator sums over.
      unnamed: on several devices, what happens to arrays whose dims have no names, and to dims whose names
        have no rule: "refuse" raises an error, "replicate" replicates them, "shard" shards an array without
        names over fsdp along its largest dim that fsdp divides, and replicates the rest.

    Short forms: axis sizes, as a dict or as the text `data=2,fsdp=-1`.

    Raises:
      ValueError: lists every unknown axis, bad size and bad option.

    >>> Layout(mesh={"data": 2, "tensor": 4}).batch_axes
    ('data', 'fsdp')
    """

    mesh: Mapping[str, int] = field(default_factory=lambda: {axes.DATA: -1})
    zero: int = 3
    sequence_sharded: bool = False
    collective_matmul: bool = False
    context_attention: ContextAttentions = "ring"
    parameters: Rules = field(default_factory=dict)
    activations: Rules = field(default_factory=dict)
    operators: Mapping[str, Shards] = field(default_factory=dict)
    unnamed: str = "refuse"

    @staticmethod
    def short(value: object) -> dict[str, object] | None:
        """Return the fields that a short form sets; None if the value is not a short form."""
        if isinstance(value, str):
            return {"mesh": parse_mesh(value)}
        return {"mesh": value} if isinstance(value, Mapping) else None

    def __post_init__(self) -> None:
        problems = [*wrong_types(self), *find_mesh_problems(self.mesh)]
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
                    f"rule {table}.{dim}: axis {a!r} occurs {n} times" for a, n in find_repeated(dim_axes)
                ]
        problems += find_form_problems(self.operators)
        if self.zero not in (1, 2, 3):
            problems.append(f"zero is {self.zero!r}; allowed: 1, 2 or 3")
        if self.collective_matmul and not self.sequence_sharded:
            problems.append(
                "collective_matmul multiplies parts of a sequence that is sharded over tensor, and"
                " sequence_sharded is False; set it too (--sequence-sharded)"
            )
        if self.unnamed not in ("refuse", "replicate", "shard"):
            problems.append(f"unnamed is {self.unnamed!r}; allowed: 'refuse', 'replicate' or 'shard'")
        refuse("this layout cannot be used", problems)

    @property
    def sharded_rules(self) -> Rules:
        """Dim -> axes of fully sharded arrays: optimizer state, and parameters at zero=3."""
        return {**PARAMETER_RULES, **self.parameters}

    @property
    def parameter_rules(self) -> Rules:
        """Dim -> axes of the parameters as they are stored between steps."""
        if self.zero == 3:
            return self.sharded_rules
        return {d: _remove(dim_axes, (axes.FSDP,)) for d, dim_axes in self.sharded_rules.items()}

    @property
    def activation_rules(self) -> Rules:
        """Dim -> axes of activations, and of weights while they are used."""
        residual = (axes.CONTEXT, axes.TENSOR) if self.sequence_sharded else (axes.CONTEXT,)
        # weights are gathered over the axes that shard the batch, as `embed` is
        used = {dim: _remove(dim_axes, (axes.DATA, axes.FSDP)) for dim, dim_axes in self.parameters.items()}
        # a model may also use the name of a mesh axis, which is mapped to itself
        itself = {axis: (axis,) for axis in axes.AXES}
        # each device of the axis expert has examples of its own, as with fsdp
        examples = (axes.DATA, axes.FSDP) + (axes.EXPERT,) * (self.mesh.get(axes.EXPERT, 1) != 1)
        own = {axes.BATCH: examples, axes.RESIDUAL_SEQ: residual}
        return {**used, **itself, **ACTIVATION_RULES, **own, **self.activations}

    @property
    def tracing(self) -> tuple[str, str, bool]:
        """The fields that change how a model is traced: unnamed, context_attention, collective_matmul."""
        return self.unnamed, self.context_attention, self.collective_matmul

    def rules_of_replica(self) -> Rules:
        """Return `activation_rules` inside one replica, without the replica axes."""
        replicas = self.replica_axes
        return {dim: _remove(dim_axes, replicas) for dim, dim_axes in self.activation_rules.items()}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that shard the examples of a batch."""
        return self.activation_rules[axes.BATCH]

    @property
    def of_parameters(self) -> Mapping[str, Shards]:
        """The shardings of single parameters, by path."""
        return {name: shards for name, shards in self.operators.items() if not is_operator(name)}

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The batch axes over which parameters are replicated: each index computes its own gradient."""
        sharding = {axis for dim_axes in self.parameter_rules.values() for axis in dim_axes}
        sharding |= {axis for shards in self.operators.values() for axis in shards}
        return tuple(axis for axis in self.batch_axes if axis not in sharding)


def _remove(dim_axes: tuple[str, ...], taken: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in dim_axes if axis not in taken)


def _is_axes(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(axis, str) for axis in value)
