"""Compiled pipeline steps: memory does not grow with microbatches, and communication equals theory."""

import math
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stacking import Partition
from shardtrain.plan.compile import compile_step, describe_devices, figures
from shardtrain.plan.hlo.collectives import ALL_REDUCE, PERMUTE, sum_by_axis
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

ROWS, SEQ, EMBED = 4, 16, 16
CONFIG = TinyConfig(vocab=32, seq=SEQ, embed=EMBED, num_layers=4, mlp=32)
MODEL = from_nnx(CONFIG)
CUTS = {
    "1f1b": Partition(num_stages=4, counts=(1, 1, 1, 1)),
    "gpipe": Partition(num_stages=4, counts=(1, 1, 1, 1)),
    "interleaved": Partition(num_stages=2, num_chunks=2, counts=(1, 1, 1, 1)),
    "zero_bubble": Partition(num_stages=4, counts=(1, 1, 1, 1)),
    "zb_v": Partition(num_stages=3, num_chunks=2, placement="v", counts=(1, 1, 1, 1, 1, 1)),
}
# each schedule is compiled for 8 microbatches, and these two for 32 only with `--full`
QUICK = [pytest.param(name, marks=[pytest.mark.full] * (name not in ("1f1b", "gpipe"))) for name in CUTS]
STREAM_BYTES = ROWS * SEQ * EMBED * 4


@cache
def program(schedule, microbatches, **mesh):
    """(figures, number of instructions) of a step of so many microbatches of ROWS rows a replica."""
    stages = CUTS[schedule]
    layout = Layout(mesh={"pipeline": stages.num_stages, **mesh})
    jax_mesh = make_mesh(layout, describe_devices("cpu", math.prod(layout.mesh.values())))
    rows = microbatches * ROWS * mesh.get("data", 1)
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows, SEQ + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }
    optimizer = optax.sgd(1e-2)
    model = from_nnx(replace(CONFIG, num_layers=stages.num_blocks))
    placement = make_placement(model, optimizer, layout, jax_mesh, stages=stages, schedule=schedule)
    compiled = compile_step(model, next_token_loss, optimizer, placement, batch, microbatches=microbatches)
    text = compiled.as_text() or ""
    return figures(compiled, dict(jax_mesh.shape)), text.count(" = ")


class TestMemory:
    @pytest.mark.parametrize("schedule", [name for name in QUICK if name.values != ("gpipe",)])
    def test_it_does_not_grow_with_microbatches(self, schedule):
        few, many = (program(schedule, microbatches)[0].temp_bytes for microbatches in (8, 32))
        assert many <= 1.05 * few

    def test_that_of_gpipe_grows_by_the_activations_of_each_microbatch(self):
        few, many = (program("gpipe", microbatches)[0].temp_bytes for microbatches in (8, 32))
        # tokens and weights of a microbatch are held too
        assert (many - few) / (32 - 8) == pytest.approx(STREAM_BYTES, rel=0.1)

    @pytest.mark.parametrize("schedule", QUICK)
    def test_programs_do_not_grow_with_microbatches(self, schedule):
        few, many = (program(schedule, microbatches)[1] for microbatches in (8, 32))
        assert many == pytest.approx(few, rel=0.01)


class TestTraffic:
    @pytest.mark.parametrize("schedule", CUTS)
    def test_activations_and_cotangents_are_sent_in_every_tick(self, schedule):
        found, _ = program(schedule, 8)
        stages = CUTS[schedule]
        ticks = make_table(schedule, stages.num_stages, 8, stages.num_chunks, lockstep=True).num_ticks
        runs, sent_bytes = sum_by_axis(found.collectives)[PERMUTE, ("pipeline",)]
        # the last stage has nobody to send forward to, nor the first one backward; chunks form a ring
        senders = 1 if schedule == "interleaved" else (stages.num_stages - 1) / stages.num_stages
        ways = 2 if schedule == "zb_v" else 1  # a V goes down the stages and back up
        assert (runs, sent_bytes) == (ways * 2 * ticks, ways * senders * 2 * ticks * STREAM_BYTES)

    def test_gradients_are_reduced_once_and_no_parameter_is_gathered(self):
        found, _ = program("1f1b", 8, data=2)
        params = jax.eval_shape(MODEL.init, jax.random.key(0))[0]
        own, rest = (
            4
            * sum(
                x.size
                for name in params
                for x in jax.tree.leaves(params[name])
                if (name == "blocks") == blocks
            )
            for blocks in (True, False)
        )
        moved = sum_by_axis(found.collectives)
        assert {(kind, over) for kind, over in moved if "pipeline" in over} == {
            (PERMUTE, ("pipeline",)),
            (ALL_REDUCE, ("pipeline",)),
        }
        # beside them some scalars: loss, count, and for the norm one of each array
        over_stages, over_data = (moved[ALL_REDUCE, (axis,)][1] for axis in ("pipeline", "data"))
        assert over_stages == pytest.approx(2 * 3 / 4 * rest, abs=128)
        assert over_data == pytest.approx(2 * 1 / 2 * (own / 4 + rest), abs=128)
        assert all(not c.in_loop for c in found.collectives if c.kind == ALL_REDUCE)
