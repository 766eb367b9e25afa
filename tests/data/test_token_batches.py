"""Batches of at most N tokens: every sample once, few shapes, free of the layout, resumed at any batch."""

import itertools

import jax
import numpy as np
import pytest

from shardtrain.data import Loader, Position, TokenBatches, batch_shard, split_over_islands, token_batches
from shardtrain.data.token_batches import length_ladder
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh


class Lines:
    """Sample i is i, repeated; its length is random."""

    def __init__(self, num_samples: int = 200, longest: int = 40, seed: int = 0):
        self.lengths = np.random.default_rng(seed).integers(1, longest + 1, num_samples)

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"tokens": np.full(self.lengths[index] + 1, index + 1, np.int32), "label": np.int32(index)}


class Mismatched(Lines):
    """Its lengths are of other samples."""

    def __len__(self):
        return 4


def whole(batches: TokenBatches, position=None):
    return list(batches.iterate(position))


@pytest.fixture(params=[1 << 16, 64], ids=["one chunk", "four chunks"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(token_batches, "CHUNK", request.param)
    return request.param


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_sample_is_once_in_an_epoch_in_batches_of_few_shapes_and_at_most_n_tokens(chunk, shuffle):
    source = Lines()
    batches = TokenBatches(source=source, batch=96, seed=3, epochs=2, shuffle=shuffle)
    found = whole(batches)
    assert len(found) == batches.num_batches()
    ladder = length_ladder(40)
    assert ladder == [8, 16, 32, 40]
    seen: dict[int, list[int]] = {0: [], 1: []}
    epoch = 0
    for batch, after in found:
        rows, length = batch["weights"].shape
        assert rows * length <= 96
        assert (rows, length) in {(96 // each, each) for each in ladder}
        assert batch["tokens"].shape == (rows, length + 1)
        real = batch["weights"].any(1)
        for tokens, weights, label in zip(
            batch["tokens"][real], batch["weights"][real], batch["label"][real], strict=True
        ):
            own = int(source.lengths[label])
            # to the next length of the ladder, and no further
            assert length == min(each for each in ladder if each >= own)
            np.testing.assert_array_equal(tokens, np.where(np.arange(length + 1) <= own, label + 1, 0))
            np.testing.assert_array_equal(weights, np.arange(length) < own)
        seen[epoch] += batch["label"][real].tolist()
        epoch = after["epoch"]
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(200))
    assert (seen[0] != seen[1]) == shuffle
    # batches of one length do not follow each other: the order is that of the samples
    lengths = [batch["weights"].shape[1] for batch, _ in found[: len(found) // 2]]
    assert sum(a != b for a, b in itertools.pairwise(lengths)) > len(lengths) // 3


def test_it_resumes_at_any_batch_and_every_position_is_found(chunk):
    batches = TokenBatches(source=Lines(), batch=96, seed=3)
    found = list(itertools.islice(batches.iterate(), 150))
    assert found[-1][1]["epoch"] > 1
    start = Position(epoch=0, index=0)
    for number in (1, 20, 60, 61, 149):
        position = found[number - 1][1]
        assert batches.advance(start, number) == position
        resumed = TokenBatches(source=Lines(), batch=96, seed=3).iterate(position)
        for (batch, after), (expected, expected_after) in zip(resumed, found[number:], strict=False):
            assert after == expected_after
            assert batch.keys() == expected.keys()
            for name, x in expected.items():
                np.testing.assert_array_equal(batch[name], x)
    assert batches.num_rows(None) == len(found[0][0]["weights"])


@pytest.mark.parametrize("weights", [[1], [3, 1], [2, 0, 1], [1, 1, 1, 1]])
def test_the_islands_together_have_the_rows_of_one_device(weights):
    batches = TokenBatches(source=Lines(), batch=96, seed=3)
    mesh = make_mesh(Layout(mesh={"data": 2}), jax.devices()[:2])
    loaders = []
    for island in range(len(weights)):
        shards = {
            n: batch_shard(
                split_over_islands(n, weights, [2] * len(weights)),
                island,
                mesh,
                ("data",),
                1,
                capacity=n + n % 2,
            )
            for n in batches.row_counts
        }
        loaders.append(Loader(batches, {}, mesh, ("data",), 1).replace_shards(shards))
    together = zip(*(loader.iterate() for loader in loaders), strict=True)
    for (expected, _), islands in itertools.islice(zip(batches.iterate(), together, strict=False), 30):
        for name, x in expected.items():
            parts = []
            for batch, _ in islands:
                values, counts = np.asarray(batch[name])[0], np.asarray(batch["weights"])[0].any(1)
                parts.append(values[counts])
            np.testing.assert_array_equal(np.concatenate(parts), x[expected["weights"].any(1)])


def test_what_cannot_be_batched_is_refused():
    source = Lines(longest=40)
    with pytest.raises(ValueError) as error:
        TokenBatches(source=source, batch=30, seed=-1)
    index = int(source.lengths.argmax())
    assert str(error.value).splitlines()[1:] == [
        "  - seed is -1; use 0 or more",
        f"  - batch is 30 tokens, and sample {index} has 40; use 40 or more, or leave out longer samples",
    ]
    source.lengths[7] = 0
    with pytest.raises(ValueError, match="sample 7 has length 0; leave out samples without tokens"):
        TokenBatches(source=source, batch=96)
    with pytest.raises(ValueError, match=r"source.lengths has shape \(200,\), and there are 4 samples"):
        TokenBatches(source=Mismatched(), batch=96)


def test_a_position_inside_a_batch_is_refused():
    batches = TokenBatches(source=Lines(), batch=96, seed=3)
    first = batches.advance({"epoch": 0, "index": 0})
    position = Position(epoch=0, index=first["index"] - 1)
    with pytest.raises(ValueError) as error:
        batches.iterate(position)
    assert str(error.value) == (
        f"position {position} is not the beginning of a batch of 96 tokens; use the number of tokens"
        " that it was saved with, or begin at epoch 0"
    )
