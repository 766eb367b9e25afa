"""Parts, stages and chunks: one mapping, whichever way it is asked, and the hops that follow from it."""

import pytest

from shardtrain.pipeline.part_placement import PartPlacement, list_placements


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
