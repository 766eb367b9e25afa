"""Groups of owners: every block in one, with one stage of each replica."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardtrain.pipeline.stacking import Partition, owner_groups

NUM_BLOCKS = 9


@st.composite
def partitions(draw):
    num_stages, num_chunks, placement = draw(st.sampled_from([(2, 1, "loop"), (2, 2, "loop"), (2, 2, "v")]))
    cuts = []
    for _ in range(draw(st.integers(1, 3))):
        inner = sorted(
            draw(
                st.sets(
                    st.integers(1, NUM_BLOCKS - 1),
                    min_size=num_stages * num_chunks - 1,
                    max_size=num_stages * num_chunks - 1,
                )
            )
        )
        ends = [0, *inner, NUM_BLOCKS]
        counts = tuple(end - begin for begin, end in pairwise(ends))
        cuts.append(
            Partition(num_stages=num_stages, num_chunks=num_chunks, placement=placement, counts=counts)
        )
    return cuts


@given(partitions())
def test_each_block_is_in_the_group_of_its_owners(cuts):
    groups = owner_groups(cuts)
    assert sorted(block for group in groups for block in group.blocks) == list(range(NUM_BLOCKS))
    assert len({group.stages for group in groups}) == len(groups)
    for group in groups:
        for cut, stage in zip(cuts, group.stages, strict=True):
            parts = cut.part_placement.parts(stage)
            owned = {cut.starts[part] + k for part in parts for k in range(cut.counts[part])}
            assert owned >= set(group.blocks)
    # all islands go through their groups in one order, and the ends of the model have one owner a replica
    assert [group.blocks[0] for group in groups] == sorted(group.blocks[0] for group in groups)
    assert set(groups[0].stages) == {0}
