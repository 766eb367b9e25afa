"""The compiled programs of a stage after its forward and backward tasks: reduce gradients, update.

Next: `stage_compute.py`, which calls them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import group_by_path
from shardtrain.functional.model import Tree, path_text
from shardtrain.functional.sums import Sums
from shardtrain.optim.clip import clip_gradients
from shardtrain.train_step.drift import make_own_params
from shardtrain.train_step.gradients import merge_replicas, sum_replicas
from shardtrain.train_step.island_combiner import join_metrics
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import Metrics, State
from shardtrain.train_step.update import (
    apply_gradients,
    compute_gradient_metrics,
    keep_unless_skipped,
    make_own_update,
)


class GradientPrograms(NamedTuple):
    """The programs that turn the sums of a step's tasks into gradients.

    Args:
      reduced: sums of the tasks -> (gradients of owned parameters, gradients of borrowed ones, loss sums).
      scaled: (gradients, gradients that borrowers returned, count) -> gradients of the mean loss.
      squares: gradients -> the square of their norm.
      loss_sums: sums of the tasks -> loss sums.
      merged_state: (model state of each replica of this island, weights) -> their average.
    """

    reduced: Callable[..., Any]
    scaled: Callable[..., Any]
    squares: Callable[..., Any]
    loss_sums: Callable[..., Any]
    merged_state: Callable[..., Any]


def make_gradient_programs(placement: Placement) -> GradientPrograms:
    """Compile the programs on gradients.

    Args:
      placement: the placement of the parameters that the stage owns.
    """
    mesh, specs = placement.mesh, placement.specs
    replica_axes = placement.layout.replica_axes
    whole, sharded = _make_shardings(placement)
    # the sums have gradients of borrowed parameters, too, which are returned to their owners
    owned = group_by_path(specs.abstract.params)

    def reduced(sums: Sums) -> tuple[Tree, dict[str, jax.Array], dict[str, Any]]:
        found = group_by_path(sums.grads)
        own = unflatten_dict({path: g for path, g in found.items() if path in owned}, sep="/")
        own = jax.tree.map(lambda g, spec: sum_replicas(g, spec, replica_axes, mesh), own, specs.sharded)
        borrowed = {path: g.sum(0) for path, g in found.items() if path not in owned}
        return own, borrowed, _sum_losses(sums)

    def scaled(grads: Tree, returned: list[dict[str, jax.Array]], count: jax.Array) -> Tree:
        def scale(path: Any, g: jax.Array) -> jax.Array:
            more = [found[path_text(path)] for found in returned if path_text(path) in found]
            return sum(more, g) / jnp.where(count > 0, count, 1)

        return jax.tree.map_with_path(scale, grads)

    return GradientPrograms(
        reduced=jax.jit(reduced, out_shardings=(sharded, whole, whole)),
        scaled=jax.jit(scaled, out_shardings=sharded, donate_argnums=0),
        squares=jax.jit(lambda grads: optax.tree.norm(grads, squared=True)),
        loss_sums=jax.jit(_sum_losses),
        merged_state=jax.jit(
            lambda state, weights: jax.tree.map(lambda x: merge_replicas(x, weights), state),
            out_shardings=whole,
        ),
    )


class StageUpdate(NamedTuple):
    """How a stage updates its parameters.

    Args:
      optimizer: the optimizer of the stage's parameters, without clipping by the norm of all stages.
      clip: the largest norm of the whole gradient; None disables clipping.
      learning_rate: the optimizer's schedule, to add the rate to the metrics; None adds none.
    """

    optimizer: optax.GradientTransformation
    clip: float | None = None
    learning_rate: optax.Schedule | None = None


def make_update(how: StageUpdate, placement: Placement) -> Callable[..., tuple[State, Metrics]]:
    """Compile the update of a stage's own parameters by a gradient that was combined over pipelines.

    Args:
      how: optimizer and clipping.
      placement: the placement of the parameters that the stage owns.
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
        found = Sums(grads=_clip(grads, norm, how.clip), model_state=model_state, **totals)
        # the norm is over all stages
        metrics = {**compute_gradient_metrics(found), "grad_norm": norm, **join_metrics(combine_metrics)}

        def updated(state: State) -> State:
            new = apply_gradients(how.optimizer, placement, state, found)
            return new._replace(combine_state=combine_state)

        return keep_unless_skipped(updated, placement, state, metrics, how.learning_rate)

    # the state is donated: parameters and optimizer state are updated in place
    whole, sharded = _make_shardings(placement)
    state = placement.state._replace(combine_state=whole)
    return jax.jit(
        update,
        in_shardings=(state, sharded, whole, whole, whole, whole, whole),
        out_shardings=(state, whole),
        donate_argnums=0,
    )


def make_stage_own_update(
    how: StageUpdate, placement: Placement, shardings: State
) -> tuple[Callable[[State], Any], Callable[..., tuple[State, Metrics]]]:
    """Compile the computation of a pipeline's own parameters, and their update, which is merged later.

    Args:
      how, placement: see `make_update`.
      shardings: the shardings of the state.
    """
    own_update = make_own_update(how.optimizer, placement, how.learning_rate)

    def update(
        state: State, grads: Tree, model_state: Tree, totals: Any, squares: jax.Array
    ) -> tuple[State, Metrics]:
        norm = jnp.sqrt(squares)
        return own_update(
            state, Sums(grads=_clip(grads, norm, how.clip), model_state=model_state, **totals), norm
        )

    whole, sharded = _make_shardings(placement)
    own = jax.jit(
        lambda state: make_own_params(state.params, state.local.drift), out_shardings=shardings.params
    )
    return own, jax.jit(
        update,
        in_shardings=(shardings, sharded, whole, whole, whole),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )


def _make_shardings(placement: Placement) -> tuple[NamedSharding, Any]:
    """Return the sharding of replicated arrays, and the shardings of gradients."""
    sharded = jax.tree.map(lambda spec: NamedSharding(placement.mesh, spec), placement.specs.sharded)
    return NamedSharding(placement.mesh, PartitionSpec()), sharded


def _sum_losses(sums: Sums) -> dict[str, Any]:
    return jax.tree.map(lambda x: x.sum(0), sums.of_loss)


def _clip(grads: Tree, norm: jax.Array, clip: float | None) -> Tree:
    return grads if clip is None else clip_gradients(grads, norm, clip)
