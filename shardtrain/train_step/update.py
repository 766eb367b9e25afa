"""Update a state by a gradient inside jit, unless loss or gradient is not finite.

Next: `step.py`, a mesh; `island_compute.py`, an island.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardtrain.functional.sums import GradientSquares, Sums
from shardtrain.optim.clip import TakesNorm
from shardtrain.optim.optimizer_state import make_storable, make_value_function
from shardtrain.train_step.drift import make_local_update
from shardtrain.train_step.placement import Placement, constrain
from shardtrain.train_step.state import Metrics, State, adjust_loss_scale, is_overflow

Update = Callable[[State], State]
"""State before a step -> state after it, in a jit."""


def keep_unless_skipped(
    update: Update,
    placement: Placement,
    state: State,
    metrics: Metrics,
    learning_rate: optax.Schedule | None,
    own_finite: jax.Array | None = None,
) -> tuple[State, Metrics]:
    """Return the updated state if loss and gradient are finite, else the old one; the step counter advances.

    Args:
      update: makes the state after the step.
      placement: the placement of the state, which says whether this island computes in float16.
      state: the state before the step.
      metrics: the metrics of the step.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
      own_finite: whether this island's own gradients are finite. If given, the metrics already have
        "overflowed", the number of islands whose gradients overflowed; None takes both from the metrics.
    """
    # checking the update instead would keep all of it in memory until its norm is known
    finite = jnp.isfinite(metrics["loss_sum"]) & jnp.isfinite(metrics["grad_norm"])

    def updated(state: State) -> State:
        # keep the dtype of the old state: optax computes moments of bfloat16 parameters in float32
        return jax.tree.map(lambda new, old: new.astype(old.dtype), update(state), state)

    if placement.replica_is_one_cpu:
        # a CPU would copy the moments before a choice between old and new ones; a GPU would wait for a branch
        kept = jax.lax.cond(finite, updated, lambda state: state, state)
    else:
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated(state), state)
    metrics = {**metrics, "skipped": 1.0 - finite}
    if learning_rate is not None:
        metrics["learning_rate"] = learning_rate(state.step)
    kept = kept._replace(step=state.step + 1, loss_scale=state.loss_scale)
    if not state.loss_scale:
        return kept, metrics
    metrics["loss_scale"] = state.loss_scale.scale
    if own_finite is None:
        over = placement.in_float16 & is_overflow(state.loss_scale, metrics["loss_sum"], finite)
        metrics["overflowed"] = jnp.float32(over)
    return kept._replace(
        loss_scale=adjust_loss_scale(state.loss_scale, finite if own_finite is None else own_finite)
    ), metrics


def apply_gradients(
    optimizer: optax.GradientTransformation,
    placement: Placement,
    state: State,
    found: Sums,
    grad_norm: jax.Array | None = None,
    compute: Callable[[Any], Sums] | None = None,
) -> State:
    """Return the state after an update, for use inside jit.

    Args:
      optimizer: the optimizer.
      placement: the shardings of the state.
      state: the state before the step.
      found: the gradient, combined over replicas.
      grad_norm: its norm; None lets an optimizer that clips compute it.
      compute: parameters -> loss and gradient there, for line searches; None if they cannot be computed.
    """
    mesh, specs = placement.mesh, placement.specs
    # the update is computed in shards, even if parameters are replicated (ZeRO-1 and 2)
    grads = constrain(found.grads, specs.sharded, mesh)
    params = constrain(state.params, specs.sharded, mesh)
    extra: dict[str, Any] = {"value": found.mean_loss, "grad": grads}
    if isinstance(optimizer, TakesNorm):
        extra["grad_norm"] = grad_norm
    # line searches evaluate the loss at other parameters
    if compute is not None:

        def value_and_grad(params: Any) -> tuple[jax.Array, Any]:
            other = compute(params)
            return other.mean_loss, constrain(other.grads, specs.sharded, mesh)

        extra["value_fn"] = make_value_function(value_and_grad, state.params)
    updates, opt_state = make_storable(optimizer).update(grads, state.opt_state, params, **extra)
    params = optax.apply_updates(params, updates)
    return state._replace(params=params, model_state=found.model_state, opt_state=opt_state)


def compute_gradient_metrics(found: Sums) -> Metrics:
    """Return the metrics of a step from the sums of its batch, for use inside jit."""
    norm = optax.tree.norm(found.grads)
    metrics = {**found.logged, "grad_norm": norm}
    return {**metrics, **estimate_noise(found.squares, norm, found.count)} if found.squares else metrics


def estimate_noise(squares: GradientSquares, norm: jax.Array, count: jax.Array) -> dict[str, Any]:
    """Estimate the true gradient and the noise of one example from one step, without bias.

    Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training",
    https://arxiv.org/abs/1812.06162, appendix A.1. `plan/advice/noise_scale.py` smooths them over steps.
    A gradient S_i of a sum over c_i examples has E|S_i|^2 = c_i^2 |G|^2 + c_i tr(Sigma), and so has the
    gradient of the sum over all C examples. Both unknowns follow from these two, however unequal the c_i are.
    A single estimate is mostly noise, and the estimate of |G|^2 may be negative: average over many steps.

    Args:
      squares: sums over all gradients S_i of the step.
      norm: float32 scalar, the norm of the gradient of the mean over all examples.
      count: float32 scalar, C.

    Returns:
      Name -> (value, weight): |G|^2, tr(Sigma) and C; the weight is 0 if one gradient has all examples.
    """
    whole = jnp.square(jnp.where(count > 0, count, 1))
    norms, counts = squares.norms / whole, squares.counts / whole
    # 1 / number of gradients, if these are of equally many examples
    known = (counts > 0) & (counts < 1 - 1e-5)
    square = (jnp.square(norm) - norms) / jnp.where(known, 1 - counts, 1)
    trace = count * (norms - counts * square)
    weight = jnp.float32(known)
    found = {"gradient_square": square, "gradient_trace": trace, "gradient_batch": count}
    return {name: (jnp.where(known, value, 0), weight) for name, value in found.items()}


OwnUpdate = Callable[[State, Sums, jax.Array], tuple[State, Metrics]]
"""(state, sums of the batch with the gradient of the mean loss, its norm) -> (state, metrics), in a jit."""


def make_own_update(
    optimizer: optax.GradientTransformation, placement: Placement, learning_rate: optax.Schedule | None
) -> OwnUpdate:
    """Make the update of an island's own optimizer, which also adds up metrics until the next merge.

    Args:
      optimizer: the optimizer.
      placement: the placement of the state.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
    """
    local_update = make_local_update(optimizer)

    def update(state: State, found: Sums, norm: jax.Array) -> tuple[State, Metrics]:
        def updated(state: State) -> State:
            params = constrain(state.params, placement.specs.sharded, placement.mesh)
            local = state.local
            opt_state, drift = local_update(
                params, local.drift, state.opt_state, found.grads, found.count, found.mean_loss
            )
            local = local._replace(
                drift=drift, count=local.count + found.count, model_state=found.model_state
            )
            return state._replace(opt_state=opt_state, local=local)

        metrics = {**found.logged, "grad_norm": norm}
        new, metrics = keep_unless_skipped(updated, placement, state, metrics, learning_rate)
        sums = jax.tree.map(jnp.add, state.local.sums, make_step_sums(metrics))
        return new._replace(local=new.local._replace(sums=sums)), metrics

    return update


def make_step_sums(metrics: Metrics) -> dict[str, Any]:
    """Return the sums that are added up over local steps; all but "skipped" are 0 in a skipped step."""
    skipped = metrics["skipped"]
    sums = {
        "loss_sum": metrics["loss_sum"],
        "count": metrics["count"],
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, tuple)},
        "squares": metrics["grad_norm"] ** 2,
        "steps": jnp.where(metrics["count"] > 0, 1.0, 0.0),
    }
    return {**jax.tree.map(lambda x: jnp.where(skipped > 0, 0, x), sums), "skipped": skipped}


def find_sum_shapes(metrics: Any) -> dict[str, Any]:
    """Return the shapes of `make_step_sums`, for a loss with these metrics."""
    zero = jax.ShapeDtypeStruct((), jnp.float32)
    names = ("loss_sum", "count", "grad_norm", "skipped")
    return jax.eval_shape(
        make_step_sums, {**jax.tree.map(lambda _: zero, metrics), **dict.fromkeys(names, zero)}
    )


def add_island_sums(metrics: Metrics, merged: Metrics, zeros: dict[str, Any]) -> Metrics:
    """Join the metrics of a local step and of its merge, with the loss of all islands if it is known.

    Args:
      metrics: the metrics of this island's step.
      merged: the metrics of its merge; "sums" has the sums of all islands since the last merge that had them.
      zeros: sums (see `make_step_sums`) of no steps.
    """
    sums = merged.pop("sums", None)
    if sums is None:
        return {**metrics, **select_loss_metrics(zeros), **merged}
    return {**metrics, **make_merge_metrics(sums), **merged}


def make_merge_metrics(sums: dict[str, Any]) -> Metrics:
    """Return the metrics of all islands from `make_step_sums` over their steps since the last merge."""
    return {
        **select_loss_metrics(sums),
        "grad_norm": jnp.sqrt(sums["squares"] / jnp.maximum(sums["steps"], 1)),
        "skipped_by_islands": sums["skipped"],
    }


def select_loss_metrics(sums: dict[str, Any]) -> Metrics:
    """Select the metrics of the loss from `make_step_sums`."""
    return {"loss_sum": sums["loss_sum"], "count": sums["count"], **sums["metrics"]}
