"""A rank whose process is well, and of whom nothing is heard."""

import os

import pytest

from shardtrain.islands.watchdog.diagnosis import Peer, Watch, is_at_work


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({"stall_seconds": 100}, 100),
        ({"stall_seconds": 0, "long_seconds": 1000}, 1000),
        # nothing else is too long: it is silence
        ({"stall_seconds": 0, "long_seconds": 0}, 20),
    ],
)
def test_a_silent_rank_is_at_work_until_its_limit(limits, seconds):
    """With no rule for stalls too: a rank that hangs with Python's lock must end some day."""
    watch, peer = Watch(**limits), Peer("island 1 (host a)", "a", os.getpid())
    assert is_at_work(peer, "a", seconds, watch)
    assert not is_at_work(peer, "a", seconds + 1, watch)
    assert not is_at_work(peer, "b", 1, watch)
