"""Trace the loss and the gradient of any Flax model into a program with named dims, without devices.

The constraints of the model name the dims of its activations, the model's own names those of its parameters;
`named_dims.py` carries them through all other operations, and `fusion.py` makes kernels of these.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from shardtrain import axes
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.plan.devices import known_device
from shardtrain.plan.jaxpr_walk import Walk
from shardtrain.plan.partial_sums import num_terms
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS, Dims, Program
from shardtrain.plan.traced_attention import planned_flash

ANY_DEVICE = "any"
"""The kind of a device whose program is not fitted to it."""


class Target(NamedTuple):
    """The devices in whose form models are traced.

    Attributes:
      device_kind: their name by jax.
      one_device: whether the program is for one of them alone.
      has_flash: whether flash attention of known NVIDIA GPUs is counted where models choose it, as in a run;
        False for a program that is compiled without such a GPU.
    """

    device_kind: str = ANY_DEVICE
    one_device: bool = False
    has_flash: bool = True


ANY_TARGET = Target()


def trace(
    function: Callable[..., Any],
    inputs: Any,
    names: Sequence[Dims | None],
    results: Sequence[Dims | None],
    of_parameters: Sequence[bool],
    *,
    attention: Any = None,
    experts: Any = None,
    target: Target = ANY_TARGET,
) -> Program:
    """Trace a function into a program.

    Args:
      function: its arrays are the leaves of its arguments and results.
      inputs: its arguments, trees of shapes.
      names: for each array of its arguments the names of its dims; None if it has none.
      results: the same for each array of its results.
      of_parameters: for each array of its results whether it is the gradient of a parameter.
      attention: what models get as attention, see `TracedAttention`; None: each computes its own.
      experts: what mixtures of experts get as their exchange, see `TracedExperts`; likewise.
      target: the devices in whose form models are traced.

    Returns:
      The program of unsharded arrays.
    """
    # a mesh with an axis for each dim, all of size 1: then a constraint's spec is the names of the dims
    known = {name for dims in (*names, *results) for name in dims or () if name}
    every = sorted(known | set(axes.DIMS) | {ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS})
    kind = target.device_kind
    platform = ANY_DEVICE if (known := known_device(kind)) is None else known.platform
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    types = (AxisType.Auto,) * len(every)
    mesh = AbstractMesh((1,) * len(every), tuple(every), axis_types=types, abstract_device=device)
    rules = {name: (name,) for name in every}
    of_plan: dict[str, Any] = {"attention": attention, "experts": experts}
    of_plan["flash"] = planned_flash(kind, has_flash=target.has_flash)
    with activation_rules(rules, mesh, "replicate", **of_plan, any_mesh=not target.one_device):
        traced = jax.make_jaxpr(function)(*inputs)
    walk = Walk(for_gpus=platform == "gpu")
    of_inputs = [
        walk.add(variable.aval, dims) for variable, dims in zip(traced.jaxpr.invars, names, strict=True)
    ]
    walk.bind(traced.jaxpr.invars, of_inputs)
    outputs = walk.run(traced.jaxpr)
    for number, dims, of_parameter in zip(outputs, results, of_parameters, strict=True):
        walk.result(number, dims, of_parameter)
    makers = {number: step for step in walk.steps for number in step.writes}
    terms = tuple(num_terms(number, makers, walk.constants) for number in outputs)
    return replace(walk.program(of_inputs, outputs), num_terms=terms)
