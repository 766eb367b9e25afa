import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.bucket_exchange import PACKED_BELOW, PackedGradients

SHAPES = {"bias": (3,), "kernel": (4, 8), "table": (PACKED_BELOW // 8, 8), "scale": ()}
BUCKETS = [("kernel", "bias"), ("table", "scale"), ()]


def packed_gradients(dtype):
    leaves = {path: jax.ShapeDtypeStruct(shape, dtype) for path, shape in SHAPES.items()}
    return PackedGradients([{path: leaves[path] for path in bucket} for bucket in BUCKETS])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_small_gradients_of_a_bucket_become_one_array_and_come_back_bit_by_bit(dtype):
    packing = packed_gradients(dtype)
    names = [f"small leaves of bucket {number}" for number in range(2)]
    assert [{name: leaf.shape for name, leaf in bucket.items()} for bucket in packing.buckets] == [
        {names[0]: (35,)},
        {"table": SHAPES["table"], names[1]: (1,)},
        {},
    ]
    mesh = make_mesh(Layout(mesh={"fsdp": 2, "tensor": 4}))
    whole = NamedSharding(mesh, PartitionSpec())
    specs = {
        "bias": PartitionSpec(),
        "kernel": PartitionSpec("fsdp", "tensor"),
        "table": PartitionSpec("tensor", "fsdp"),
        "scale": PartitionSpec(),
    }
    shardings = {path: NamedSharding(mesh, spec) for path, spec in specs.items()}
    draw = np.random.default_rng(0).normal
    grads = {
        path: jax.device_put(jnp.asarray(draw(size=shape), dtype), shardings[path])
        for path, shape in SHAPES.items()
    }
    wanted = packing.shardings(shardings, whole)
    pack = jax.jit(lambda grads, count: packing.pack(grads, count, whole), out_shardings=wanted)
    packed = pack(grads, 3.0)
    # what is large stays as it is sharded; what is packed, every device has
    assert packed["table"].sharding == shardings["table"]
    assert packed[names[0]].is_fully_replicated
    assert {name: (x.shape, x.dtype) for name, x in packed.items()} == {
        name: (leaf.shape, leaf.dtype) for bucket in packing.buckets for name, leaf in bucket.items()
    }
    found = jax.jit(packing.unpack)(packed)
    assert found.keys() == grads.keys()
    for path, x in grads.items():
        np.testing.assert_array_equal(np.asarray(found[path], np.float32), np.asarray(x, np.float32))
    # without examples nothing is added, whatever the gradients are
    bad = {path: x.at[(0,) * x.ndim].set(jnp.nan) for path, x in grads.items()}
    assert not any(np.asarray(x, np.float32).any() for x in pack(bad, 0.0).values())
    assert all(np.isnan(np.asarray(x, np.float32)).any() for x in pack(bad, 1.0).values())
