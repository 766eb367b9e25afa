"""The jax mesh of a layout."""

import jax
import pytest
from jax.sharding import AxisType

from shardtrain.axes import AXES
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh


@pytest.mark.parametrize(
    ("asked", "num_devices", "sizes"),
    [
        ({"data": -1}, 8, (1, 8, 1, 1, 1, 1)),
        ({"tensor": 2, "data": 2, "fsdp": -1}, 8, (1, 2, 2, 1, 1, 2)),
        ({"data": -1}, 1, (1,) * 6),
        ({"fsdp": 3}, 3, (1, 1, 3, 1, 1, 1)),
    ],
)
def test_the_mesh_has_all_axes_in_order_over_all_devices(asked, num_devices, sizes):
    devices = jax.devices()[:num_devices]
    mesh = make_mesh(Layout(mesh=asked), devices)
    assert mesh.shape == dict(zip(AXES, sizes, strict=True))
    assert set(mesh.devices.flat) == set(devices)
    assert mesh.axis_types == (AxisType.Auto,) * 6


def test_the_default_is_every_device():
    assert make_mesh(Layout()).shape["data"] == jax.device_count() == 8
