"""The order of an epoch, by value: saved positions refer to it."""

import pytest

from shardtrain.data.order import BLOCK, epoch_order, find_samples

EXPECTED = {
    1: [[0, 0, 0], [0, 0, 0]],
    2: [[1, 0, 0], [0, 1, 1]],
    5: [[2, 1, 4], [2, 0, 3]],
    1023: [[1009, 810, 356], [195, 703, 782]],
    BLOCK + 1: [[5959, 5846, 4848], [2606, 16380, 15169]],
    2**16 - 1: [[54950, 51492, 6381], [32019, 31561, 35432]],
    2**16: [[54950, 57114, 17813], [32019, 62891, 62818]],
    2**16 + 1: [[53375, 52631, 59399], [29795, 6305, 32636]],
    2**18 + 2: [[37879, 179575, 47950], [79187, 86606, 116801]],
    10**6: [[609330, 786724, 704617], [667818, 352365, 622536]],
    2**31 + 5: [[676795448, 1665160316, 1463637208], [870050576, 1905894528, 1058451630]],
    2**32: [[2435811278, 2418508156, 3932149077], [3657705126, 1510876831, 1650564570]],
}
"""Number of samples -> first, middle and last sample of epoch 0, seed 0, and of epoch 7, seed 2**32 - 1."""


@pytest.mark.parametrize("num_samples", EXPECTED)
def test_orders_stay_those_of_saved_positions(num_samples):
    orders = (epoch_order(num_samples, seed, epoch) for seed, epoch in ((0, 0), (2**32 - 1, 7)))
    places = (0, num_samples // 2, num_samples - 1)
    assert [[order(place) for place in places] for order in orders] == EXPECTED[num_samples]


def test_the_sources_of_a_large_mixture_keep_their_orders(monkeypatch):
    found = []

    def counted(positions, *arguments):
        found.append(positions)
        return find_samples(positions, *arguments)

    monkeypatch.setattr("shardtrain.data.order.find_samples", counted)
    for position in range(3):
        for seed in range(100):
            epoch_order(7, seed + 10**6, 0)(position)
    assert len(found) == 100
