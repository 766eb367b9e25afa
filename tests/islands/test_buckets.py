"""Buckets: what PyTorch's own tests say of them, and their laws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.islands.buckets import CAP_BYTES, FIRST_BYTES, assign_buckets

MIB = 1 << 20
F, D = "float32", "float64"


def make(*arrays):
    return [np.empty(size, dtype) for dtype, size in arrays]


def in_ready_order(arrays, *caps):
    """With leaves numbered from the first that is ready, as PyTorch numbers them."""
    leaves = make(*arrays)[::-1]
    buckets = assign_buckets(leaves, cap_bytes=caps[-1], first_bytes=caps[0])
    return [[len(leaves) - 1 - index for index in bucket] for bucket in buckets]


@pytest.mark.parametrize(
    ("arrays", "caps", "expected"),
    [
        ([(F, 100), (F, 200), (F, 100), (F, 50)], (400,), [[0], [1], [2], [3]]),
        ([(F, 50), (D, 25)] * 3, (400,), [[0, 2], [1, 3], [4], [5]]),
        ([(F, 10)] * 4, (40, 80), [[0], [1, 2], [3]]),
        ([(F, 50), (D, 25)] * 3, (200, 400), [[0], [1], [2, 4], [3, 5]]),
        (
            [(F, 512 * 512), (F, 512)] * 3,
            (MIB, MIB),
            [[0], [1, 2], [3, 4], [5]],
        ),
    ],
)
def test_what_pytorch_does(arrays, caps, expected):
    """Sizes and results of PyTorch's own tests (test_c10d_common.py), all in float32 and float64."""
    assert in_ready_order(arrays, *caps) == expected


def test_the_defaults_are_those_of_pytorch():
    assert (FIRST_BYTES, CAP_BYTES) == (MIB, 25 * MIB)
    leaves = make(*[(F, MIB // 4)] * 28)
    assert [len(bucket) for bucket in assign_buckets(leaves)] == [1, 25, 2]


LEAVES = st.lists(
    st.tuples(
        st.sampled_from([F, D]),
        st.integers(0, 100),
        st.one_of(st.none(), st.sampled_from("abc")),
    ),
    max_size=30,
)


@given(LEAVES, st.integers(0, 900), st.integers(0, 900))
def test_laws_of_buckets(arrays, cap, first):
    leaves, units = make(*(array[:2] for array in arrays)), [array[2] for array in arrays]
    buckets = assign_buckets(leaves, units, cap_bytes=cap, first_bytes=first)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(leaves)))
    assert all(buckets)
    home = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    for unit in set(units) - {None}:
        assert len({home[i] for i, each in enumerate(units) if each == unit}) == 1
    # a bucket is ready with its last leaf, and they cross in that order
    last = [min(bucket) for bucket in buckets]
    assert last == sorted(last, reverse=True)
    assert [bucket[-1] for bucket in buckets] == last

    def kind(bucket):
        mixed = {units[i] for i in bucket} - {None}
        dtypes = {str(leaves[i].dtype) for i in bucket}
        assert len(dtypes) == 1 or mixed
        return tuple(sorted(dtypes))

    # a kind's buckets: filled up to the cap, and not far above it
    for of_kind in {kind(bucket) for bucket in buckets}:
        same = [bucket for bucket in buckets if kind(bucket) == of_kind]
        for number, bucket in enumerate(same):
            limit = min(first, cap) if number == 0 else cap
            sizes = [leaves[i].nbytes for i in bucket]
            if bucket is not same[-1]:
                assert sum(sizes) >= limit
            tail = units[bucket[-1]]
            whole = [i for i in bucket if tail is None or units[i] != tail]
            before = whole[:-1] if tail is None else whole
            assert not before or sum(leaves[i].nbytes for i in before) < limit
