"""Batches whose rows change between two of them: the same samples in the same rows, and who read which."""

import jax
import numpy as np

from shardtrain.data import Batches, Loader, Position, batch_shard
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.trainer.feed import Feed

SOURCE = [{"x": np.array(i), "weights": np.float32(1)} for i in range(23)]


def test_the_rows_change_between_two_batches_and_each_batch_knows_its_loader():
    layout = Layout(mesh={"data": 1})
    mesh = make_mesh(layout, jax.devices()[:1])
    first, second = (
        batch_shard(rows, 0, mesh, layout.batch_axes, 1, capacity=capacity)
        for rows, capacity in (([4, 4], 4), ([5, 3], 6))
    )
    whole = Batches(source=SOURCE, batch=8, seed=3)
    expected = [batch["x"] for batch, _ in zip((b for b, _ in whole.iterate()), range(4), strict=False)]
    feed = Feed(Loader(whole, {}, mesh, layout.batch_axes, 1).replace_shards({8: first}))
    found = []
    with feed.reading(Position(epoch=0, index=0)):
        for number in range(4):
            if number == 2:
                feed.change({8: second})
            batch, _ = next(feed)
            # a program may have to be compiled for the first batch, and for the first after the change
            assert feed.take_change() == (number in (0, 2))
            assert (feed.num_rows, feed.first_row) == (8, 0)
            found.append((np.asarray(batch["x"])[0], np.asarray(batch["weights"])[0]))
        again = [feed.load(number) for number in range(4)]
    for (x, weights), all_rows, rows in zip(found, expected, (4, 4, 5, 5), strict=True):
        np.testing.assert_array_equal(x[:rows], all_rows[:rows])
        assert not weights[rows:].any()
    assert [len(x) for x, _ in found] == [4, 4, 6, 6]
    for (x, _), batch, rows in zip(found, again, (4, 4, 5, 5), strict=True):
        np.testing.assert_array_equal(batch["x"][:rows], x[:rows])
