"""Copies that are not the same bits are found, and the device that has them is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.trainer.synchronisation import compute_fingerprints, divergence_text, make_find_divergence


def test_a_fingerprint_notices_any_change():
    tree = {"a": jnp.arange(5.0), "b": jnp.array([True, False]), "c": jnp.ones((2, 3), jnp.bfloat16)}
    before = np.asarray(compute_fingerprints(tree))
    swapped = {**tree, "a": tree["a"][jnp.array([1, 0, 2, 3, 4])]}
    lowest_bit = {**tree, "a": tree["a"].at[3].set(jnp.nextafter(3.0, 4.0))}
    flipped = {**tree, "b": ~tree["b"]}
    for changed, which in ((swapped, 0), (lowest_bit, 0), (flipped, 1)):
        assert (np.asarray(compute_fingerprints(changed)) != before).tolist() == [
            i == which for i in range(3)
        ]


def placed(sizes, spec):
    mesh = make_mesh(Layout(mesh=sizes), jax.devices()[: int(np.prod(list(sizes.values())))])
    sharding = NamedSharding(mesh, spec)
    return mesh, {"w": sharding}, {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding)}


def damaged(array, device):
    """The array with one number changed on one device alone: what no honest program does."""
    shards = [
        jax.device_put(shard.data.at[0, 0].add(1e-3) if shard.device == device else shard.data, shard.device)
        for shard in array.addressable_shards
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ({"data": 4}, PartitionSpec()),
        ({"data": 4, "fsdp": 2}, PartitionSpec("fsdp")),
        ({"data": 3, "tensor": 2}, PartitionSpec(None, "tensor")),
    ],
    ids=["replicated", "fsdp", "tensor"],
)
def test_a_device_whose_copy_differs_is_named(sizes, spec):
    mesh, shardings, tree = placed(sizes, spec)
    find = make_find_divergence(mesh, shardings)
    assert find(tree) == []
    for device in (mesh.devices.flat[0], mesh.devices.flat[-1]):
        found = find({"w": damaged(tree["w"], device)})
        assert [(each.path, each.devices) for each in found] == [("w", (device,))]
        text = divergence_text(7, found)
        assert f"after step 7 copies on {device} of process 0 of w are not the bits" in text


def test_of_two_copies_both_are_named_and_of_one_none():
    mesh, shardings, tree = placed({"data": 2}, PartitionSpec())
    find = make_find_divergence(mesh, shardings)
    found = find({"w": damaged(tree["w"], mesh.devices.flat[1])})
    assert found[0].devices == tuple(mesh.devices.flat)
    assert "one of the copies on" in divergence_text(1, found)
    mesh, shardings, tree = placed({"fsdp": 4}, PartitionSpec("fsdp"))
    find = make_find_divergence(mesh, shardings)
    assert find({"w": damaged(tree["w"], mesh.devices.flat[1])}) == []
