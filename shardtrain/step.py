"""One compiled step: gradients over microbatches and replicas, one reduction, one update.

Each index of the replica axes computes a gradient of its own: a leading dim, sharded over these
axes, made by vmap. So the scan over microbatches adds up what one device holds, without any
collective over them, and the sum over that dim is the step's one reduction.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain import axes
from shardtrain.loss import Batch, Loss, checked
from shardtrain.model import Model, activation_rules
from shardtrain.rng import row_key, step_key
from shardtrain.state import Placement, State

Metrics = dict[str, Any]
Step = Callable[[State, Batch], tuple[State, Metrics]]


class Gradients(NamedTuple):
    """The gradients of one batch, and what was computed on the way.

    Args:
      loss_sum: float32 scalar.
      count: float32 scalar, examples or tokens.
      grads: like params, float32; of loss_sum / count.
      model_state: the model's state after the batch.
      metrics: name -> (sum, count), of the loss's own metrics.
    """

    loss_sum: jax.Array
    count: jax.Array
    grads: Any
    model_state: Any
    metrics: dict[str, tuple[jax.Array, jax.Array]]


def _constrained(tree: Any, specs: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda x, spec: with_sharding_constraint(x, NamedSharding(mesh, spec)), tree, specs)


def make_gradients(
    model: Model, loss: Loss, placement: Placement
) -> Callable[[Any, Any, jax.Array, Batch], Gradients]:
    """The gradient of the mean loss of a batch, for use inside jit.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      placement: where everything lies.

    Returns:
      (params, model_state, key, batch) -> `Gradients`; every array of the batch has shape
      (microbatches, rows, ...). Gradients are sharded as `Specs.sharded` says.
    """
    mesh, layout, specs = placement.mesh, placement.layout, placement.specs
    replica_axes = layout.replica_axes
    num_replicas = math.prod(mesh.shape[axis] for axis in replica_axes)
    row_axes = tuple(axis for axis in layout.batch_axes if axis not in replica_axes)
    rules = {**layout.activation_rules, axes.BATCH: row_axes}

    def loss_of_replica(
        params: Any, model_state: Any, key: jax.Array, first_row: jax.Array, batch: Batch
    ) -> tuple[jax.Array, Any]:
        num_rows = jax.tree.leaves(batch)[0].shape[0]
        bound = _Bound(model, params, model_state, row_key(key, first_row, num_rows))
        loss_sum, count, metrics = checked(loss(bound, batch))
        # a share that is all padding leaves no trace
        model_state = jax.tree.map(lambda n, o: jnp.where(count > 0, n, o), bound.model_state, model_state)
        return loss_sum, (count, metrics, model_state)

    grad = jax.vmap(
        jax.value_and_grad(loss_of_replica, has_aux=True),
        in_axes=(None, 0, None, 0, 0),
        spmd_axis_name=replica_axes or None,
    )

    def gradients(params: Any, model_state: Any, key: jax.Array, batch: Batch) -> Gradients:
        num_microbatches, num_rows = jax.tree.leaves(batch)[0].shape[:2]
        batch = jax.tree.map(lambda x: x.reshape(x.shape[0], num_replicas, -1, *x.shape[2:]), batch)
        share = PartitionSpec(None, replica_axes, row_axes)
        batch = _constrained(batch, jax.tree.map(lambda _: share, batch), mesh)
        shares = jnp.arange(num_microbatches * num_replicas, dtype=jnp.uint32)
        first_rows = (shares * (num_rows // num_replicas)).reshape(num_microbatches, num_replicas)
        replica_specs = jax.tree.map(
            lambda spec: PartitionSpec(replica_axes, *spec),
            specs.params,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

        def microbatch(carry: Any, inputs: Any) -> tuple[Any, None]:
            model_state, sums = carry
            (loss_sum, (count, metrics, model_state)), grads = grad(params, model_state, key, *inputs)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            grads = _constrained(grads, replica_specs, mesh)
            return (model_state, jax.tree.map(jnp.add, sums, (loss_sum, count, metrics, grads))), None

        model_state = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_replicas, *x.shape)), model_state)
        inputs = (first_rows, batch)
        with activation_rules(rules, mesh):
            first = jax.tree.map(lambda x: x[0], inputs)
            (loss_sum, (count, metrics, _)), grads = jax.eval_shape(grad, params, model_state, key, *first)
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (loss_sum, count, metrics, grads))
            zeros = (*zeros[:3], _constrained(zeros[3], replica_specs, mesh))
            (model_state, sums), _ = jax.lax.scan(microbatch, (model_state, zeros), inputs)

        counts = sums[1]
        loss_sum, count, metrics = jax.tree.map(lambda x: x.sum(0), sums[:3])
        shares = jnp.where(count > 0, counts / count, 1 / num_replicas)
        grads = jax.tree.map(
            lambda g, spec: _sum_replicas(g, spec, replica_axes, mesh), sums[3], specs.sharded
        )
        return Gradients(
            loss_sum=loss_sum,
            count=count,
            grads=jax.tree.map(lambda g: g / jnp.where(count > 0, count, 1), grads),
            model_state=jax.tree.map(lambda x: _merge_replicas(x, shares), model_state),
            metrics=metrics,
        )

    return gradients


def _sum_replicas(
    grads: jax.Array, spec: PartitionSpec, replica_axes: tuple[str, ...], mesh: Mesh
) -> jax.Array:
    """The sum over the leading dim, the fastest axis first, so that the slower ones reduce shards only."""
    for i in reversed(range(len(replica_axes))):
        grads = grads.reshape(-1, mesh.shape[replica_axes[i]], *grads.shape[1:]).sum(1)
        grads = with_sharding_constraint(grads, NamedSharding(mesh, PartitionSpec(replica_axes[:i], *spec)))
    return grads[0]


class _Bound:
    """A model bound to its parameters and rng: what a loss calls. Keeps the state the call leaves."""

    def __init__(
        self, model: Model, params: Any, model_state: Any, rng: jax.Array, train: bool = True
    ) -> None:
        self.model, self.params, self.rng, self.train = model, params, rng, train
        self.model_state = model_state

    def __call__(self, *inputs: Any) -> Any:
        outputs, self.model_state = self.model.apply(
            self.params, self.model_state, self.rng, self.train, *inputs
        )
        return outputs


def _merge_replicas(x: jax.Array, shares: jax.Array) -> jax.Array:
    """A model state that each replica changed for itself: the mean by count, or any one of integers."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    return jnp.tensordot(shares.astype(x.dtype), x, 1)


def make_step(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    learning_rate: optax.Schedule | None = None,
) -> Step:
    """The training step, one compiled program.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: of this model and optimizer.
      learning_rate: the optimizer's schedule, if it shall stand among the metrics.

    Returns:
      (state, batch) -> (state, metrics). The state passed in is donated: use the new one. Every
      array of the batch has shape (microbatches, rows, ...), see `data.place`. Metrics are float32
      scalars on the device: loss_sum, count, grad_norm (before clipping), skipped (1 where loss
      or gradient is not finite: then nothing but the step counter changes), and those of the
      loss as (sum, count).
    """
    gradients = make_gradients(model, loss, placement)
    mesh, specs = placement.mesh, placement.specs

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        key = step_key(state.seed, state.step)
        loss_sum, count, grads, model_state, metrics = gradients(state.params, state.model_state, key, batch)
        grad_norm = optax.tree.norm(grads)
        # the update is computed in shards, whatever the parameters are: ZeRO-1 and 2
        grads = _constrained(grads, specs.sharded, mesh)
        params = _constrained(state.params, specs.sharded, mesh)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        new = (optax.apply_updates(params, updates), model_state, opt_state)
        old = (params, state.model_state, state.opt_state)
        # not the update: all of it would have to be kept until its norm is known
        finite = jnp.isfinite(loss_sum) & jnp.isfinite(grad_norm)
        # the dtype that it was made with: optax computes moments of bfloat16 parameters in float32
        new = jax.tree.map(lambda n, o: jnp.where(finite, n.astype(o.dtype), o), new, old)
        new_state = State(state.step + 1, state.seed, *new)
        metrics = {
            **metrics,
            "loss_sum": loss_sum,
            "count": count,
            "grad_norm": grad_norm,
            "skipped": 1.0 - finite,
        }
        if learning_rate is not None:
            metrics["learning_rate"] = learning_rate(state.step)
        return new_state, metrics

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        step,
        in_shardings=(placement.state, placement.batch),
        out_shardings=(placement.state, whole),
        donate_argnums=0,
    )


def make_evaluate(model: Model, loss: Loss, placement: Placement) -> Callable[[State, Batch], Metrics]:
    """The loss of a batch without training: no dropout, running statistics, nothing changes.

    Returns:
      (state, batch) -> metrics: loss_sum, count and those of the loss as (sum, count).
    """
    mesh, layout = placement.mesh, placement.layout

    def evaluate(state: State, batch: Batch) -> Metrics:
        def microbatch(batch: Batch) -> Any:
            bound = _Bound(model, state.params, state.model_state, jax.random.key(0), train=False)
            loss_sum, count, metrics = checked(loss(bound, batch))
            return {**metrics, "loss_sum": loss_sum, "count": count}

        with activation_rules(layout.activation_rules, mesh):
            return jax.tree.map(lambda x: x.sum(0), jax.lax.map(microbatch, batch))

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(evaluate, in_shardings=(placement.state, placement.batch), out_shardings=whole)
