"""Make the jax mesh of a layout over the devices of this island. Next: `specs.py`."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from shardtrain import axes
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout


def make_mesh(layout: Layout, devices: Sequence[Any] | None = None) -> Mesh:
    """Make the mesh of a layout: all six axes, slowest first, assigned to devices by their topology.

    Args:
      layout: its `mesh` has the axis sizes; -1 means the remaining devices.
      devices: the devices of the mesh; by default all devices of this jax runtime.

    Returns:
      A Mesh whose axes are all of type Auto: Flax modules work on it unchanged.

    Raises:
      ValueError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(layout.mesh, len(devices))
    return jax.make_mesh(
        tuple(sizes.values()), axes.AXES, axis_types=(AxisType.Auto,) * len(axes.AXES), devices=devices
    )


def abstract_mesh(sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh without devices, for tracing programs; nothing can be computed or compiled on it.

    Args:
      sizes: axis -> size of all axes, slowest first, see `axis_sizes`.
    """
    types = (AxisType.Auto,) * len(sizes)
    # tracing reads only the names and sizes of axes, which it has as any mesh
    device = AbstractDevice(device_kind="any", num_cores=None, platform="any")
    return cast(
        Mesh, AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)
    )
