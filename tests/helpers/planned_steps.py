"""A language model as the planner takes it, and its compiled step, which predictions are compared with."""

from collections import defaultdict

import jax
import jax.numpy as jnp
import optax

from shardtrain import next_token_loss
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.remat import apply_remat
from shardtrain.plan.compile import compile_step, figures
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

RATES = Rates(flops_per_second=1e11, memory_bytes_per_second=1e10, kernel_seconds=1e-6, memory_bytes=1e9)
SLOW = Link(bytes_per_second=1e8, latency_seconds=1e-5)
NODES = Machine(rates=RATES, devices_per_node=4, device_link=Link(bytes_per_second=1e9), node_link=SLOW)
ONE_NODE = Machine(rates=RATES, device_link=Link(bytes_per_second=1e9, latency_seconds=1e-6))


def subject_of(config, rows=16, **fields):
    """What is planned: a language model, so many rows, AdamW."""
    tokens = jax.ShapeDtypeStruct((rows, config.seq + 1), jnp.int32)
    given = {
        "model": lambda remat: convert_model(apply_remat(config, remat)),
        "loss": next_token_loss,
        "optimizer": optax.adamw(1e-3),
        "batch": {"tokens": tokens, "weights": jax.ShapeDtypeStruct((rows,), jnp.float32)},
    }
    return Subject(**{**given, **fields})


def compiled(subject, choice, num_devices):
    """(figures, mesh axes -> bytes that a device sends) of the step compiled for simulated devices."""
    layout, sizes = choice.layout, axis_sizes(choice.layout.mesh, num_devices)
    model, stages = subject.find_model(choice.remat), subject.stages(sizes["pipeline"], 1)
    mesh = make_mesh(layout, jax.devices()[:num_devices])
    placement = make_placement(model, subject.optimizer, layout, mesh, stages=stages)
    program = compile_step(
        model, subject.loss, subject.optimizer, placement, subject.batch, microbatches=choice.accumulate
    )
    found, sent = figures(program, sizes), defaultdict(float)
    for each in found.collectives:
        sent[each.axes] += each.wire_bytes_per_device
    return found, sent
