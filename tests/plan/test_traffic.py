"""Compiled steps against theory: what they move by collective, axes and place, and what they hold."""

import math
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import optax
import pytest

from shardtrain.layout import Layout
from shardtrain.loss import next_token_loss
from shardtrain.mesh import make_mesh
from shardtrain.model import from_linen, from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.plan.compile import compile_step, described_devices, figures
from shardtrain.plan.traffic import Key, Work, step_traffic, weights
from shardtrain.sharding import sharding_rows
from shardtrain.state import state_specs

ROWS, SEQ = 64, 32
TIED = DecoderConfig(vocab=256, seq=SEQ, embed=64, num_layers=4, num_heads=8)
UNTIED = replace(TIED, tied=False)
PLAIN = replace(UNTIED, bias=False)
LARGE = replace(TIED, vocab=8192)
DEEP = replace(PLAIN, num_layers=16, seq=8)
WIDE = replace(UNTIED, num_layers=2, embed=256)
OPTIMIZER = optax.adamw(1e-3)

DATA, FSDP, TENSOR = ({axis: 8} for axis in ("data", "fsdp", "tensor"))
MIXED = {"data": 2, "fsdp": 2, "tensor": 2}


@cache
def model(config, linen=False):
    if linen:
        return from_linen(LinenDecoder(config), jax.ShapeDtypeStruct((2, config.seq), jnp.int32))
    return from_nnx(config)


class Program:
    """A step compiled for simulated devices, and what theory says of it."""

    def __init__(self, config, mesh, zero=3, microbatches=1, sequence_sharded=False, linen=False, rows=ROWS):
        self.layout = Layout(mesh=dict(mesh), zero=zero, sequence_sharded=sequence_sharded)
        self.microbatches = microbatches
        jax_mesh = make_mesh(self.layout, described_devices("cpu", math.prod(self.layout.mesh.values())))
        self.sizes = dict(jax_mesh.shape)
        batch = {
            "tokens": jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32),
            "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
        }
        source = model(config, linen)
        compiled = compile_step(
            source, next_token_loss, OPTIMIZER, self.layout, jax_mesh, batch, microbatches
        )
        self.figures = figures(compiled, self.sizes)
        self.specs = state_specs(source, OPTIMIZER, self.layout, self.sizes)
        self.batch_bytes = rows * (config.seq + 2) * 4 // math.prod(
            self.sizes[axis] for axis in self.layout.batch_axes
        )
        work = Work(
            weights=weights(self.specs.arrays, self.layout.sharded_rules),
            num_tokens=rows * config.seq,
            embed=config.embed,
            num_blocks=config.num_layers,
            microbatches=microbatches,
        )
        self.theory = step_traffic(work, self.layout, self.sizes)

    @property
    def measured(self):
        """Bytes by `Key`: what runs in the inner loop belongs to the blocks."""
        depth = 2 if self.microbatches > 1 else 1
        sums = dict.fromkeys(self.theory, 0.0)
        for found in self.figures.collectives:
            key = Key(found.kind, found.axes, len(found.loops) == depth)
            sums[key] = sums.get(key, 0.0) + found.wire_bytes_per_device
        return sums

    @property
    def in_blocks(self):
        """How often each kind of collective runs in the blocks."""
        runs = {}
        for found in self.figures.collectives:
            if found.in_loop:
                runs[found.kind] = runs.get(found.kind, 0) + found.count
        return runs


@cache
def _program(config, mesh, options):
    return Program(config, dict(mesh), **dict(options))


def program(config, mesh, **options):
    """Compiled once for all tests."""
    return _program(config, tuple(mesh.items()), tuple(options.items()))


# Theory gathers what lies outside the blocks for each microbatch; XLA for CPUs does it once, before the loop.
KEPT = {Key("all-gather", ("fsdp",), False)}
# Learned positions are gathered to be cut along the sequence, so part of their gradient is not all-reduced.
POSITIONS = {Key("all-reduce", ("tensor",), False)}

LAYOUTS = {
    "data": (TIED, DATA, {}, set()),
    "data, microbatches": (TIED, DATA, {"microbatches": 4}, set()),
    "fsdp": (PLAIN, FSDP, {}, set()),
    "fsdp, microbatches": (UNTIED, FSDP, {"microbatches": 4}, KEPT),
    "fsdp, zero 2": (TIED, FSDP, {"zero": 2, "microbatches": 4}, set()),
    "fsdp, zero 1": (PLAIN, FSDP, {"zero": 1, "microbatches": 4}, set()),
    "tensor": (TIED, TENSOR, {}, set()),
    "tensor, linen": (TIED, TENSOR, {"linen": True}, set()),
    "sequence": (LARGE, TENSOR, {"sequence_sharded": True}, POSITIONS),
    "mixed": (UNTIED, MIXED, {"microbatches": 4}, KEPT),
}
"""name -> model, mesh, options, and the keys whose bytes may stay below theory."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_moves_what_theory_says(name):
    config, mesh, options, may_be_less = LAYOUTS[name]
    step = program(config, mesh, **options)
    assert {axis for key in step.theory for axis in key.axes} == set(mesh)
    total = sum(step.theory.values())
    for key, measured in step.measured.items():
        if key not in step.theory:  # scalars, and token ids
            assert measured < 0.001 * total, key
            continue
        ratio = measured / step.theory[key]
        assert ratio <= 1.02, (key, ratio)
        assert ratio >= 0.98 or key in may_be_less, (key, ratio)


def test_a_tied_table_pays_for_adding_its_gradients_late():
    """XLA all-reduces the gradients of lookup and head, each, and then adds: 4 times one reduce-scatter."""
    step = program(TIED, FSDP)
    table = 7 / 8 * 4 * TIED.vocab * TIED.embed
    key = Key("reduce-scatter", ("fsdp",), False)
    assert step.measured[key] == step.theory[key] - table
    extra = sum(step.measured.values()) - sum(step.theory.values())
    assert extra == pytest.approx(3 * table, rel=0.02)


@pytest.mark.parametrize("sequence_sharded", [False, True])
def test_a_block_reduces_four_times_over_tensor(sequence_sharded):
    runs = 4 * TIED.num_layers
    if not sequence_sharded:
        assert program(TIED, TENSOR).in_blocks == {"all-reduce": runs}
        return
    in_blocks = program(LARGE, TENSOR, sequence_sharded=True).in_blocks
    weights = 2 * TIED.num_layers  # of those that tensor does not shard
    assert in_blocks == {"all-gather": runs, "reduce-scatter": runs, "all-reduce": weights}


@pytest.mark.parametrize(
    ("config", "mesh", "zero"),
    [
        (TIED, DATA, 3),
        (UNTIED, MIXED, 3),
        (TIED, FSDP, 2),
        (PLAIN, FSDP, 1),
        (PLAIN, {"data": 2, "fsdp": 4}, 2),
        (PLAIN, MIXED, 1),
    ],
)
def test_replicas_are_reduced_once_a_step(config, mesh, zero):
    """No collective over data stands in a loop; over fsdp none where parameters are whole."""
    step = program(config, mesh, microbatches=4, **({} if zero == 3 else {"zero": zero}))
    replica_axes = {axis for axis in step.layout.replica_axes if step.sizes[axis] > 1}
    assert replica_axes == {"data", *(["fsdp"] if zero < 3 else [])} & set(mesh)
    over = [found for found in step.figures.collectives if replica_axes & set(found.axes)]
    assert any(found.payload_bytes > 1000 for found in over)
    assert [found for found in over if found.in_loop] == []


def half(x, kernel):
    """Traced by `jax.checkpoint`, which keeps what it traced by function and shapes."""
    x = with_logical_constraint(x, ("batch", "seq", "embed"))
    return with_logical_constraint(x + jnp.tanh(x @ kernel), ("batch", "residual_seq", "embed"))


class Halves(nnx.Module):
    """Two weights around a sequence that may be sharded."""

    def __init__(self, rngs):
        init = nnx.initializers.normal(0.1)
        kernel = partial(nnx.with_partitioning, init, eager_sharding=False)
        self.table = nnx.Param(kernel(("vocab", "embed"))(rngs.params(), (16, 16)))


def test_two_layouts_in_one_process_do_not_share_traces():
    sharded = program(LARGE, TENSOR, sequence_sharded=True).in_blocks
    plain = program(TIED, TENSOR).in_blocks
    assert sharded["reduce-scatter"] == plain["all-reduce"] == 16
