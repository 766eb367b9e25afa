"""Parts, stages and chunks: one mapping, whichever way it is asked, and the hops that follow from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.pipeline.part_placement import PLACEMENTS, PartPlacement, list_placements


@st.composite
def placed(draw):
    name = draw(st.sampled_from(list(PLACEMENTS)))
    chunks = draw(st.integers(1, 2 if name == "v" else 4))
    return PartPlacement(num_stages=draw(st.integers(1, 6)), num_chunks=chunks, name=name)


@given(placed())
def test_each_part_is_one_chunk_of_one_stage(placement):
    parts = range(placement.num_parts)
    places = [(placement.stage(part), placement.chunk(part)) for part in parts]
    assert sorted(places) == [
        (stage, chunk) for stage in range(placement.num_stages) for chunk in range(placement.num_chunks)
    ]
    assert [placement.part(*place) for place in places] == list(parts)
    for stage in range(placement.num_stages):
        assert placement.parts(stage) == tuple(part for part in parts if placement.stage(part) == stage)
    assert placement.last_stage == placement.stage(placement.num_parts - 1)


@given(placed())
def test_hops_lead_from_part_to_part(placement):
    ends = {(placement.stage(part), placement.stage(part + 1)) for part in range(placement.num_parts - 1)}
    assert {pair for pairs in placement.hops.values() for pair in pairs} == ends
    for hop, pairs in placement.hops.items():
        assert all((origin + hop) % placement.num_stages == to for origin, to in pairs)
        # a permute: each stage sends to one stage and receives from one
        assert len({origin for origin, _ in pairs}) == len({to for _, to in pairs}) == len(pairs)


def test_placements_by_value():
    loop, v = (PartPlacement(num_stages=4, num_chunks=2, name=name) for name in ("loop", "v"))
    assert loop.stages == (0, 1, 2, 3, 0, 1, 2, 3)
    assert loop.hops == {1: ((0, 1), (1, 2), (2, 3), (3, 0))}
    assert PartPlacement(num_stages=3).hops == {1: ((0, 1), (1, 2))}  # one chunk: no ring
    assert v.stages == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [v.parts(stage) for stage in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert v.last_stage == 0
    # on two stages, forth and back are the same hop: one message serves both
    assert PartPlacement(num_stages=2, num_chunks=2, name="v").hops == {0: ((1, 1),), 1: ((0, 1), (1, 0))}
    assert list_placements(4, 2) == [loop, v]
    assert [placement.name for placement in list_placements(4, 3)] == ["loop"]


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"name": "loops"}, "placement 'loops' (did you mean 'loop'?)"),
        ({"name": "v", "num_chunks": 3}, "at most 2 chunks per stage, and 3 were asked for; use 2"),
    ],
)
def test_a_placement_that_does_not_exist_is_refused(sizes, text):
    with pytest.raises(ValueError) as error:
        PartPlacement(num_stages=2, **sizes)
    assert text in str(error.value)
