"""Pipelines that are not flushed: their parameters are those of plain arithmetic with the same delays.

Two virtual workers of two stages each, in waves. Arguments: batches in flight, steps of a wave. Every rank
computes the whole model for one virtual worker, on one device, and gathers what the other one pushes.
"""

import sys
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from step_parts import initial_values, make_stage_compute
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.combine.fragments import group_by_path
from shardtrain.islands.bridge import MPI, MpiGroup, world
from shardtrain.islands.parameter_server import ParameterServer
from shardtrain.islands.parameter_shard import ParameterShard
from shardtrain.islands.transfer import Transfer
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.pipeline.cuts import make_partitions, trace_parts
from shardtrain.pipeline.in_flight import count_forwards_ahead, count_waves_before_barrier
from shardtrain.pipeline.stacking import owner_groups
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.train_step.stage_links import PipelineGrid
from shardtrain.train_step.stage_programs import StageUpdate
from shardtrain.train_step.sync.waves import BarrierSchedule, UnflushedWaves, WaveWorker

IN_FLIGHT, EVERY = int(sys.argv[1]), int(sys.argv[2])
STEPS, DRAINED, STAGES, MICROBATCHES = 14, 8, 2, 2
ROWS, SHARES, RATE, CLIP = 4, (0.75, 0.25), 2.0, 0.1
# a table that the last stage borrows, so that its gradient comes from two stages
CONFIG = TinyConfig(vocab=16, num_layers=3, tied=True)
COMM = world()
GRID = PipelineGrid(num_islands=COMM.size, num_stages=STAGES, island=COMM.rank)
MODEL = st.from_nnx(CONFIG)


def batch_of(replica, number):
    random = np.random.default_rng([replica, number])
    tokens = random.integers(0, 16, (ROWS, CONFIG.seq + 1), np.int32)
    # batches of unequal numbers of examples: gradients are of the mean of each
    return {"tokens": tokens, "weights": (np.arange(ROWS) < ROWS - number % 2).astype(np.float32)}


@jax.jit
def gradient(params, rows):
    def mean_loss(params):
        apply = lambda x: MODEL.apply(params, {}, jax.random.key(0), True, x)[0]  # noqa: E731
        total, count, *_ = st.next_token_loss(apply, rows)
        return total / count

    grads = jax.grad(mean_loss)(params)
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.where(norm < CLIP, 1, CLIP / norm), grads), norm


def expected(start):
    """Return the last parameters, those after each update, and norms: each batch with its own weights."""
    replica, found = GRID.replica, {0: start}
    drift, common, norms = jax.tree.map(np.zeros_like, start), start, []
    for number in range(1, STEPS + 1):
        # the updates of all batches up to the one that has left the pipeline, or all after a barrier
        seen = max(number - IN_FLIGHT, DRAINED if number > DRAINED else 0)
        grads, norm = jax.device_get(gradient(found[seen], batch_of(replica, number)))
        norms.append(float(norm))
        drift = jax.tree.map(lambda d, g: d - RATE * g, drift, grads)
        found[number] = jax.tree.map(np.add, common, drift)
        if number % EVERY == 0 or number == STEPS:
            drifts = COMM.allgather(drift)[::STAGES]
            common = jax.tree.map(
                lambda c, *d: c + sum(s * x for s, x in zip(SHARES, d, strict=True)), common, *drifts
            )
            drift, found[number] = jax.tree.map(np.zeros_like, drift), common
    return common, found, norms


def make_stage_step(barriers):
    mesh = st.make_mesh(st.Layout(mesh={"data": 1}), jax.local_devices()[:1])
    layout, optimizer = st.Layout(mesh={"data": 1}), optax.sgd(RATE)
    microbatch = {name: x[: ROWS // MICROBATCHES] for name, x in batch_of(0, 1).items()}
    traced = trace_parts(MODEL, st.next_token_loss, microbatch)
    (stages,) = make_partitions(traced, st.Pipeline(), STAGES, 1)
    stage_model = StageModel(model=MODEL, stages=stages, traced=traced, stage=GRID.stage)
    placement = st.make_placement(stage_model.make_stage_model(), optimizer, layout, mesh)
    way = st.Synchronisation(on="deltas", every=EVERY, distance=0)
    peers = COMM.Split(GRID.stage, GRID.replica)
    transfer = Transfer(mesh, [MpiGroup(peers)])
    shard = ParameterShard(peers.size, waves_ahead=count_waves_before_barrier(IN_FLIGHT, EVERY))
    owned, update = [(owner_groups([stages])[GRID.stage], transfer)], StageUpdate(optimizer, CLIP)
    compute = make_stage_compute(
        COMM, GRID, stage_model, placement, "gpipe", MICROBATCHES, update, owned, way
    )
    names = [f"worker {i}" for i in range(peers.size)]
    ranks = list(range(GRID.stage, COMM.size, STAGES))
    server = ParameterServer(peers, shard, names, ranks, ActivityRecord(), patience_seconds=60)
    worker = WaveWorker(server, barriers, lambda: SHARES[GRID.replica], lambda: None, compute.sums)
    step: Any = UnflushedWaves(compute, IN_FLIGHT, way, worker, STEPS)
    state = st.init_state(stage_model.make_stage_model(), optimizer, placement, 7)
    return step, state, lambda number: st.place(batch_of(GRID.replica, number), mesh, ("data",), MICROBATCHES)


def main():
    # nothing is in flight at the planned barrier after step 8, and after the last step
    barriers = BarrierSchedule(st.Synchronisation(on="deltas", every=EVERY, distance=0), STEPS, DRAINED)
    step, state, batch = make_stage_step(barriers)
    state = step.begin(state, batch(1))
    common, found, norms = expected(initial_values(MODEL).params)
    assert min(norms) < CLIP < max(norms), norms  # some are clipped
    seen = defaultdict(float)
    for number in range(1, STEPS + 1):
        state, metrics = step(state, batch(number))
        for name in ("loss_sum", "count"):
            seen[name] += float(metrics[name])
        updates = number if barriers.is_due(number) else max(number - IN_FLIGHT, DRAINED * (number > DRAINED))
        # the update that is due at the beginning of a step was done in it
        assert int(state.step) == updates, (number, int(state.step))
        if number == DRAINED:
            compare(step, state, found[DRAINED], "at the barrier")
    compare(step, state, common, "at the end")
    # the losses of all batches of both virtual workers are in the metrics of the first, once
    examples = sum(batch_of(r, n)["weights"].sum() for r in (0, 1) for n in range(1, STEPS + 1))
    assert COMM.rank or seen["count"] == examples * CONFIG.seq, seen
    assert count_forwards_ahead(STAGES, IN_FLIGHT)[0] == IN_FLIGHT - 1
    COMM.barrier()
    step.close()
    sys.stdout.write("done\n")


def compare(step, state, params, case):
    reference = group_by_path(step.compute.stage_model.own(params))
    for path, x in group_by_path(jax.device_get(state.params)).items():
        np.testing.assert_allclose(x, reference[path], 1e-5, 1e-6, err_msg=f"{case}: {path}")


assert MPI.COMM_WORLD.size == 4
main()
