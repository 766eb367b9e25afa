"""Codecs of sums, and rings that send by them."""

from typing import cast

import numpy as np
import pytest

from shardtrain.elastic.codecs import CODECS
from shardtrain.elastic.flat_sum import FlatSum, Packing, decode_all
from shardtrain.elastic.replay import sum_as_ring
from shardtrain.elastic.ring import Ring

ERRORS = {"bfloat16": 2**-8, "int8": 1 / 253}
"""Codec -> largest error, relative to the largest element of a block."""


def draw(seed, size=1000):
    """Return numbers of many magnitudes, and some that codecs treat apart."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(size) * 10.0 ** rng.uniform(-42, 36, size)).astype(np.float32)
    x[300:600] = rng.standard_normal(300)
    x[600:610] = 0, -0.0, 127.9, -127.9, 1e-44, 1e-38, 3e38, -3e38, 2.0**-110, 1
    return x


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [0, 1, 256, 1000])
def test_what_was_decoded_is_encoded_without_an_error(codec, size):
    for seed in range(20):
        encoded = codec.encode(draw(seed)[:size])
        like = codec.list_arrays(size)
        assert [(x.dtype, x.shape) for x in encoded] == [(x.dtype, x.shape) for x in like]
        assert len(encoded) == codec.num_arrays
        once = codec.decode(encoded)
        np.testing.assert_array_equal(codec.decode(codec.encode(once)), once)


@pytest.mark.parametrize("name", CODECS)
def test_errors_are_small_and_no_number_stays_none(name):
    codec, x = CODECS[name], draw(0)
    off = np.abs(codec.decode(codec.encode(x)) - x)
    for start in range(0, len(x), 256):
        block = slice(start, start + 256)
        assert off[block].max() <= ERRORS[name] * np.abs(x[block]).max()
    tiny = codec.decode(codec.encode(np.array([1.7e-38, -1e-38], np.float32)))
    assert tiny[0] >= 0 >= tiny[1]
    for wrong in np.inf, -np.inf, np.nan:
        x[700] = wrong
        assert not np.isfinite(codec.decode(codec.encode(x))[700])


def test_a_small_array_beside_a_large_one_keeps_its_numbers():
    packing = Packing([np.empty(16, np.float32), np.empty((30, 20), np.float32)], ["int8"] * 2)
    own = packing.make_zeros()
    small, large = packing.view(own)
    small[:], large[:] = np.float32(2e-3), np.float32(1)
    rings = [FlatSum(own, packing.codecs)] * 3
    small, large = packing.view(sum_as_ring(rings).arrays)
    np.testing.assert_allclose(small, 6e-3, rtol=0.02)
    np.testing.assert_allclose(large, 3, rtol=0.02)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_members_hold_the_same_numbers(name, size):
    shapes = [np.empty((30, 20), np.float32), np.empty(3, np.float32), np.empty(2, np.int64)]
    packing = Packing(shapes, [name, "", ""])
    rng = np.random.default_rng(size)
    sums = []
    for _ in range(size):
        sums.append(packing.make_zeros())
        given = rng.standard_normal((30, 20), np.float32), np.ones(3, np.float32), np.arange(2)
        for x, y in zip(packing.view(sums[-1]), given, strict=True):
            x[...] = y
    own = [FlatSum(each, packing.codecs) for each in sums]
    rings = [Ring(each.copy(size), index, size) for index, each in enumerate(own)]
    while not rings[0].is_whole:
        # what is sent is what the receiver expects
        payloads = [ring.payload() for ring in rings]
        for index, ring in enumerate(rings):
            ring.receive(payloads[index - 1])
            sent = decode_all(packing.codecs, payloads[index - 1].arrays)
            assert [x.dtype for x in sent] == [np.float32, np.float32, np.int64]
    first, *others = (cast(FlatSum, ring.total).arrays for ring in rings)
    for each in (*others, sum_as_ring(own).arrays):
        for x, y in zip(first, each, strict=True):
            np.testing.assert_array_equal(x, y)
    weights, counts, numbers = packing.view(first)
    np.testing.assert_array_equal(counts, [size] * 3)
    np.testing.assert_array_equal(numbers, np.arange(2) * size)
    exact = np.sum([packing.view(each)[0] for each in sums], 0)
    off = np.abs(weights - exact).max() / np.abs(exact).max()
    assert off == 0 if size == 1 else 0 < off < {"bfloat16": 2, "int8": size}[name] * ERRORS[name]
    assert all(
        np.array_equal(x, y)
        for each, given in zip(own, sums, strict=True)
        for x, y in zip(each.arrays, given, strict=True)
    )
