"""The text of the sharding of a state, by value."""

import jax.numpy as jnp
import optax

from shardtrain.functional.model import Model
from shardtrain.report.sharding import sharding_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.placement import state_specs

MODEL = Model(
    init=lambda key: (
        {"scale": jnp.ones(()), "free": jnp.ones((3, 5)), "up": jnp.ones((2, 16, 64)), "gain": jnp.ones(16)},
        {},
    ),
    apply=lambda *inputs: inputs,
    dims={"scale": None, "free": None, "up": ("layers", "embed", "mlp"), "gain": ("embed",)},
)


def text(layout, num_devices):
    sizes = axis_sizes(layout.mesh, num_devices)
    return sharding_text(state_specs(MODEL, optax.adam(1e-3), layout, sizes), sizes)


def test_the_text_of_all_parameters():
    assert text(Layout(mesh={"fsdp": 4, "tensor": 2}, unnamed="replicate"), 8) == (
        "mesh: fsdp=4 tensor=2 (8 devices)\n"
        "  parameter   shape         dims               sharded over        bytes/device\n"
        " ───────────────────────────────────────────────────────────────────────────────\n"
        "  free        3 x 5         (no names)         replicated          60 B\n"
        "  gain        16            embed              fsdp                16 B\n"
        "  scale       scalar        (no names)         replicated          4 B\n"
        "  up          2 x 16 x 64   layers embed mlp   - x fsdp x tensor   1.0 KiB\n"
        "parameters: 2,080, 8.1 KiB; 1.1 KiB per device\n"
        "optimizer state: 16.3 KiB; 2.2 KiB per device\n"
        "replicated on every device (64 B): free, scale\n"
        "no names for the dims of free: replicated on every device"
    )


def test_zero_1_shards_the_optimizer_state_alone():
    lines = text(Layout(mesh={"fsdp": 8}, zero=1, unnamed="replicate"), 8).splitlines()
    assert lines[-4:] == [
        "parameters: 2,080, 8.1 KiB; 8.1 KiB per device",
        "optimizer state: 16.3 KiB; 2.1 KiB per device",
        "replicated on every device: all parameters",
        "no names for the dims of free: replicated on every device",
    ]


def test_one_device_replicates_nothing():
    lines = text(Layout(mesh={"data": 1}, unnamed="replicate"), 1).splitlines()
    assert lines[0] == "mesh: 1 device"
    assert lines[-2:] == [
        "optimizer state: 16.3 KiB; 16.3 KiB per device",
        "no names for the dims of free: on several devices they need them, or --unnamed replicate",
    ]
