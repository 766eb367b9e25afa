"""Who is to blame, from where ranks say that they are; limits; the sentences."""

import pytest

from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.islands.watchdog.diagnosis import Heartbeat, Watch, find_stalled, silence_text, stall_text

WATCH = Watch(silence_seconds=20, stall_seconds=100, long_seconds=1000)
NAMES = ["island 0 (host a)", "island 1 (host b)", "island 2 (host c)"]


def at(operation, seconds, num_collectives=5, **options):
    return Heartbeat(7, num_collectives, operation, seconds, **options)


def waits(seconds, *waits_for, num_collectives=6, operation="combine gradients"):
    return at(operation, seconds, num_collectives, waits=True, waits_for=waits_for)


@pytest.mark.parametrize(
    ("heartbeats", "culprits"),
    [
        # who is at work too long, not those that wait for it
        ([waits(150, 1), at("reading a batch", 101), waits(150, 1)], [1]),
        ([waits(150, 1), at("reading a batch", 99), waits(150, 1)], []),
        # who saves may take long, and is waited for
        ([waits(150, 1), at("saving", 999, long=True), waits(150, 1)], []),
        ([waits(150, 1), at("saving", 1001, long=True), waits(150, 1)], [1]),
        # at work for ever, in little pieces
        ([waits(1001, 2), waits(1001, 2), at("the training loop", 1)], [2]),
        # all wait: the one that came to fewer num_collectives
        ([waits(101, 1), waits(101, num_collectives=5, operation="the metrics of step 5"), waits(101)], [1]),
        ([waits(99, 1), waits(101, num_collectives=5), waits(101)], []),
        # all at the same one: those that others miss, and that miss nobody
        ([waits(101, 2), waits(101, 2), waits(101)], [2]),
        # a stage waits for a stage
        ([waits(101, 1), waits(101, 2), waits(101)], [2]),
        ([waits(101, 1), waits(101, 2), waits(101, 0)], [0, 1, 2]),
        ([waits(101), waits(101), waits(101)], [0, 1, 2]),
        # the first step compiles
        ([at("the step", 999, waits=True, long=True), waits(101), waits(101)], []),
    ],
)
def test_who_is_to_blame(heartbeats, culprits):
    assert find_stalled(dict(enumerate(heartbeats)), WATCH) == culprits


def test_nothing_is_too_long_where_it_is_switched_off():
    heartbeats = {0: at("reading a batch", 1e9), 1: waits(1e9, 0)}
    assert find_stalled(heartbeats, Watch(stall_seconds=0, long_seconds=0)) == []


def test_the_sentence_about_a_stall():
    heartbeats = dict(enumerate([waits(150, 1), at("reading a batch", 101.2), waits(149, 1)]))
    assert stall_text([1], heartbeats, NAMES, WATCH) == (
        "shardtrain watchdog: island 1 (host b)"
        " makes no progress: at step 7, in 'reading a batch' for 101 s\n"
        "    island 0 (host a): at step 7, in 'combine gradients' for 150 s\n"
        "    island 2 (host c): at step 7, in 'combine gradients' for 149 s\n"
        "  allowed are 100 s; if it was only slow: --watch.stall-seconds 203\n"
        "  -> all ranks end with exit code 75; the same command resumes from the last checkpoint"
        " (launch --restarts N does that automatically)\n"
    )
    text = stall_text([0, 1, 2], {rank: waits(101) for rank in range(3)}, NAMES, WATCH)
    assert "all ranks wait for each other: a message was lost" in text
    slow = stall_text([0], {0: at("saving", 2000, long=True)}, NAMES, WATCH)
    assert "allowed are 1000 s; if it was only slow: --watch.long-seconds 4000" in slow


def test_the_sentence_about_silence():
    heartbeats = {0: waits(19, 1), 1: at("the step", 0.4)}
    text = silence_text({1: 21.4}, {1: "its process 12 is stopped"}, heartbeats, NAMES, WATCH)
    first, last, other, allowed, again = text.splitlines()
    assert first.endswith("island 1 (host b) has sent no heartbeat for 21 s: its process 12 is stopped")
    assert last == "    its last heartbeat: at step 7, in 'the step' for 0 s"
    assert other == "    island 0 (host a): at step 7, in 'combine gradients' for 19 s"
    assert allowed == "  allowed are 20 s; if it was only slow: --watch.silence-seconds 43"
    assert "exit code 75" in again
    never = silence_text({2: 21.0}, {2: "x"}, {}, NAMES, WATCH)
    assert "its last heartbeat: no heartbeat yet" in never


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"silence_seconds": 1}, "silence_seconds is 1; use 0 to disable it, or 2 or more"),
        ({"stall_seconds": -5}, "stall_seconds is -5; use 0"),
        ({"stall_seconds": float("nan")}, "stall_seconds is nan; give a number, finite"),
        ({"stall_seconds": 100, "long_seconds": 50}, "use 100 or more for long_seconds"),
    ],
)
def test_limits_that_cannot_be(changes, text):
    with pytest.raises(ValueError, match=text):
        Watch(**changes)


def test_a_beat_travels_as_bytes_and_says_where_its_process_is():
    activity = ActivityRecord()
    with activity.at("the step", waits=True, long=True):
        activity.begin_step(3)
        began = activity.now().since_seconds
        heartbeat = Heartbeat.of(activity, began + 5)
        assert heartbeat == Heartbeat(3, 0, "the step", 5.0, True, True, ())
        activity.awaits((1, 2))
        assert Heartbeat.decode(Heartbeat.of(activity, began).encode()).waits_for == (1, 2)
        with activity.record_on_bridge("bucket 4 (combine)"):
            assert activity.now().operation == "bucket 4 (combine)"
        assert activity.last_collective == "bucket 4 (combine)"
        with activity.at("saving"), activity.record_on_bridge("bucket 5"):
            # at work of its own
            assert activity.now().operation == "saving"
        # it has come a step further
        assert activity.now().since_seconds >= began
    assert activity.now().operation == "setting up"
