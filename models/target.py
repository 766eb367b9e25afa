"""For which devices a model is being traced: those of this process, or devices that are only described.

Next: `on_gpus.py` and `one_cpu.py`, the forms of models for such devices.
"""

from typing import Any

import jax
from flax.core.spmd import get_logical_axis_rules

from shardtrain.axes import DATA


def target_devices() -> list[Any]:
    """The devices of this process of the kind that the program being traced will run on.

    Inside a mesh they are of its kind, so [] for a mesh of devices that are described but not here.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    devices = jax.local_devices()
    return [d for d in devices if described is None or d.device_kind == described.device_kind]


def target_platform() -> str:
    """The platform, by jax, of the devices that the traced program will run on, here or only described."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return (jax.local_devices()[0] if described is None else described).platform


def is_on_one_device() -> bool:
    """Whether the program that is being traced, or its replica of the model, will run on one device."""
    mesh = jax.sharding.get_abstract_mesh()
    # outside of a run a model may be traced for all devices, or for a mesh to be chosen
    if mesh.empty:
        return len(jax.local_devices()) == 1
    if getattr(get_logical_axis_rules(), "any_mesh", False):
        return False
    # of several devices each runs a replica of its own where the axis data is manual
    own = {DATA} & set(mesh.manual_axes)
    return all(size == 1 or axis in own for axis, size in mesh.shape.items())
