"""Schedules: every size gives a table that can run, with the ticks, the bubble and the memory it states."""

import doctest

import pytest
from allowed_chunks import list_allowed_chunks
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardtrain.pipeline.schedule import (
    SCHEDULES,
    check,
    find_placement,
    forward_only,
    make_table,
    one_forward_one_backward,
    write_table,
)
from shardtrain.pipeline.simulate import simulate

CLOSED_FORMS = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zb_v")
"""Schedules whose ticks, bubble and memory have the closed forms below; the contract holds for all."""


@st.composite
def asked(draw, names=CLOSED_FORMS):
    name = draw(st.sampled_from(names))
    chunks = draw(st.sampled_from(list_allowed_chunks(name)))
    return name, draw(st.integers(1, 16)), draw(st.integers(1, 64)), chunks, draw(st.booleans())


def ticks(name, stages, microbatches, chunks, lockstep):
    """The closed forms, for microbatches that the stages divide where there are several chunks."""
    work = chunks * microbatches
    if name == "gpipe" or (name in ("1f1b", "interleaved") and not lockstep):
        return 2 * (work + stages - 1)
    if name == "zb_v" and lockstep:
        return 2 * microbatches + 4 * stages - 3
    if name == "zb_v":
        return max(6 * microbatches + stages - 1, 4 * (microbatches + stages) - 2)
    if name == "zero_bubble" and not lockstep:
        return 3 * microbatches + 2 * stages - 1 - min(microbatches, stages)
    return work + chunks * stages + stages - 2


def whole(stages, microbatches):
    return -(-microbatches // stages) * stages


def lives(table):
    return tuple(table.live(stage) for stage in range(table.num_stages))


@pytest.mark.parametrize("lockstep", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_entry_of_the_registry_keeps_the_contract(name, lockstep, data):
    """Any size gives a table that can run, within the memory that it states, as a file too."""
    stages, microbatches = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 40))
    chunks = data.draw(st.sampled_from(list_allowed_chunks(name)))
    table = SCHEDULES[name](stages, microbatches, chunks, lockstep)
    assert table.live_bound is not None  # by which `check` judges it
    check(table)
    assert (table.name, table.lockstep) == (name, lockstep)
    assert (table.num_stages, table.num_microbatches, table.num_chunks) == (stages, microbatches, chunks)
    assert "backward" in table.kinds
    assert len(table.tasks) == stages * microbatches * chunks * len(table.kinds)
    # the placement does not depend on the sizes, and evaluation walks over the same parts
    assert table.placement == find_placement(name, chunks)
    evaluation = forward_only(stages, microbatches, chunks, lockstep, table.placement)
    check(evaluation)
    assert evaluation.part_placement == table.part_placement
    assert 0 <= simulate(table, dict.fromkeys(table.kinds, 1.0)).bubble < 1


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_entry_shows_its_ticks_or_memory_by_value(name):
    """A doctest of its function: any table that can run keeps the contract, also that of another schedule."""
    assert doctest.DocTestFinder(recurse=False).find(SCHEDULES[name], name)[0].examples


@pytest.mark.parametrize("name", SCHEDULES)
def test_sizes_that_an_entry_does_not_support_are_refused(name):
    assert list_allowed_chunks(name)
    for sizes in [(0, 1, list_allowed_chunks(name)[0]), (1, 0, list_allowed_chunks(name)[0]), (2, 2, 0)]:
        with pytest.raises(ValueError, match=f"schedule '{name}' cannot be made"):
            SCHEDULES[name](*sizes, False)


@settings(max_examples=60, deadline=None)
@example(("interleaved", 16, 64, 4, False))
@example(("zero_bubble", 16, 5, 1, False))
@example(("1f1b", 16, 64, 1, True))
@given(asked())
def test_ticks_are_the_closed_form(sizes):
    name, stages, microbatches, chunks, lockstep = sizes
    found = SCHEDULES[name](*sizes[1:]).num_ticks
    if chunks == 1 or microbatches % stages == 0:
        assert found == ticks(*sizes)
    else:
        assert found <= ticks(name, stages, whole(stages, microbatches), chunks, lockstep)


@settings(max_examples=60, deadline=None)
@example(("interleaved", 16, 64, 4, False))
@example(("zero_bubble", 16, 5, 1, False))
@example(("1f1b", 16, 64, 1, True))
@given(asked())
def test_live_microbatches_are_what_is_stated(sizes):
    name, stages, microbatches, chunks, lockstep = sizes
    found = lives(SCHEDULES[name](*sizes[1:]))
    everything = chunks * microbatches
    stated = {
        "gpipe": lambda stage: everything,
        # an activation and its error take 2 (S - 1 - s) ticks there and back, one forward each
        "1f1b": lambda stage: 2 * (stages - stage) - 1 if lockstep else stages - stage,
        "interleaved": lambda stage: 2 * (stages - stage - 1) + (chunks - 1) * stages + 1,
        "zero_bubble": lambda stage: 2 * stages - 1 - stage if lockstep else stages,
        "zb_v": lambda stage: 5 * stages // 2 if lockstep else 2 * stages,
    }[name]
    expected = tuple(min(everything, stated(stage)) for stage in range(stages))
    if (name == "interleaved" and microbatches % stages) or (name == "zb_v" and microbatches < 2 * stages):
        assert all(live <= most for live, most in zip(found, expected, strict=True))
    else:
        assert found == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 4), st.booleans())
def test_forward_only_has_no_backwards(stages, microbatches, chunks, lockstep):
    table = forward_only(stages, microbatches, chunks, lockstep)
    check(table)
    assert table.kinds == ("forward",)
    assert len(table.tasks) == stages * microbatches * chunks
    assert lives(table) == (1,) * stages
    if chunks == 1 or microbatches % stages == 0:
        assert table.num_ticks == chunks * microbatches + stages - 1


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("1f1", 4, 8), ["schedule '1f1' (did you mean '1f1b'?); give one of these, or", "path.csv"]),
        (
            ("1f1b", 0, -1, 2),
            [
                "schedule '1f1b' cannot be made:",
                "stages is 0; use 1 or more",
                "microbatches is -1; use 1 or more",
                "chunks (virtual stages) is 2; use 1, or the schedule 'interleaved'",
            ],
        ),
        (("zero_bubble", 4, 8, 2), ["chunks (virtual stages) is 2; use 1, or the schedule 'interleaved'"]),
        (("zb_v", 4, 8), ["chunks (virtual stages) is 1; use 2, or the schedule '1f1b'"]),
        (("zb_v", 4, 8, 3), ["chunks (virtual stages) is 3; use 2, or the schedule 'interleaved'"]),
        (("interleaved", 4, 8), ["chunks (virtual stages) is 1; use 2 or more, or the schedule '1f1b'"]),
        (("gpipe", 4, 8, 0), ["chunks (virtual stages) is 0; use 1 or more"]),
        (("nosuch.csv", 4, 8), ["there is no schedule file nosuch.csv to read"]),
    ],
)
def test_what_cannot_be_made_is_told(words, texts):
    with pytest.raises(ValueError) as error:
        make_table(*words)
    for text in texts:
        assert text in str(error.value)


def test_a_file_is_a_schedule_too(tmp_path):
    """One task a tick is also a table for lock-step; the sizes must be those that were asked for."""
    path = tmp_path / "mine.csv"
    write_table(one_forward_one_backward(3, 4), path)
    for lockstep in (False, True):
        table = make_table(str(path), 3, 4, 1, lockstep)
        assert (table.name, table.lockstep) == ("mine.csv", lockstep)
        assert table.tasks == one_forward_one_backward(3, 4).tasks
    assert make_table(path, 3, 4).live_bound is None
    write_table(forward_only(3, 4), tmp_path / "forwards.csv")
    with pytest.raises(ValueError, match="it has no backwards; add one for each forward"):
        make_table(tmp_path / "forwards.csv", 3, 4)
    with pytest.raises(ValueError) as error:
        make_table(path, 2, 8)
    assert "it has 3 stages, and 2 were asked for; use 3, or another table" in str(error.value)
    assert "it has 4 microbatches, and 8 were asked for; use 4, or another table" in str(error.value)
