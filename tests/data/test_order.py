"""The order of an epoch is Grain's, as it was when positions of older checkpoints were saved."""

import grain
import numpy as np
import pytest

from shardtrain.data.order import BLOCK, epoch_order, samples_of

SIZES = [
    1,
    2,
    5,
    1023,
    BLOCK,
    BLOCK + 1,
    2**16 - 1,
    2**16,
    2**16 + 1,
    2**18,
    2**18 + 2,
    10**6,
    2**31 + 5,
    2**32,
]


@pytest.mark.parametrize("num_samples", SIZES)
def test_order_is_that_of_grain(num_samples):
    for seed, epoch in ((0, 0), (2**32 - 1, 7)):
        epoch_seed = int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0])
        # Grain 0.2.18 repeats one sample and loses another where the highest index is 4**8, 4**9, ...
        shuffled = grain.MapDataset.range(num_samples + num_samples % 2).shuffle(seed=epoch_seed)

        def expected(position, shuffled=shuffled):
            index = shuffled[position]
            while index >= num_samples:
                index = shuffled[index]
            return index

        positions = {
            *range(min(num_samples, 3)),
            num_samples // 2,
            num_samples - 1,
            min(num_samples, BLOCK) - 1,
        }
        order = epoch_order(num_samples, seed, epoch)
        assert [order(each) for each in positions] == [expected(each) for each in positions]


def test_the_sources_of_a_large_mixture_keep_their_orders(monkeypatch):
    found = []

    def counted(positions, *arguments):
        found.append(positions)
        return samples_of(positions, *arguments)

    monkeypatch.setattr("shardtrain.data.order.samples_of", counted)
    for position in range(3):
        for seed in range(100):
            epoch_order(7, seed + 10**6, 0)(position)
    assert len(found) == 100
