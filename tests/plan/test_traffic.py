"""Compiled steps against theory: communication by collective and axes, and memory."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import optax
import pytest

from shardtrain import axes
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.pipeline.stacking import Partition
from shardtrain.plan.compile import compile_step, describe_devices, figures
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER
from shardtrain.plan.traffic import Key, StepSizes, count_sent_bytes, parameter_traffic, weights
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.sharding.specs import sharding_rows
from shardtrain.train_step.placement import make_placement, state_specs

ROWS, SEQ = 64, 32
TIED = DecoderConfig(vocab=256, seq=SEQ, embed=64, num_layers=4, num_heads=8)
UNTIED = replace(TIED, tied=False)
PLAIN = replace(UNTIED, bias=False)
LARGE = replace(TIED, vocab=8192)
DEEP = replace(PLAIN, num_layers=16, embed=128, seq=2)
OPTIMIZER = optax.adamw(1e-3)

DATA, FSDP, TENSOR = ({axis: 8} for axis in ("data", "fsdp", "tensor"))
MIXED = {"data": 2, "fsdp": 2, "tensor": 2}


@cache
def model(config):
    return from_nnx(config)


def list_activations(work, layout, sizes, config, num_tokens):
    """What a tensor split (Shoeybi et al. 2019) and sharded sequences (Korthikanti et al. 2022) send.

    Yields collective, whether it is in the blocks, and bytes of the whole array, of one device over tensor.
    """
    # the residual stream of this device has its rows
    tokens = num_tokens / math.prod(sizes[axis] for axis in layout.batch_axes)
    stream_bytes = tokens * config.embed * work.compute_bytes
    has_vocab = any(axes.TENSOR in weight.axes and not weight.in_blocks for weight in work.weights)
    # with a sharded sequence an all-reduce becomes a reduce-scatter and, before the next matrix product, an
    # all-gather
    kinds = (ALL_GATHER, REDUCE_SCATTER) if layout.sequence_sharded else (ALL_REDUCE,)
    # 4 for two halves of a block, forward and backward; 2 for the vocabulary
    in_blocks = 4 * config.num_layers * stream_bytes
    for kind in kinds:
        if not layout.collective_matmul:
            yield kind, True, in_blocks
        yield kind, False, 2 * has_vocab * stream_bytes
    if layout.collective_matmul:
        # the same bytes, part by part
        num = sizes[axes.TENSOR]
        yield PERMUTE, True, len(kinds) * in_blocks * (num - 1) / num
    # of each token a softmax reduces the largest logit, the sum and the target's logit
    yield ALL_REDUCE, False, 3 * has_vocab * tokens * 4
    if layout.sequence_sharded:
        # weights that tensor does not shard get partial gradients
        for weight in work.weights:
            if axes.TENSOR not in weight.axes:
                yield (
                    ALL_REDUCE,
                    weight.in_blocks,
                    work.microbatches * weight.num_elements * work.compute_bytes,
                )


def compute_theory(work, layout, sizes, config, num_tokens):
    """Bytes that a device sends in a step, by `Key`: of parameters as a plan counts them, and of activations.

    Without scalars (loss, gradient norm). The gradient of an embedding that is also the head counts once.
    """
    theory = defaultdict(float, parameter_traffic(work, layout.zero, sizes))
    if sizes[axes.TENSOR] > 1:
        for kind, in_blocks, num_bytes in list_activations(work, layout, sizes, config, num_tokens):
            sent = count_sent_bytes(kind, sizes[axes.TENSOR], num_bytes)
            theory[Key(kind, (axes.TENSOR,), in_blocks)] += sent
    return {key: sent for key, sent in theory.items() if sent}


class Program:
    """A step compiled for simulated devices, and what theory says of it."""

    def __init__(self, config, mesh, microbatches=1, rows=ROWS, **layout):
        self.layout = Layout(mesh=dict(mesh), **layout)
        self.microbatches = microbatches
        jax_mesh = make_mesh(self.layout, describe_devices("cpu", math.prod(self.layout.mesh.values())))
        self.sizes = dict(jax_mesh.shape)
        seq = getattr(config, "seq", SEQ)
        batch = {
            "tokens": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32),
            "weights": jax.ShapeDtypeStruct((rows,), jnp.float32),
        }
        source = model(config)
        num_stages = self.sizes["pipeline"]
        counts = (config.num_layers // num_stages,) * num_stages if num_stages > 1 else ()
        stages = Partition(num_stages=num_stages, counts=counts) if counts else None
        placement = make_placement(source, OPTIMIZER, self.layout, jax_mesh, stages=stages)
        compiled = compile_step(
            source, next_token_loss, OPTIMIZER, placement, batch, microbatches=microbatches
        )
        self.figures = figures(compiled, self.sizes)
        self.specs = state_specs(source, OPTIMIZER, self.layout, self.sizes)
        self.batch_bytes = (
            rows * (seq + 2) * 4 // math.prod(self.sizes[axis] for axis in self.layout.batch_axes)
        )
        self.work = StepSizes(
            weights=weights(self.specs.arrays, self.layout.sharded_rules), microbatches=microbatches
        )
        self.theory = compute_theory(self.work, self.layout, self.sizes, config, rows * seq)

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
    "data, microbatches": (TIED, DATA, {"microbatches": 4}, set()),
    "fsdp, zero 2": (TIED, FSDP, {"zero": 2, "microbatches": 4}, set()),
    "tensor": (TIED, TENSOR, {}, set()),
    "sequence": (LARGE, TENSOR, {"sequence_sharded": True}, POSITIONS),
    "collective matmul": (LARGE, TENSOR, {"sequence_sharded": True, "collective_matmul": True}, POSITIONS),
    "mixed": (UNTIED, MIXED, {"microbatches": 4}, KEPT),
    "mixed, zero 1": (TIED, MIXED, {"zero": 1, "microbatches": 4}, set()),
}
"""name -> model, mesh, options, and the keys whose bytes may stay below theory."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_the_bytes_of_theory(name):
    config, mesh, options, may_be_less = LAYOUTS[name]
    step = program(config, mesh, **options)
    assert {axis for key in step.theory for axis in key.axes} == set(mesh)
    total = sum(step.theory.values())
    for key, measured in step.measured.items():
        expected = step.theory.get(key, 0)
        # scalars, and what the loss has for each token (ids, weights, highest logits, sums, losses and their
        # gradients): XLA may shard these few along the sequence and gather them; an activation has `embed`
        # times more
        of_the_loss = 0.002 * total + 4 * 4 * ROWS * SEQ
        assert measured <= max(1.02 * expected, expected + of_the_loss), key
        assert measured >= 0.98 * expected or key in may_be_less, key


def test_a_tied_embedding_reduces_its_two_gradients_separately():
    """XLA all-reduces the gradients of lookup and head, each, and then adds: 4 times one reduce-scatter."""
    step = program(TIED, FSDP)
    reduce_scatter = 7 / 8 * 4 * TIED.vocab * TIED.embed
    key = Key("reduce-scatter", ("fsdp",), False)
    assert step.measured[key] == step.theory[key] - reduce_scatter
    assert step.measured[key._replace(kind="all-reduce")] == pytest.approx(4 * reduce_scatter, rel=0.001)


@pytest.mark.parametrize("sequence_sharded", [False, True])
def test_a_block_reduces_four_times_over_tensor(sequence_sharded):
    runs = 4 * TIED.num_layers
    if not sequence_sharded:
        assert program(TIED, TENSOR).in_blocks == {"all-reduce": runs}
        return
    in_blocks = program(LARGE, TENSOR, sequence_sharded=True).in_blocks
    weights = 2 * TIED.num_layers  # of those that tensor does not shard
    assert in_blocks == {"all-gather": runs, "reduce-scatter": runs, "all-reduce": weights}
    # by collective matmul each of both is one exchange less than there are devices
    in_blocks = program(LARGE, TENSOR, sequence_sharded=True, collective_matmul=True).in_blocks
    assert in_blocks.pop("all-reduce") <= weights
    assert in_blocks == {"collective-permute": 2 * runs * (TENSOR["tensor"] - 1)}


@pytest.mark.full
def test_a_loss_in_chunks_sends_no_more():
    chunked, plain = (
        program(replace(UNTIED, loss_chunk=chunk), MIXED, microbatches=4) for chunk in (32, None)
    )
    sums = []
    for step in (chunked, plain):
        sums.append({})
        for key, sent in step.measured.items():
            sums[-1][key.kind, key.axes] = sums[-1].get((key.kind, key.axes), 0) + sent
    assert set(sums[0]) == set(sums[1])
    # beside them the loss has a few numbers for each token
    assert sums[0] == pytest.approx(sums[1], rel=0.01, abs=4 * 4 * ROWS * SEQ)


def test_a_device_has_an_eighth_of_the_state():
    """But for a few biases."""
    sharded = program(TIED, FSDP)
    scalars = 4 * 3  # step, seed, adam's count
    held = sharded.figures.argument_bytes - sharded.batch_bytes
    assert held == sharded.figures.alias_bytes  # donated: the new state takes its place

    rows = sharding_rows(
        sharded.specs.arrays, sharded.specs.abstract.params, sharded.specs.params, sharded.sizes
    )
    not_sharded = {row.path for row in rows if row.copies > 1}
    biases = {f"blocks/attention/{name}/bias" for name in "qkv"}
    assert not_sharded == {*biases, "blocks/mlp/up/bias"}
    assert held == scalars + 3 * sum(row.device_bytes for row in rows)


def test_no_gathered_weight_is_kept_for_the_backward_pass():
    remade, kept = (program(replace(DEEP, remat=remat), FSDP, rows=8) for remat in ("weights", "none"))
    blocks = sum(weight.num_elements for weight in remade.work.weights if weight.in_blocks)
    # gradients, their sums and updates: shards of an eighth each
    assert remade.figures.temp_bytes < 0.6 * 4 * blocks
    assert kept.figures.temp_bytes - remade.figures.temp_bytes > 0.9 * 4 * blocks
    gathers = Key("all-gather", ("fsdp",), True)
    assert kept.measured[gathers] == pytest.approx(remade.measured[gathers] / 2, rel=0.02)


def test_a_batch_that_cannot_be_split():
    with pytest.raises(ValueError) as error:
        Program(PLAIN, DATA, microbatches=4, rows=48)
    assert str(error.value) == (
        "batch 48 cannot be split over axes ('data','fsdp') of total size 8 and 4 microbatches:"
        " 48 % 32 = 16. Use 32 or 64."
    )


@pytest.mark.parametrize(
    ("kind", "num_devices", "text"),
    [
        (
            "cpu",
            9,
            "9 CPU devices were asked for and 8 are simulated; give --cpu-devices 9",
        ),
        ("cpu", 0, "0 CPU devices were asked for and 8 are simulated; ask for 1 or more"),
        ("h10", 8, "devices of kind 'h10' (did you mean 'h100'?) cannot be compiled for"),
        ("h100", 0, "0 devices of kind 'h100' were asked for; ask for 1 or more."),
        (
            "a100",
            9,
            "9 devices of kind 'a100' do not fill hosts of 8: 9 % 8 = 1. Use 8 or 16, or fewer than 8.",
        ),
    ],
)
def test_unavailable_devices_are_refused(kind, num_devices, text):
    with pytest.raises(ValueError) as error:
        describe_devices(kind, num_devices)
    assert str(error.value) == text


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setattr("shardtrain.plan.compile.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install 'shardtrain\\[ahead-of-time\\]'"):
        describe_devices("h100", 8)
