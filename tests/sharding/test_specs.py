"""PartitionSpecs of a pytree and rows of the sharding table, by value; no device is used."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.rules import PARAMETER_RULES
from shardtrain.sharding.specs import (
    Row,
    partition_spec,
    partition_specs,
    sharding_rows,
    spec_axes,
    spec_text,
    totals,
)

SIZES = {"pipeline": 1, "data": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2}
LIKE = {
    "block": {
        "gain": jax.ShapeDtypeStruct((8,), jnp.bfloat16),
        "up": jax.ShapeDtypeStruct((8, 6), jnp.float32),
    },
    "free": jax.ShapeDtypeStruct((3, 5), jnp.int8),
    "scale": jax.ShapeDtypeStruct((), jnp.float32),
}
ARRAYS = {
    "block/gain": NamedArray(dims=("seq",), shape=(8,)),
    "block/up": NamedArray(dims=("embed", "mlp"), shape=(8, 6)),
    "free": NamedArray(dims=None, shape=(3, 5)),
    "scale": NamedArray(dims=None, shape=()),
}
SPECS = {"block": {"gain": P(None), "up": P("fsdp", "tensor")}, "free": P(None, None), "scale": P()}


def test_partition_spec():
    assert partition_spec(()) == P()
    assert partition_spec(((), ("data",), ("data", "fsdp"))) == P(None, "data", ("data", "fsdp"))


def test_partition_specs_take_the_structure():
    specs = partition_specs(ARRAYS, LIKE, PARAMETER_RULES, SIZES, "replicate")
    assert specs == SPECS
    with pytest.raises(ValueError, match="free has shape"):
        partition_specs(ARRAYS, LIKE, PARAMETER_RULES, SIZES, "refuse")


@pytest.mark.parametrize(
    ("spec", "axes", "text"),
    [
        (P(), (), "replicated"),
        (P("pipeline"), ("pipeline",), "replicated"),
        (P(None, "fsdp"), ("fsdp",), "- x fsdp"),
        (P(("data", "fsdp"), "tensor"), ("data", "fsdp", "tensor"), "data+fsdp x tensor"),
        (P(("pipeline", "fsdp"), "expert"), ("pipeline", "fsdp", "expert"), "fsdp x -"),
    ],
)
def test_specs_as_axes_and_text(spec, axes, text):
    assert spec_axes(spec) == axes
    assert spec_text(spec, SIZES) == text


def row(**changes):
    values = {
        "path": "block/up", "shape": (8, 6), "dtype": "float32", "dims": ("embed", "mlp"),
        "spec": P("fsdp", "tensor"), "num_bytes": 192, "device_bytes": 24, "copies": 2,
    }  # fmt: skip
    return Row(**{**values, **changes})


def test_rows_and_totals():
    rows = sharding_rows(ARRAYS, LIKE, SPECS, SIZES)
    replicated = {"copies": 16}
    assert rows == (
        row(
            path="block/gain", shape=(8,), dtype="bfloat16", dims=("seq",), spec=P(None),
            num_bytes=16, device_bytes=16, **replicated,
        ),
        row(),
        row(
            path="free", shape=(3, 5), dtype="int8", dims=None, spec=P(None, None),
            num_bytes=15, device_bytes=15, **replicated,
        ),
        row(path="scale", shape=(), dims=None, spec=P(), num_bytes=4, device_bytes=4, **replicated),
    )  # fmt: skip
    assert totals(rows) == (16 + 192 + 15 + 4, 16 + 24 + 15 + 4, 16 + 15 + 4)
    assert totals([]) == (0, 0, 0)


def test_rows_equal_the_shards_of_jax():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"))
    sizes = dict(mesh.shape)
    for spec, dims in (
        (P("fsdp", "tensor"), ("embed", "mlp")),
        (P(None, ("data", "fsdp")), ("seq", "embed")),
    ):
        array = jax.device_put(jnp.zeros((4, 8)), jax.NamedSharding(mesh, spec))
        (found,) = sharding_rows({"x": NamedArray(dims=dims, shape=(4, 8))}, {"x": array}, {"x": spec}, sizes)
        assert {shard.data.nbytes for shard in array.addressable_shards} == {found.device_bytes}
        assert found.num_bytes == array.nbytes
        first = array.addressable_shards[0].index
        assert found.copies == sum(shard.index == first for shard in array.addressable_shards)
