"""Blocks in the order of stages: every block once, filled up with zeros, and back."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.pipeline.stacking import Partition

CUTS = st.integers(1, 4).flatmap(
    lambda stages: st.integers(1, 3).flatmap(
        lambda chunks: st.lists(st.integers(1, 4), min_size=stages * chunks, max_size=stages * chunks).map(
            lambda counts: Partition(num_stages=stages, num_chunks=chunks, counts=tuple(counts))
        )
    )
)


@given(CUTS)
def test_every_stage_holds_the_blocks_of_its_parts_and_zeros(stages):
    rows = np.asarray(stages.stored_blocks).reshape(stages.num_stages, stages.num_chunks, stages.depth)
    for part, (start, count) in enumerate(zip(stages.starts, stages.counts, strict=True)):
        placement = stages.part_placement
        own = rows[placement.stage(part), placement.chunk(part)]
        assert own.tolist() == [*range(start, start + count), *[-1] * (stages.depth - count)]
    assert sorted(row for row in stages.stored_blocks if row >= 0) == list(range(stages.num_blocks))


@pytest.mark.parametrize(
    "stages",
    [
        Partition(num_stages=3, counts=(1, 3, 2)),
        Partition(num_stages=2, num_chunks=2, placement="v", counts=(2, 1, 1, 2)),
    ],
)
def test_what_is_stored_comes_back_in_order(stages):
    x = jnp.arange(1, 1 + 2 * stages.num_blocks).reshape(stages.num_blocks, 2)
    stored = stages.store_blocks(x)
    assert stored.shape[0] == len(stages.stored_blocks)
    np.testing.assert_array_equal(stages.restore_order(stored), x)
    fillings = np.asarray(stored)[np.asarray(stages.stored_blocks) < 0]
    assert not fillings.any()


@pytest.mark.parametrize(
    ("stages", "is_plain"),
    [
        (Partition(num_stages=2, counts=(2, 2)), True),
        (Partition(num_stages=2, counts=(2, 1)), False),
        (Partition(num_stages=2, num_chunks=2, counts=(1, 1, 1, 1)), False),
        (Partition(num_stages=1, num_chunks=2, counts=(2, 2)), True),
    ],
)
def test_equal_stages_of_one_chunk_are_stored_as_they_are(stages, is_plain):
    assert stages.is_plain == is_plain
    x = jnp.arange(stages.num_blocks)
    assert (stages.store_blocks(x) is x) == is_plain
