"""Trace the loss and the gradient of any Flax model into a program with named dims, without devices.

The constraints of the model name the dims of its activations, the model's own names those of its parameters;
`named_dims.py` carries them through all other operations, and `fusion.py` makes kernels of these.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from shardtrain import axes
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.float_gradients import value_and_grad
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key
from shardtrain.plan.devices import find_device
from shardtrain.plan.jaxpr_walk import Walk, num_terms
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS, Dims, Program
from shardtrain.plan.traced_attention import TracedAttention, make_planned_flash
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.replica_sums import BoundModel


class Exchange(NamedTuple):
    """What devices compute by hand in a layout, so that it is another program.

    Args:
      attention: over context, as `Layout.context_attention`; None: sequences are whole.
      experts: size of the axis expert.
      context: of the axis context, into whose parts of sequences experts take their tokens.
    """

    attention: str | None = None
    experts: int = 1
    context: int = 1


NO_EXCHANGE = Exchange()


def exchange_of(layout: Layout, sizes: Mapping[str, int]) -> Exchange:
    """Return what devices compute by hand in a layout."""
    context = sizes.get(axes.CONTEXT, 1)
    attention = layout.context_attention if context > 1 else None
    return Exchange(attention, sizes.get(axes.EXPERT, 1), context)


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
    platform = ANY_DEVICE if (known := find_device(kind)) is None else known.platform
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    types = (AxisType.Auto,) * len(every)
    mesh = AbstractMesh((1,) * len(every), tuple(every), axis_types=types, abstract_device=device)
    rules = {name: (name,) for name in every}
    of_plan: dict[str, Any] = {"attention": attention, "experts": experts}
    of_plan["flash"] = make_planned_flash(kind, has_flash=target.has_flash)
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


def flops_by_item_bytes(program: Program) -> Counter[int]:
    """Return bytes of an element -> the flops of a program that are computed from such elements."""
    flops: Counter[int] = Counter()
    for kernel in program.kernels:
        if kernel.body is not None:
            inside = flops_by_item_bytes(kernel.body)
            flops.update({size: kernel.trips * number for size, number in inside.items()})
        elif kernel.flops:
            flops[max(program.arrays[number].item_bytes for number in kernel.reads)] += round(kernel.flops)
    return flops


def make_loss(model: Model, loss: Loss, rows: int) -> Callable[..., Any]:
    """Return (parameters, model state, key, batch) -> (loss sum, (count, metrics, model state))."""

    def loss_sum(params: Any, model_state: Any, key: jax.Array, batch: Any) -> Any:
        bound = BoundModel(model, params, model_state, row_key(key, 0, rows))
        total, count, metrics = sum_loss(loss, bound, batch)
        return total, (count, metrics, bound.model_state)

    return loss_sum


def loss_program(
    model: Model,
    loss: Loss,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    gradient: bool,
    attention: TracedAttention | None,
    experts: TracedExperts,
    target: Target,
) -> Program:
    """Trace the program of a loss.

    Args:
      model: with the recomputation that it is planned for.
      loss: returns (sum, count), see `loss.Loss`.
      batch: name -> shape (B, ...) and dtype.
      gradient: whether the gradient of the parameters is computed too.
      attention: what the model gets as the attention of the run; None: it computes its own.
      experts: likewise for the exchange of experts.
      target: the devices in whose form the model is traced.
    """
    params, model_state = jax.eval_shape(model.init, new_key(0))
    loss_sum = make_loss(model, loss, next(iter(batch.values())).shape[0])
    differentiated = value_and_grad(loss_sum)
    inputs = (params, model_state, jax.eval_shape(lambda: new_key(0)), dict(batch))
    names = [
        *jax.tree.leaves(model.dims, is_leaf=is_dims),
        *(None for _ in jax.tree.leaves((model_state, inputs[2]))),
        *((axes.BATCH, *(None for _ in x.shape[1:])) for x in jax.tree.leaves(inputs[3])),
    ]
    others = jax.tree.leaves(jax.eval_shape(loss_sum, *inputs))
    of_run: dict[str, Any] = {"attention": attention, "experts": experts, "target": target}
    if not gradient:
        no_names, no_parameters = [None] * len(others), [False] * len(others)
        return trace(loss_sum, inputs, names, no_names, no_parameters, **of_run)
    results = [*(None for _ in others), *jax.tree.leaves(model.dims, is_leaf=is_dims)]
    of_parameters = [False] * len(others) + [True] * len(jax.tree.leaves(params))
    return trace(differentiated, inputs, names, results, of_parameters, **of_run)


def is_dims(leaf: object) -> bool:
    """Return whether a leaf of a model's dims names the dims of an array; None: it has none."""
    return leaf is None or isinstance(leaf, tuple)
