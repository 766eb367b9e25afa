"""Buckets: what PyTorch's own tests say of them, and their laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.islands.buckets import CAP_BYTES, FIRST_BYTES, Leaf, assign_buckets

MIB = 1 << 20
F, D = ("float32", 4), ("float64", 8)


def make(*arrays):
    return [Leaf(num_bytes=size * width, dtype=dtype) for (dtype, width), size in arrays]


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


def test_what_overflows_still_goes_in():
    leaves = make((F, 1), (F, 1000), (F, 1))
    assert assign_buckets(leaves, cap_bytes=8, first_bytes=8) == [[2, 1], [0]]


def test_the_defaults_are_those_of_pytorch():
    assert (FIRST_BYTES, CAP_BYTES) == (MIB, 25 * MIB)
    leaves = make(*[(F, MIB // 4)] * 28)
    assert [len(bucket) for bucket in assign_buckets(leaves)] == [1, 25, 2]


@pytest.mark.parametrize("cap", [0, 1])
def test_a_tiny_cap_gives_each_leaf_its_own(cap):
    """Whatever the cap of the first bucket."""
    assert assign_buckets(make((F, 3), (D, 3), (F, 3)), cap_bytes=cap) == [[2], [1], [0]]


def test_empty_leaves_cross_with_others():
    assert assign_buckets(make((F, 0), (F, 2), (F, 0)), cap_bytes=8, first_bytes=8) == [[2, 1], [0]]
    assert assign_buckets([]) == []


def test_open_buckets_cross_when_their_last_leaf_is_ready():
    arrays = [(F, 1), (D, 100), (F, 1), (D, 1)]
    assert in_ready_order(arrays, 40, 80) == [[1], [0, 2], [3]]


def test_units_stay_together():
    leaves = [
        Leaf(num_bytes=10, dtype="float32", unit=unit) for unit in ("a", None, "b", "a", None, "b", None)
    ]
    assert assign_buckets(leaves, cap_bytes=0) == [[6], [4], [5, 2], [1], [3, 0]]
    assert assign_buckets(leaves, cap_bytes=20, first_bytes=10) == [[6], [4, 5, 2], [1, 3, 0]]


def test_a_unit_of_two_dtypes_stays_together():
    leaves = [
        Leaf(num_bytes=10, dtype="float32", unit="a"),
        Leaf(num_bytes=10, dtype="float32"),
        Leaf(num_bytes=5, dtype="bfloat16", unit="a"),
        Leaf(num_bytes=5, dtype="bfloat16"),
    ]
    assert assign_buckets(leaves) == [[3], [1], [2, 0]]


LEAVES = st.lists(
    st.builds(
        Leaf,
        num_bytes=st.integers(0, 100),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        unit=st.one_of(st.none(), st.sampled_from("abc")),
    ),
    max_size=30,
)


@given(LEAVES, st.integers(0, 150), st.integers(0, 150))
def test_laws_of_buckets(leaves, cap, first):
    buckets = assign_buckets(leaves, cap_bytes=cap, first_bytes=first)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(leaves)))
    assert all(buckets)
    home = {index: number for number, bucket in enumerate(buckets) for index in bucket}
    units = {leaf.unit for leaf in leaves if leaf.unit is not None}
    for unit in units:
        assert len({home[i] for i, leaf in enumerate(leaves) if leaf.unit == unit}) == 1
    # a bucket is ready with its last leaf, and they cross in that order
    last = [min(bucket) for bucket in buckets]
    assert last == sorted(last, reverse=True)
    assert [bucket[-1] for bucket in buckets] == last

    def kind(bucket):
        mixed = {leaf.unit for leaf in (leaves[i] for i in bucket)} - {None}
        dtypes = {leaves[i].dtype for i in bucket}
        assert len(dtypes) == 1 or mixed
        return tuple(sorted(dtypes))

    # a kind's buckets: filled up to the cap, and not far above it
    for of_kind in {kind(bucket) for bucket in buckets}:
        same = [bucket for bucket in buckets if kind(bucket) == of_kind]
        for number, bucket in enumerate(same):
            limit = min(first, cap) if number == 0 else cap
            sizes = [leaves[i].num_bytes for i in bucket]
            if bucket is not same[-1]:
                assert sum(sizes) >= limit
            tail = leaves[bucket[-1]].unit
            whole = [i for i in bucket if tail is None or leaves[i].unit != tail]
            before = whole[:-1] if tail is None else whole
            assert not before or sum(leaves[i].num_bytes for i in before) < limit


def test_numbers_below_zero_are_refused():
    with pytest.raises(ValueError) as error:
        assign_buckets(make((F, -1)), cap_bytes=-2, first_bytes=-3)
    assert str(error.value) == (
        "leaves cannot be put into buckets:"
        "\n  - cap_bytes is -2; use 0 or more bytes"
        "\n  - first_bytes is -3; use 0 or more bytes"
        "\n  - leaf 0 has -4 bytes; use 0 or more"
    )
