"""The traced program of a model's loss, with its gradient or alone.

`subject.py` asks for one for each way to recompute and each exchange.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax

from shardtrain import axes
from shardtrain.functional.auxiliary import summed_loss
from shardtrain.functional.float_gradients import value_and_grad
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key, row_key
from shardtrain.plan.program import Program
from shardtrain.plan.trace import Target, trace
from shardtrain.plan.traced_attention import TracedAttention
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.train_step.replica_sums import BoundModel


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


def loss_of(model: Model, loss: Loss, rows: int) -> Callable[..., Any]:
    """Return (parameters, model state, key, batch) -> (loss sum, (count, metrics, model state))."""

    def loss_sum(params: Any, model_state: Any, key: jax.Array, batch: Any) -> Any:
        bound = BoundModel(model, params, model_state, row_key(key, 0, rows))
        total, count, metrics = summed_loss(loss, bound, batch)
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
    loss_sum = loss_of(model, loss, next(iter(batch.values())).shape[0])
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
