"""The operations of models (`Ops`), and those for the devices of a program.

A model is given its operations and asks for nothing: `set_ops(model, find_ops())` before a call of one's own,
a run by `functional/run_trace.py` (docs/decisions/0061).
"""

from typing import Any, NamedTuple

import jax

from shardtrain.axes import DATA
from shardtrain.models.ops.cpus import CpuOps, OneCpuOps
from shardtrain.models.ops.gpus import GpuOps, OneGpuOps
from shardtrain.models.ops.plain import PLAIN, Ops, WithOps, set_ops

__all__ = [
    "PLAIN",
    "CpuOps",
    "GpuOps",
    "OneCpuOps",
    "OneGpuOps",
    "Ops",
    "WithOps",
    "find_devices",
    "find_ops",
    "set_ops",
]


def find_ops(*, any_mesh: bool = False, **of_run: Any) -> Ops:
    """Return the operations for the mesh under which a program is traced; without one, for all devices here.

    Args:
      any_mesh: whether the program is for meshes that are not chosen yet, though this one has one device.
      of_run: further fields of `Ops`. `devices` are those of this process by default.
    """
    devices = find_devices()
    described = jax.sharding.get_abstract_mesh().abstract_device
    platform = (jax.local_devices()[0] if described is None else described).platform
    kind: type[Ops] = Ops
    if platform in ("gpu", "cuda", "rocm"):
        kind = OneGpuOps if _is_one_device(any_mesh) else GpuOps
    elif devices and all(device.device_kind == "cpu" for device in devices):
        kind = OneCpuOps if _is_one_device(any_mesh) else CpuOps
    kinds = tuple(Device(d.device_kind, getattr(d, "compute_capability", "")) for d in devices)
    return kind(**{"devices": kinds, **of_run})


class Device(NamedTuple):
    """What decides about an attention; unlike a device of jax it can be copied with a module.

    Attributes:
      device_kind: its name in jax.
      compute_capability: of a GPU, such as "9.0"; "" for others.
    """

    device_kind: str
    compute_capability: str


def find_devices() -> list[Any]:
    """Return the devices of this process of the kind that the traced program will run on.

    Inside a mesh they are of its kind: [] for a mesh of described devices that this process does not have.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    devices = jax.local_devices()
    return [d for d in devices if described is None or d.device_kind == described.device_kind]


def _is_one_device(any_mesh: bool) -> bool:
    """Return whether the traced program, or its replica of the model, will run on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    # outside of a run a model may be traced for all devices, or for a mesh to be chosen
    if mesh.empty:
        return len(jax.local_devices()) == 1
    if any_mesh:
        return False
    # each device runs its own replica if the axis data is manual
    own = {DATA} & set(mesh.manual_axes)
    return all(size == 1 or axis in own for axis, size in mesh.shape.items())
