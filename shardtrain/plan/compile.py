"""Compile a training step ahead of time, also for absent devices, and read its memory and collectives.

From shapes alone: no array is allocated, nothing runs. Absent GPUs need the extra `ahead-of-time`.
Collectives are read in `plan/hlo/collectives.py`; their theory is in `traffic.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from shardtrain.train_step.initial_state import restorable_state
from shardtrain.train_step.placement import Placement
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
"""Equal for all GPUs below; in bytes; a core of XLA is a streaming multiprocessor."""

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
"""Kind -> name in the table of known devices, and what NVIDIA publishes beside that."""


def target_config(kind: str) -> str:
    """Format one GPU as the text of XLA's message GpuTargetConfigProto, to compile for it in its absence.

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
"""Modules of which one compiles for GPUs."""

GPUS_PER_HOST = 8


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Memory and collectives of a compiled program, by its compiler; bytes are per device.

    Args:
      argument_bytes: arguments; of a step its state and its batch.
      output_bytes: outputs.
      alias_bytes: outputs in the memory of donated arguments, as the state of a step.
      temp_bytes: temporary memory beside arguments and outputs.
      collectives: the collectives of the program.
      flops: of its matrix products and convolutions, on one device.
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
    """Compile the training step from shapes alone.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: the placement of this model and optimizer, from `make_placement`; its mesh is over devices of
        this process or over `describe_devices`.
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
    # the step takes a leading dim of microbatches, as `place` makes it
    split = {
        name: jax.ShapeDtypeStruct(rows.shape(array.shape), array.dtype, sharding=placement.batch)
        for name, array in batch.items()
    }
    state = restorable_state(placement)
    return make_step(model, loss, optimizer, placement).lower(state, split).compile()


def describe_devices(kind: str, num_devices: int) -> Sequence[Any]:
    """Return devices to compile for; GPUs are descriptions and need not be present.

    Args:
      kind: "cpu": simulated devices of this process (`--cpu-devices`, or `jax_num_cpu_devices` before jax
        starts); "h100" or "a100": hosts of 8 such GPUs; a topology of TPUs, such as "v5e:4x4".
      num_devices: for GPUs at most 8, or a multiple of 8; for TPUs those of the topology.

    Returns:
      The devices, for `make_mesh`.

    Raises:
      ValueError: an unknown kind, or an unavailable number of devices.
      ImportError: the extra `ahead-of-time` is not installed.
    """
    if kind == "cpu":
        devices = jax.devices("cpu")
        if not 1 <= num_devices <= len(devices):
            raise ValueError(too_few_text(num_devices, len(devices)))
        return devices[:num_devices]
    if ":" in kind:
        return _tpus(kind, num_devices)
    if kind not in GPU_TARGETS:
        raise ValueError(f"devices of kind {near(kind, ['cpu', *GPU_TARGETS])} cannot be compiled for")
    # GPUs are described by whole hosts, or as a part of one
    num_hosts, rest = divmod(num_devices, GPUS_PER_HOST)
    if num_devices < 1 or (num_hosts and rest):
        raise ValueError(host_text(kind, num_devices))
    if not any(map(find_spec, PLUGINS)):
        raise ImportError(missing_plugin_text(kind))
    return topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=target_config(kind),
        topology=f"1x{num_hosts}x{GPUS_PER_HOST}" if num_hosts else f"1x1x{num_devices}",
    ).devices


def _tpus(kind: str, num_devices: int) -> Sequence[Any]:
    """Return the devices of a topology of TPUs."""
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


def too_few_text(num_devices: int, num_here: int) -> str:
    """Format the error for more CPU devices than this process simulates.

    >>> too_few_text(16, 8)
    '16 CPU devices were asked for and 8 are simulated; give --cpu-devices 16'
    """
    change = f"give --cpu-devices {num_devices}" if num_devices > 0 else "ask for 1 or more"
    return f"{num_devices} CPU devices were asked for and {num_here} are simulated; {change}"


def host_text(kind: str, num_devices: int) -> str:
    """Format the error for a number of GPUs that does not fill its hosts.

    >>> host_text("h100", 12)
    "12 devices of kind 'h100' do not fill hosts of 8: 12 % 8 = 4. Use 8 or 16, or fewer than 8."
    """
    if num_devices < 1:
        return f"{num_devices} devices of kind {kind!r} were asked for; ask for 1 or more."
    rest = num_devices % GPUS_PER_HOST
    down = num_devices - rest
    return (
        f"{num_devices} devices of kind {kind!r} do not fill hosts of {GPUS_PER_HOST}:"
        f" {num_devices} % {GPUS_PER_HOST} = {rest}. Use {down} or {down + GPUS_PER_HOST}, or fewer than 8."
    )


def missing_plugin_text(kind: str) -> str:
    """Format the error for a missing CUDA compiler of jax."""
    return (
        f"compiling for {kind!r} without a GPU needs the module {PLUGINS[0]}, which is not installed;"
        " install the extra: uv sync --extra ahead-of-time, or pip install 'shardtrain[ahead-of-time]'"
    )
