"""Batches on the mesh, also over two processes."""

import math
import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from shardtrain.axes import AXES
from shardtrain.data import Batches, RowSplit, place, process_rows
from shardtrain.data.row_split import full_weights

BATCH_AXES = ("data", "fsdp")
MESHES = [
    {"data": 8},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"pipeline": 2, "fsdp": 4},
    {"tensor": 8},
    {"data": 1},
]


def make_mesh(sizes):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


@pytest.mark.parametrize(("sizes", "microbatches"), [*zip(MESHES, (1, 3, 3, 1, 3), strict=True)], ids=str)
def test_values_and_sharding(sizes, microbatches):
    mesh = make_mesh(sizes)
    tokens = np.arange(48 * 5, dtype=np.int32).reshape(48, 5)
    batch = {"tokens": tokens, "weights": np.arange(48, dtype=np.float32)}
    placed = place(batch, mesh, BATCH_AXES, microbatches)
    part = 48 // microbatches
    assert placed["tokens"].shape == (microbatches, part, 5)
    assert placed["weights"].shape == (microbatches, part)
    for name, leaf in placed.items():
        assert leaf.sharding.spec == PartitionSpec(None, BATCH_AXES)
        assert leaf.sharding.mesh == mesh
        assert leaf.dtype == batch[name].dtype
        for number in range(microbatches):
            np.testing.assert_array_equal(leaf[number], batch[name][number * part : (number + 1) * part])
    num_shards = mesh.shape["data"] * mesh.shape["fsdp"]
    assert {shard.data.shape for shard in placed["tokens"].addressable_shards} == {
        (microbatches, part // num_shards, 5)
    }
    np.testing.assert_array_equal(process_rows(48, mesh, BATCH_AXES, microbatches), np.arange(48))


@pytest.mark.parametrize(
    ("batch", "sizes", "microbatches", "text"),
    [
        (32, {"data": 2, "fsdp": 4}, 4, None),
        (5, {}, 5, None),
        (
            30,
            {"data": 2, "fsdp": 4},
            1,
            "batch 30 cannot be split over axes ('data','fsdp') of total size 8 and 1 microbatch:"
            " 30 % 8 = 6. Use 24 or 32.",
        ),
        (
            12,
            {"data": 8},
            2,
            "batch 12 cannot be split over axes ('data') of total size 8 and 2 microbatches:"
            " 12 % 16 = 12. Use 16.",
        ),
        (
            0,
            {"data": 2},
            1,
            "batch 0 cannot be split over axes ('data') of total size 2 and 1 microbatch: 0 % 2 = 0. Use 2.",
        ),
        (8, {"data": 2}, 0, "batch 8 cannot be split into 0 microbatches. Use 1 or more."),
    ],
)
def test_a_batch_that_does_not_divide(batch, sizes, microbatches, text):
    assert RowSplit(sizes, microbatches).problem(batch) == text


def test_refuses():
    mesh = make_mesh({"data": 8})
    with pytest.raises(ValueError, match=r"30 % 8 = 6. Use 24 or 32."):
        place({"x": np.zeros((30, 2))}, mesh, BATCH_AXES)
    with pytest.raises(ValueError, match=r"30 % 8 = 6. Use 24 or 32."):
        process_rows(30, mesh, BATCH_AXES)
    with pytest.raises(ValueError, match=r"an axis that the mesh does not have: 'fsdb' .did you mean 'fsdp'"):
        place({"x": np.zeros((8, 2))}, mesh, ("data", "fsdb"))
    with pytest.raises(ValueError, match=r"different numbers of rows: .*'x'.*8.*'y'.*16"):
        place({"x": np.zeros(8), "y": np.zeros(16)}, mesh, BATCH_AXES)


@pytest.mark.parametrize(
    ("batch", "problems"),
    [
        (
            {"x": np.zeros((8, 2)), "label": [1] * 8, "rate": 0.5, "scale": np.array(2.0)},
            [
                "'label' is of type list; use np.asarray, with a row for each example",
                "'rate' is of type float; repeat it by np.full, with a row for each example",
                "'scale' is an array of shape (); repeat it by np.full, with a row for each example",
            ],
        ),
        # lists of arrays are trees, as for jax
        (
            {"x": [np.zeros(8), 3]},
            ["'x/1' is of type int; repeat it by np.full, with a row for each example"],
        ),
        ({}, ["it has no arrays; give at least one"]),
    ],
)
def test_refuses_what_is_no_array_with_rows(batch, problems):
    with pytest.raises(ValueError, match=r"^this batch cannot be placed:") as error:
        place(batch, make_mesh({"data": 8}), BATCH_AXES)
    assert str(error.value).splitlines()[1:] == [f"  - {problem}" for problem in problems]


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_that_would_wrap_are_refused(dtype):
    mesh, limits = jax.make_mesh((8,), ("data",), (AxisType.Auto,)), np.iinfo(dtype.replace("64", "32"))
    fits = np.array([limits.min, limits.max] * 4, dtype)
    np.testing.assert_array_equal(place({"id": fits}, mesh, ("data",))["id"][0], fits)
    wrong = fits.copy()
    wrong[5] = 8_600_000_000
    with pytest.raises(ValueError) as error:
        place({"id": wrong, "x": fits}, mesh, ("data",))
    assert str(error.value).startswith(
        f"this batch has integers that devices do not have:\n  - 'id' is {dtype} and has 8600000000; devices"
        f" have {limits.dtype}, from {limits.min} to {limits.max}, in which it would wrap"
    )


@pytest.mark.parametrize("sizes", MESHES[1:3], ids=str)
def test_weights_without_padding_are_placed_once(sizes):
    mesh = make_mesh(sizes)
    batches = Batches(source=[{"x": np.arange(3)}] * 24, batch=16, epochs=1).iterate()
    whole, padded = (batch for batch, _ in batches)
    placed = [place(batch, mesh, BATCH_AXES, 2)["weights"] for batch in (whole, whole, padded)]
    assert placed[0] is placed[1]
    np.testing.assert_array_equal(placed[0], np.ones((2, 8), np.float32))
    np.testing.assert_array_equal(placed[2], [[1] * 8, [0] * 8])
    # as many rows of weights that a source gives, and those of another split, are others
    given = {**whole, "weights": np.full(16, 2, np.float32)}
    np.testing.assert_array_equal(place(given, mesh, BATCH_AXES, 2)["weights"], np.full((2, 8), 2))
    assert place(whole, mesh, BATCH_AXES)["weights"].shape == (1, 16)


PROCESS = """
import sys
import jax
import numpy as np
port, index = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
from jax.sharding import AxisType
from shardtrain.axes import AXES
from shardtrain.data import place, process_rows

for sizes, num_local in (({"data": 4, "tensor": 2}, 12), ({"tensor": 2, "fsdp": 2, "pipeline": 2}, 24)):
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    whole = np.arange(24 * 2).reshape(24, 2).astype(np.int32)
    rows = process_rows(24, mesh, ("data", "fsdp"), 3)
    assert len(rows) == num_local, rows
    placed = place({"x": whole[rows]}, mesh, ("data", "fsdp"), 3, num_rows=24)["x"]
    assert placed.shape == (3, 8, 2)
    for shard in placed.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole.reshape(3, 8, 2)[shard.index])
print("rows", rows.size)
"""


def test_each_of_two_processes_gives_its_rows():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env_flags = "--xla_force_host_platform_device_count=4"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, port, str(index)],
            env=os.environ | {"XLA_FLAGS": env_flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    assert all("rows 24" in output for output in outputs), "\n".join(outputs)


def test_weights_that_a_program_took_over_are_placed_again():
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1], axis_types=(AxisType.Auto,))
    batch = {"weights": full_weights(4)}
    first = place(batch, mesh, ())
    assert place(batch, mesh, ())["weights"] is first["weights"]
    first["weights"].delete()
    np.testing.assert_array_equal(place(batch, mesh, ())["weights"], np.ones((1, 4), np.float32))
