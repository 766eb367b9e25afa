"""What programs of single steps on islands share: a model on one device, gradients to look at, a stage."""

from functools import cache

import jax
import jax.numpy as jnp
import optax

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.bridge import Control
from shardtrain.islands.mailbox import Mailbox
from shardtrain.pipeline.schedule import forward_only, make_table
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.stage_compute import StageCompute, StageTables
from shardtrain.train_step.stage_links import OwnerTransfers, StageLinks


def gradients_as_state() -> optax.GradientTransformation:
    """Keeps the gradient, and changes nothing."""
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)  # noqa: E731
    update = lambda grads, state, params: (zeros(grads), grads)  # noqa: E731
    return optax.GradientTransformation(zeros, update)  # type: ignore[arg-type]


AS_STATE = gradients_as_state()


def place_alone(model, optimizer=AS_STATE):
    """Return the placement of a model on one device."""
    layout = Layout(mesh={"data": 1}, unnamed="replicate")
    return make_placement(model, optimizer, layout, make_mesh(layout, jax.local_devices()[:1]))


@cache
def initial_values(model, optimizer=AS_STATE):
    """The state before the first step, on the host; computed once, as it has the same values on any mesh."""
    return jax.device_get(init_state(model, optimizer, place_alone(model, optimizer), 7))


def mean_gradient(model, loss):
    """Return (parameters, rows) -> the gradient of the mean loss, by plain jax."""

    @jax.jit
    def gradient(params, rows):
        def mean_loss(params):
            apply = lambda x: model.apply(params, {}, jax.random.key(0), True, x)[0]  # noqa: E731
            total, count, *_ = loss(apply, rows)
            return total / count

        return jax.grad(mean_loss)(params)

    return gradient


def make_stage_compute(
    comm,
    grid,
    stage_model,
    placement,
    schedule,
    microbatches,
    update,
    owned,
    way=Synchronisation(),
    start_row=0,
):
    """Return the compute of a stage; `owned` has (group of owners, transfer) for each of its groups."""
    stages, groups, transfers = stage_model.stages, *zip(*owned, strict=True)
    tables = StageTables(
        stage_model.flow(stage_model.traced.batch),
        make_table(schedule, grid.num_stages, microbatches, stages.num_chunks),
        forward_only(grid.num_stages, microbatches, stages.num_chunks, placement=stages.placement),
    )
    links = StageLinks(
        grid,
        Mailbox(comm.Split(grid.replica, grid.stage), [f"stage {i}" for i in range(grid.num_stages)], 60),
        OwnerTransfers(stage_model, groups, transfers),
        Control(comm).all_gather,
    )
    return StageCompute(stage_model, tables, update, placement, links, way, start_row)
