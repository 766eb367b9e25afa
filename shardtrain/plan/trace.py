"""Trace the loss and gradient of any Flax model into a program with named dims, without devices.

The constraints of the model name the dims of activations, the model names the dims of its parameters.
`named_dims.py` derives the names of all other dims, and `fusion.py` makes kernels.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from shardtrain.jaxpr.operators import OperatorPass, run_operators
from shardtrain.plan.devices import find_device
from shardtrain.plan.jaxpr_walk import Walk, count_terms
from shardtrain.plan.named_dims import merge_numbers, number_channels
from shardtrain.plan.program import ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS, Dims, Program
from shardtrain.plan.traced_attention import TracedAttention, plan_attention
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.train_step.replica_sums import BoundModel


class Exchange(NamedTuple):
    """Layout options that replace model operations by per-device code, and so change the traced program.

    Args:
      attention: attention over context, as `Layout.context_attention`; None for whole sequences.
      experts: size of the axis expert.
      context: size of the axis context, over which experts split their tokens.
    """

    attention: str | None = None
    experts: int = 1
    context: int = 1


NO_EXCHANGE = Exchange()


ANY_DEVICE = "any"
"""Kind of a device that no known device matches."""


class Target(NamedTuple):
    """The devices for which models are traced.

    Args:
      device_kind: their name in jax.
      one_device: whether the program is for a single device.
      has_flash: whether models may choose flash attention on known NVIDIA GPUs, as in a run. False is for
        programs that are compiled without such a GPU.
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
      function: the function.
      inputs: its arguments, trees of shapes.
      names: dim names of each array of its arguments; None for no names.
      results: dim names of each array of its results.
      of_parameters: whether each array of its results is the gradient of a parameter.
      attention: replaces the attention of models, see `TracedAttention`. None replaces nothing.
      experts: replaces the exchange of mixtures of experts, see `TracedExperts`. None replaces nothing.
      target: the devices for which models are traced.

    Returns:
      The program of unsharded arrays.
    """
    # the mesh has an axis of size 1 for each dim, so that the spec of a constraint names dims
    known = {name for dims in (*names, *results) for name in dims or () if name}
    every = sorted(
        {name for name in known if ":" not in name} | set(axes.DIMS) | {ARRIVED, ARRIVED_TOKENS, EXPERT_SLOTS}
    )
    kind = target.device_kind
    platform = ANY_DEVICE if (device := find_device(kind)) is None else device.platform
    abstract = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    types = (AxisType.Auto,) * len(every)
    mesh = AbstractMesh((1,) * len(every), tuple(every), axis_types=types, abstract_device=abstract)
    rules = {name: (name,) for name in every}
    planned = plan_attention(kind, has_flash=target.has_flash)
    ops = {"attention": attention, "experts": experts, "devices": (planned.device,)}
    ops["replace_attention"] = planned.replace
    with activation_rules(rules, mesh, "replicate", any_mesh=not target.one_device, **ops):
        traced = jax.make_jaxpr(function)(*inputs)
    walk = Walk(for_gpus=platform == "gpu")
    numbers = walk.add_inputs(traced.jaxpr, names)
    outputs = walk.run(traced.jaxpr, numbers)
    for number, dims, of_parameter in zip(outputs, results, of_parameters, strict=True):
        walk.name_result(number, dims, of_parameter)
    makers = {number: each for each in walk.operations for number in each.writes}
    terms = tuple(count_terms(number, makers, walk.constants) for number in outputs)
    program = replace(walk.finish(numbers, outputs), num_terms=terms)
    return _rename(program, merge_numbers(walk.alike)) if walk.alike else program


def _rename(program: Program, rename: Callable[[str], str]) -> Program:
    """Return a program with other names of dims."""

    def rename_all(dims: Iterable[str | None]) -> tuple[str | None, ...]:
        return tuple(name and rename(name) for name in dims)

    return replace(
        program,
        arrays=tuple(replace(each, dims=rename_all(each.dims)) for each in program.arrays),
        kernels=tuple(
            replace(
                each, dims=frozenset(map(rename, each.dims)), body=each.body and _rename(each.body, rename)
            )
            for each in program.kernels
        ),
        reshardings=tuple(
            replace(each, before=rename_all(each.before), summed=tuple(map(rename, each.summed)))
            for each in program.reshardings
        ),
    )


def count_flops_by_item_bytes(program: Program) -> Counter[int]:
    """Return bytes of an element -> flops that a program computes from such elements."""
    flops: Counter[int] = Counter()
    for kernel in program.kernels:
        if kernel.body is not None:
            inside = count_flops_by_item_bytes(kernel.body)
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


def trace_loss(
    model: Model,
    loss: Loss,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    gradient: bool,
    attention: TracedAttention | None,
    experts: TracedExperts,
    target: Target,
    scoped: bool = False,
) -> Program:
    """Trace the loss of a model, and its gradient if asked for, into a program.

    Args:
      model: the model, with the remat policy to plan for.
      loss: returns (sum, count), see `loss.Loss`.
      batch: name -> shape (B, ...) and dtype.
      gradient: whether to trace the gradient of the parameters.
      attention, experts, target: see `trace`.
      scoped: whether kernels have the names of operators of the model, see `jaxpr/operators.py`.
    """
    params, model_state = jax.eval_shape(model.init, new_key(0))
    loss_sum = make_loss(model, loss, next(iter(batch.values())).shape[0])
    loss_sum = run_operators(loss_sum, OperatorPass(scoped=True)) if scoped else loss_sum
    differentiated = value_and_grad(loss_sum)
    inputs = (params, model_state, jax.eval_shape(lambda: new_key(0)), dict(batch))
    of_parameters: Sequence[Dims | None] = jax.tree.leaves(model.dims, is_leaf=is_dims)
    if scoped:
        of_parameters = [dims and number_channels(dims, i) for i, dims in enumerate(of_parameters)]
    names = [
        *of_parameters,
        *(None for _ in jax.tree.leaves((model_state, inputs[2]))),
        *((axes.BATCH, *(None for _ in x.shape[1:])) for x in jax.tree.leaves(inputs[3])),
    ]
    others = jax.tree.leaves(jax.eval_shape(loss_sum, *inputs))
    of_run: dict[str, Any] = {"attention": attention, "experts": experts, "target": target}
    if not gradient:
        no_names, no_parameters = [None] * len(others), [False] * len(others)
        return trace(loss_sum, inputs, names, no_names, no_parameters, **of_run)
    results = [*(None for _ in others), *of_parameters]
    is_parameter = [False] * len(others) + [True] * len(of_parameters)
    return trace(differentiated, inputs, names, results, is_parameter, **of_run)


def is_dims(leaf: object) -> bool:
    """Return whether an object names the dims of an array, or is None for an array without names."""
    return leaf is None or isinstance(leaf, tuple)
