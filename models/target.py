"""Find the devices for which a model is traced: devices of this process, or devices that are only described.

Next: `on_gpus.py` and `one_cpu.py`, which rewrite models for such devices.
"""

from typing import Any

import jax
from flax.core.spmd import get_logical_axis_rules

from shardtrain.axes import DATA


def target_devices() -> list[Any]:
    """Return the devices of this process of the kind that the traced program will run on.

    Inside a mesh they are of its kind: [] for a mesh of described devices that this process does not have.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    devices = jax.local_devices()
    return [d for d in devices if described is None or d.device_kind == described.device_kind]


def target_platform() -> str:
    """Return jax's platform of the devices that the traced program will run on, which may be described."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.local_devices()[0] if described is None else described).platform


def is_on_one_device() -> bool:
    """Return whether the traced program, or its replica of the model, will run on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    # outside of a run a model may be traced for all devices, or for a mesh to be chosen
    if mesh.empty:
        return len(jax.local_devices()) == 1
    if getattr(get_logical_axis_rules(), "any_mesh", False):
        return False
    # each device runs its own replica if the axis data is manual
    own = {DATA} & set(mesh.manual_axes)
    return all(size == 1 or axis in own for axis, size in mesh.shape.items())
