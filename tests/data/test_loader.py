"""The rows of a process, padded and placed on the mesh, with the weights of padding set to 0."""

import itertools

import jax
import numpy as np
import pytest

from shardtrain.data import Batches, Loader, batch_shard
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

AXES = ("data", "fsdp")


def mesh(num_devices: int):
    return make_mesh(Layout(mesh={"data": num_devices}), jax.devices()[:num_devices])


def test_islands_load_every_row_once():
    for counts in ([12], [7, 5], [12, 0], [1, 0, 11]):
        shards = [batch_shard(counts, i, mesh(2), AXES, 1) for i in range(len(counts))]
        real = [shard.rows[shard.real].tolist() for shard in shards]
        assert [row for rows in real for row in rows] == list(range(12))
        assert all(shard.num_rows % 2 == 0 and len(shard.rows) == shard.num_rows > 0 for shard in shards)
        assert [shard.start for shard in shards] == np.cumsum([0, *counts[:-1]]).tolist()


def test_one_island_pads_nothing():
    with pytest.raises(ValueError, match=r"13 % 2 = 1. Use 12 or 14."):
        batch_shard([13], 0, mesh(2), AXES, 1)


def test_padding_is_a_copy_of_the_island_with_weight_0():
    source = [{"x": np.array(float(i)), "weights": np.full(3, 0.5, np.float32)} for i in range(10)]
    # 2 devices, 2 microbatches: 3 rows become 4; a multiple of 8, as of a larger stage, makes 8
    for counts, island, multiple, rows, real in [
        ([7, 3], 1, None, [7, 8, 9, 7], [1, 1, 1, 0]),
        ([7, 3], 1, 8, [7, 8, 9, 7, 8, 9, 7, 8], [1, 1, 1, 0, 0, 0, 0, 0]),
        ([10, 0], 1, None, [0, 0, 0, 0], [0, 0, 0, 0]),
    ]:
        shard = batch_shard(counts, island, mesh(2), AXES, 2, multiple)
        loader = Loader(Batches(source=source, batch=10, shuffle=False), {}, mesh(2), AXES, 2)
        loader = loader.replace_shards({10: shard})
        placed, _ = next(loader.iterate())
        assert placed["x"].shape == (2, loader.shard().num_rows // 2) == (2, len(rows) // 2)
        np.testing.assert_array_equal(placed["x"].reshape(-1), rows)
        np.testing.assert_array_equal(placed["weights"].reshape(-1, 3)[:, 0], 0.5 * np.array(real))


def test_a_short_last_batch_and_an_uneven_island_pad_together():
    source = [{"x": np.array(float(i))} for i in range(8)]
    shard = batch_shard([3, 3], 1, mesh(2), AXES, 1)
    loader = Loader(Batches(source=source, batch=6, shuffle=False), {}, mesh(2), AXES, 1)
    (first, _), (placed, _) = itertools.islice(loader.replace_shards({6: shard}).iterate(), 2)
    # rows 3 to 5 of a batch of which only 2 rows exist: nothing counts
    np.testing.assert_array_equal(placed["weights"], np.zeros((1, 4)))
    np.testing.assert_array_equal(first["weights"], [[1, 1, 1, 0]])
