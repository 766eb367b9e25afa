"""Compile a training step ahead of time, also for absent devices, and read its memory and collectives.

No array is allocated and nothing runs. Absent GPUs need the extra `ahead-of-time`. Next:
`plan/hlo/collectives.py`, which reads collectives; `traffic.py`, which computes them in theory.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import optax
from jax.experimental import topologies

from shardtrain.data.row_split import RowSplit
from shardtrain.errors.messages import near
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.plan.devices import find_device
from shardtrain.plan.hlo.collectives import Collective, collectives
from shardtrain.plan.hlo.flops import matrix_flops
from shardtrain.train_step.placement import Placement, restorable_state
from shardtrain.train_step.step import make_step

SAME = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "threads_per_core_limit": 2048,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "shared_memory_per_block": 48 * 2**10,
}
"""Properties of all GPUs below; sizes are in bytes, and a core of XLA is a streaming multiprocessor."""

GPU_TARGETS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "h100": (
        "NVIDIA H100 80GB HBM3",
        {
            "core_count": 132,
            "fpus_per_core": 128,
            "clock_rate_ghz": 1.98,
            "l2_cache_size": 50 * 2**20,
            "shared_memory_per_core": 228 * 2**10,
            "shared_memory_per_block_optin": 227 * 2**10,
        },
    ),
    "a100": (
        "NVIDIA A100-SXM4-80GB",
        {
            "core_count": 108,
            "fpus_per_core": 64,
            "clock_rate_ghz": 1.41,
            "l2_cache_size": 40 * 2**20,
            "shared_memory_per_core": 164 * 2**10,
            "shared_memory_per_block_optin": 163 * 2**10,
        },
    ),
}
"""Kind -> name in the table of known devices, and properties that the table lacks, by NVIDIA."""


def target_config(kind: str) -> str:
    """Format a GPU as the text of XLA's message GpuTargetConfigProto, to compile for it without one.

    >>> print(target_config("h100").splitlines()[-1])
    device_description_str: "NVIDIA H100 80GB HBM3"
    """
    name, numbers = GPU_TARGETS[kind]
    device = find_device(name)
    assert device is not None
    memory = {
        "device_memory_size": device.memory_bytes,
        "memory_bandwidth": round(device.memory_bytes_per_second),
    }
    lines = [f"  {field}: {value}" for field, value in {**SAME, **memory, **numbers}.items()]
    major, minor = (device.compute_capability or "").split(".")
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 8 }",
            f'device_description_str: "{name}"',
        ]
    )


PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
"""Modules that compile for GPUs; one is enough."""

GPUS_PER_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Memory and collectives of a compiled program, by its compiler; bytes are per device.

    Args:
      argument_bytes: bytes of the arguments; a step has its state and its batch.
      output_bytes: bytes of the outputs.
      alias_bytes: bytes of outputs in the memory of donated arguments, such as the state of a step.
      temp_bytes: bytes of temporary memory, in addition to arguments and outputs.
      collectives: the collectives of the program.
      flops: flops of its matrix products and convolutions on one device.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    collectives: tuple[Collective, ...]
    flops: float = 0.0

    @property
    def device_bytes(self) -> int:
        """Bytes of a device while the program runs."""
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


def figures(compiled: jax.stages.Compiled, axis_sizes: Mapping[str, int]) -> Figures:
    """Read the figures of a compiled program.

    Args:
      compiled: the program.
      axis_sizes: the axis sizes of the mesh that it was compiled for, `dict(mesh.shape)`.

    Raises:
      ValueError: see `collectives.collectives`.
    """
    memory: Any = compiled.memory_analysis()
    text = compiled.as_text() or ""
    return Figures(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        collectives=collectives(text, axis_sizes),
        flops=matrix_flops(text),
    )


def compile_step(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    *,
    microbatches: int = 1,
) -> jax.stages.Compiled:
    """Compile the training step from shapes.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: the placement of this model and optimizer; its mesh has devices of this process or of
        `describe_devices`.
      batch: shape (B, ...) and dtype of each array of the global batch.
      microbatches: number of microbatches that a step accumulates.

    Returns:
      The compiled program, for `figures`; on devices of this process it can be called.

    Raises:
      ValueError: B cannot be split over the batch axes and microbatches.
    """
    mesh = placement.mesh
    num_rows = next(iter(batch.values())).shape[0]
    rows = RowSplit.of(mesh.shape, placement.layout.batch_axes, microbatches)
    rows.check(num_rows)
    # batches of a step have a leading dim of microbatches
    split = {
        name: jax.ShapeDtypeStruct(rows.shape(array.shape), array.dtype, sharding=placement.batch)
        for name, array in batch.items()
    }
    state = restorable_state(placement)
    return make_step(model, loss, optimizer, placement).lower(state, split).compile()


def describe_devices(kind: str, num_devices: int) -> Sequence[Any]:
    """Return devices to compile for; GPUs are descriptions and need not be present.

    Args:
      kind: "cpu" for simulated devices of this process (`--cpu-devices`, or `jax_num_cpu_devices` before jax
        starts), "h100" or "a100" for hosts of 8 such GPUs, or a topology of TPUs such as "v5e:4x4".
      num_devices: number of devices: at most 8 or a multiple of 8 GPUs, or the TPUs of the topology.

    Returns:
      The devices, for `make_mesh`.

    Raises:
      ValueError: an unknown kind, or an unavailable number of devices.
      ImportError: the extra `ahead-of-time` is not installed.
    """
    if kind == "cpu":
        devices = jax.devices("cpu")
        if not 1 <= num_devices <= len(devices):
            change = f"give --cpu-devices {num_devices}" if num_devices > 0 else "ask for 1 or more"
            raise ValueError(
                f"{num_devices} CPU devices were asked for and {len(devices)} are simulated; {change}"
            )
        return devices[:num_devices]
    if ":" in kind:
        return _describe_tpus(kind, num_devices)
    if kind not in GPU_TARGETS:
        raise ValueError(f"devices of kind {near(kind, ['cpu', *GPU_TARGETS])} cannot be compiled for")
    if num_devices < 1:
        raise ValueError(f"{num_devices} devices of kind {kind!r} were asked for; ask for 1 or more.")
    # GPUs are described by whole hosts, or as a part of one
    num_hosts, rest = divmod(num_devices, GPUS_PER_HOST)
    if num_hosts and rest:
        down = num_devices - rest
        raise ValueError(
            f"{num_devices} devices of kind {kind!r} do not fill hosts of {GPUS_PER_HOST}: {num_devices} %"
            f" {GPUS_PER_HOST} = {rest}. Use {down} or {down + GPUS_PER_HOST}, or fewer than 8."
        )
    plugin = next(filter(find_spec, PLUGINS), None)
    if plugin is None:
        raise ImportError(
            f"compiling for {kind!r} without a GPU needs the module {PLUGINS[0]}, which is not installed;"
            " install the extra: uv sync --extra ahead-of-time, or pip install 'shardtrain[ahead-of-time]'"
        )
    describe = partial(
        topologies.get_topology_desc,
        platform="cuda",
        topology_name="",
        target_config=target_config(kind),
        topology=f"1x{num_hosts}x{GPUS_PER_HOST}" if num_hosts else f"1x1x{num_devices}",
    )
    try:
        return describe().devices
    except NotImplementedError:
        # where CUDA's libraries are not, jax has left the plugin out, which compiles without them
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        import_module(plugin.replace("jax_", "jax_plugins.xla_").removesuffix("_plugin")).initialize()
        return describe().devices


def _describe_tpus(kind: str, num_devices: int) -> Sequence[Any]:
    if find_spec("libtpu") is None:
        raise ImportError(
            f"compiling for {kind!r} without a TPU needs the module libtpu, which is not installed; install"
            " the extra: uv sync --extra ahead-of-time-tpu, or pip install 'shardtrain[ahead-of-time-tpu]'"
        )
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=kind).devices
    except Exception as error:
        raise ValueError(
            f"there is no topology {kind!r} ({error}); use one such as v5e:4x4, v5p:4x4x4 or v6e:16x16"
        ) from error
    if len(devices) != num_devices:
        raise ValueError(
            f"the topology {kind!r} has {len(devices)} devices, and the mesh {num_devices}; use a topology"
            " with as many, or plan for as many"
        )
    return devices
