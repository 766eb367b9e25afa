"""The next epoch from reports, the slots of its members, and the ledger that follows from epochs."""

from dataclasses import replace

import pytest

from shardtrain.elastic.epoch import Epoch, Peer, Report, deal, found_epoch, next_epoch
from shardtrain.elastic.ledger import count_batches, is_valid_checkpoint, list_ledger

A, B, C = (Peer(name=name, address=f"tcp://{name}") for name in "abc")
EPOCH = Epoch(number=3, step=10, members=(A, B, C), slots=((0, 1), (2, 3), (4, 5)), why="joined c")
HELD = Report(
    epoch=3,
    step=12,
    behind=False,
    held=True,
    begun=2,
    stops=False,
    leaves=False,
    speed=1,
    lost=(),
    excluded=(),
)
NOT_HELD = replace(HELD, held=False)
FURTHER = replace(HELD, step=13, held=False)
BEHIND = replace(HELD, step=9, behind=True, held=False, begun=0)


def follow(*reports, joiners=()):
    found = next_epoch(EPOCH, dict(zip("abc", reports, strict=False)), {peer.name: peer for peer in joiners})
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("reports", "step", "repeats"),
    [
        ((HELD, HELD), 13, False),
        ((HELD, NOT_HELD), 12, True),
        ((NOT_HELD, FURTHER), 13, True),  # one has applied it, so the other holds it
        ((HELD, BEHIND), 13, False),
    ],
)
def test_a_step_counts_if_all_that_report_hold_its_sum(reports, step, repeats):
    found = follow(*reports)
    assert (found.number, found.step, found.repeats) == (4, step, repeats)


def test_a_repeated_step_keeps_slots_and_deals_only_those_of_the_dead():
    found = follow(NOT_HELD, NOT_HELD)
    assert found.slots == ((0, 1, 4), (2, 3, 5))
    assert found.why == "lost c"
    assert found.slots_of(12) == {"a": (0, 1, 4), "b": (2, 3, 5)}
    assert found.slots_of(13) == {"a": (0, 1, 2), "b": (3, 4, 5)}


def test_slots_follow_speed():
    assert deal(9, {"a": 2, "b": 1}) == {"a": (0, 1, 2, 3, 4, 5), "b": (6, 7, 8)}
    found = follow(replace(HELD, speed=2), HELD, HELD)
    assert [len(slots) for slots in found.slots] == [4, 1, 1]


def test_who_leaves_lacks_the_state_is_excluded_or_not_connected_is_no_member():
    leaves, excludes = replace(HELD, leaves=True), replace(HELD, excluded=("b",))
    assert follow(HELD, leaves, HELD).names == ("a", "c")
    assert follow(HELD, HELD, BEHIND).names == ("a", "b")
    assert follow(excludes, HELD, HELD).names == ("a", "c")
    # of two without a connection the older one stays
    assert follow(HELD, replace(HELD, lost=("c",)), HELD).names == ("a", "b")
    assert follow(HELD, HELD, joiners=[Peer(name="d", address="tcp://d")]).names == ("a", "b", "d")
    lost = replace(HELD, lost=("d",))
    assert follow(HELD, lost, joiners=[Peer(name="d", address="tcp://d")]).names == ("a", "b")


def test_the_run_ends_if_all_leave_and_nobody_continues_without_the_right_state():
    leaves = replace(HELD, leaves=True)
    assert follow(leaves, leaves).stops
    # one that is excluded does not come back because all others leave
    assert follow(replace(leaves, excluded=("b",)), HELD).names == ("a",)
    assert next_epoch(EPOCH, {"c": BEHIND}, {}) is None
    assert next_epoch(EPOCH, {"b": replace(HELD, excluded=("b",))}, {}) is None


def test_the_ledger_follows_from_the_epochs():
    first = found_epoch(1, A, 0, 2)
    grown = Epoch(number=2, step=2, members=(A, B), slots=((0,), (1,)), why="joined b")
    lost = Epoch(number=3, step=3, members=(B,), slots=((1, 0),), why="lost a", kept=(1,))
    lines = list_ledger([first, grown, lost], 4)
    assert [(line.step, line.epoch, line.repeats, line.why) for line in lines] == [
        (0, 1, None, "founded"),
        (1, 1, None, "founded"),
        (2, 2, None, "joined b"),
        (3, 3, 2, "lost a"),
    ]
    assert lines[2].slots == {"a": (0,), "b": (1,)}
    assert lines[3].slots == {"b": (1, 0)}
    assert lines[3].groups == {"b": ((1,), (0,))}
    # all died; what came after the checkpoint is void
    again = found_epoch(4, C, 1, 2)
    assert [line.epoch for line in list_ledger([first, grown, lost, again], 4)] == [1, 4, 4, 4]
    later = Epoch(number=5, step=5, members=(C, A), slots=((0,), (1,)), why="joined a")
    all_died = [first, grown, lost, again, later, found_epoch(6, B, 2, 2)]
    assert [line.epoch for line in list_ledger(all_died, 7)] == [1, 4, 6, 6, 6, 6, 6]
    with pytest.raises(ValueError, match="all epochs from 1"):
        list_ledger([first, lost], 4)


def test_with_a_batch_for_each_member_a_step_keeps_the_size_with_which_it_was_begun():
    first = found_epoch(1, A, 4, 2, first_batch=4)
    reports = {"a": replace(HELD, epoch=1, step=5, held=False, begun=0)}
    grown = next_epoch(first, reports, {"b": B, "c": C})
    assert grown is not None
    assert (grown.step, grown.first_batch, grown.slots) == (5, 5, ((0, 1), (2, 3), (4, 5)))
    assert [grown.find_batches(step) for step in (5, 6)] == [range(5, 8), range(8, 11)]
    # a dies in step 6, of which c has the last slots
    report = replace(HELD, epoch=2, step=6, held=False, begun=2)
    lost = next_epoch(grown, {"b": report, "c": report}, {})
    assert lost is not None
    assert (lost.step, lost.first_batch, lost.slots) == (6, 8, ((2, 3, 0), (4, 5, 1)))
    assert [lost.find_batches(step) for step in (6, 7, 8)] == [range(8, 11), range(11, 13), range(13, 15)]
    assert lost.slots_of(7) == {"b": (0, 1), "c": (2, 3)}
    # nothing of it is left, or it is committed: the next one has the size of its members
    gone = next_epoch(grown, {"b": replace(report, begun=0), "c": replace(report, leaves=True)}, {})
    held = next_epoch(grown, {"b": replace(report, held=True), "c": replace(report, held=True)}, {})
    assert gone is not None
    assert held is not None
    assert (gone.first_batch, gone.slots) == (8, ((0, 1),))
    assert (held.step, held.first_batch, held.slots) == (7, 11, ((0, 1), (2, 3)))
    # all die after a checkpoint of step 8, or after 9 and two steps more without islands
    epochs = [first, grown, lost]
    assert [count_batches(epochs, step) for step in range(4, 9)] == [4, 5, 8, 11, 13]
    assert count_batches(epochs, 11, {3: 9}) == 17
    assert count_batches([*epochs, found_epoch(4, A, 6, 2, first_batch=8)], 9) == 11
    assert count_batches([], 3) == 3


def test_an_epoch_that_deals_parts_of_batches_is_refused():
    for wrong in ({"slots": ((0, 1, 2),)}, {"every": 2}, {"slots": ((),)}):
        with pytest.raises(ValueError, match="must deal whole batches"):
            replace(found_epoch(1, A, 0, 2, first_batch=0), **wrong)


def test_a_member_that_had_not_begun_the_slots_of_an_epoch_sums_them_with_later_ones():
    four = Epoch(number=1, step=0, members=(A, B, C), slots=((0, 1), (2,), (3,)), why="founded")
    begun = replace(HELD, epoch=1, step=0, held=False, begun=2)
    lost = next_epoch(four, {"a": begun, "b": replace(begun, begun=1)}, {})
    assert lost is not None
    assert lost.slots == ((0, 1), (2, 3))
    again = next_epoch(lost, {"a": begun, "b": replace(begun, begun=1)}, {"c": C})
    assert again is not None
    assert again.slots == ((0, 1), (2,), (3,))
    alone = next_epoch(again, {"a": begun}, {})
    assert alone is not None
    assert list_ledger([four, lost, again, alone], 1)[0].groups == {"a": ((0, 1), (2, 3))}
    whole = next_epoch(lost, {"a": begun, "b": replace(begun, begun=2)}, {})
    assert whole is not None
    assert list_ledger([four, lost, whole], 1)[0].groups == {"a": ((0, 1),), "b": ((2,), (3,))}


def test_a_checkpoint_of_a_chief_that_was_left_behind_is_not_valid():
    epochs = [found_epoch(1, A, 0, 2), found_epoch(2, B, 3, 2)]
    assert is_valid_checkpoint(epochs, 3, 1)
    assert not is_valid_checkpoint(epochs, 4, 1)
    assert is_valid_checkpoint(epochs, 4, 2)
    assert not is_valid_checkpoint(epochs, 2, 2)
