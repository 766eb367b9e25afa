"""The compiled programs of a stage between two messages: its gradients, and the update of what it owns.

Next: `stage_step.py`, which calls them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import group_by_path
from shardtrain.functional.model import Tree, path_text
from shardtrain.functional.sums import Sums
from shardtrain.optim.clip import clip_gradients
from shardtrain.pipeline.stage_model import nest
from shardtrain.train_step.gradients import merge_replicas, sum_replicas
from shardtrain.train_step.island_combiner import join_metrics
from shardtrain.train_step.island_totals import step_sums
from shardtrain.train_step.local_steps import make_local_update, own_params
from shardtrain.train_step.placement import Placement, constrain
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, apply_gradients, gradient_metrics, keep_unless_skipped


class GradientPrograms(NamedTuple):
    """The programs on the sums of the tasks, and on the gradients made of them.

    Args:
      reduced: sums -> (gradients of owned parameters, of borrowed ones, sums of the loss).
      scaled: (gradients, those that borrowers returned, count) -> gradients of the mean loss.
      squares: gradients -> the square of their norm.
      loss_sums: sums -> sums of the loss.
      merged_state: (model state of each replica of this island, their weights) -> model state.
    """

    reduced: Callable[..., Any]
    scaled: Callable[..., Any]
    squares: Callable[..., Any]
    loss_sums: Callable[..., Any]
    merged_state: Callable[..., Any]


def make_gradient_programs(placement: Placement) -> GradientPrograms:
    """Compile the programs on gradients.

    Args:
      placement: of the parameters that the stage owns.
    """
    mesh, specs = placement.mesh, placement.specs
    replica_axes = placement.layout.replica_axes
    whole, sharded = _shardings(placement)
    # the sums have gradients of borrowed parameters, too, which are returned to their owners
    owned = {path_text(path) for path, _ in jax.tree.leaves_with_path(specs.abstract.params)}

    def reduced(sums: Sums) -> tuple[Tree, dict[str, jax.Array], dict[str, Any]]:
        """Sum over this island's replicas: (gradients of owned parameters, of borrowed ones, losses)."""
        found = group_by_path(sums.grads)
        own = nest({path: g for path, g in found.items() if path in owned})
        own = jax.tree.map(lambda g, spec: sum_replicas(g, spec, replica_axes, mesh), own, specs.sharded)
        borrowed = {path: g.sum(0) for path, g in found.items() if path not in owned}
        return own, borrowed, _loss_sums(sums)

    def scaled(grads: Tree, returned: list[dict[str, jax.Array]], count: jax.Array) -> Tree:
        """Add the gradients that borrowers returned, and divide by the count of the whole batch."""

        def scale(path: Any, g: jax.Array) -> jax.Array:
            more = [found[path_text(path)] for found in returned if path_text(path) in found]
            return sum(more, g) / jnp.where(count > 0, count, 1)

        return jax.tree.map_with_path(scale, grads)

    return GradientPrograms(
        reduced=jax.jit(reduced, out_shardings=(sharded, whole, whole)),
        scaled=jax.jit(scaled, out_shardings=sharded, donate_argnums=0),
        squares=jax.jit(lambda grads: optax.tree.norm(grads, squared=True)),
        loss_sums=jax.jit(_loss_sums),
        merged_state=jax.jit(
            lambda state, weights: jax.tree.map(lambda x: merge_replicas(x, weights), state),
            out_shardings=whole,
        ),
    )


def make_update(
    optimizer: optax.GradientTransformation,
    clip: float | None,
    placement: Placement,
    learning_rate: optax.Schedule | None,
) -> Callable[..., tuple[State, Metrics]]:
    """Compile the update of the parameters that a stage owns, by a gradient combined over pipelines.

    Args:
      optimizer: of the stage's parameters.
      clip: the largest norm of the gradient of all stages; None does not clip.
      placement: of the parameters that the stage owns.
      learning_rate: the optimizer's schedule, to have it among the metrics.
    """

    def update(
        state: State,
        grads: Tree,
        model_state: Tree,
        totals: Any,
        squares: jax.Array,
        combine_state: Any,
        combine_metrics: Any,
    ) -> tuple[State, Metrics]:
        norm = jnp.sqrt(squares)
        found = Sums(grads=_clip(grads, norm, clip), model_state=model_state, **totals)
        # the norm is that of all stages
        metrics = {**gradient_metrics(found), "grad_norm": norm, **join_metrics(combine_metrics)}

        def updated(state: State) -> State:
            new = apply_gradients(optimizer, placement, state, found)
            return new._replace(combine_state=combine_state)

        return keep_unless_skipped(updated, placement, state, metrics, learning_rate)

    # the state is donated: parameters and optimizer state are updated in place
    whole, sharded = _shardings(placement)
    state = placement.state._replace(combine_state=whole)
    return jax.jit(
        update,
        in_shardings=(state, sharded, whole, whole, whole, whole, whole),
        out_shardings=(state, whole),
        donate_argnums=0,
    )


def make_own_update(
    optimizer: optax.GradientTransformation,
    clip: float | None,
    placement: Placement,
    learning_rate: optax.Schedule | None,
    shardings: State,
) -> tuple[Callable[[State], Any], Callable[..., tuple[State, Metrics]]]:
    """Compile a pipeline's own parameters, and their update, which is merged later.

    Args:
      optimizer, clip, placement, learning_rate: see `make_update`.
      shardings: of the state.
    """
    own_update = make_local_update(optimizer)

    def local_update(
        state: State, grads: Tree, model_state: Tree, totals: Any, squares: jax.Array, count: jax.Array
    ) -> tuple[State, Metrics]:
        """The update of this pipeline's own parameters, which are merged later."""
        norm = jnp.sqrt(squares)
        found = Sums(grads=_clip(grads, norm, clip), model_state=model_state, **totals)

        def updated(state: State) -> State:
            params = constrain(state.params, placement.specs.sharded, placement.mesh)
            local = state.local
            opt_state, drift = own_update(
                params, local.drift, state.opt_state, found.grads, count, found.mean_loss
            )
            local = local._replace(drift=drift, count=local.count + count, model_state=found.model_state)
            return state._replace(opt_state=opt_state, local=local)

        metrics = {**found.logged, "grad_norm": norm}
        new, metrics = keep_unless_skipped(updated, placement, state, metrics, learning_rate)
        sums = jax.tree.map(jnp.add, state.local.sums, step_sums(metrics))
        return new._replace(local=new.local._replace(sums=sums)), metrics

    whole, sharded = _shardings(placement)
    own = jax.jit(lambda state: own_params(state.params, state.local.drift), out_shardings=shardings.params)
    return own, jax.jit(
        local_update,
        in_shardings=(shardings, sharded, whole, whole, whole, whole),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )


def _shardings(placement: Placement) -> tuple[NamedSharding, Any]:
    """Return the sharding of what every device has whole, and those of the gradients."""
    sharded = jax.tree.map(
        lambda spec: NamedSharding(placement.mesh, spec),
        placement.specs.sharded,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return NamedSharding(placement.mesh, PartitionSpec()), sharded


def _loss_sums(sums: Sums) -> dict[str, Any]:
    """Return the sums of the loss, over this island's replicas."""
    return jax.tree.map(lambda x: x.sum(0), sums.of_loss)


def _clip(grads: Tree, norm: jax.Array, clip: float | None) -> Tree:
    """Clip gradients by the norm of all stages, unless clip is None."""
    return grads if clip is None else clip_gradients(grads, norm, clip)
