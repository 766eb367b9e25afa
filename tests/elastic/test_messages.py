"""Headers of messages: each comes back as it was, and no other is taken."""

import json

import pytest

from shardtrain.elastic.epoch import Peer, Report, found_epoch
from shardtrain.elastic.messages import (
    MOST_TEXT,
    Announce,
    Bye,
    Chunk,
    HeaderError,
    Join,
    Update,
    Vote,
    from_header,
    to_header,
)

PEER = Peer(name="a", address="tcp://a", speed=3)
REPORT = Report(
    epoch=2,
    step=7,
    behind=False,
    held=True,
    begun=2,
    stops=False,
    leaves=False,
    speed=3,
    lost=("b", "c"),
    excluded=(),
)
MESSAGES = (
    Chunk(epoch=1, step=2, hop=3),
    Vote(epoch=1, step=2, saves=True),
    Bye(epoch=4),
    REPORT,
    Join(peer=PEER, donor="b", has_state=True, ready=False),
    Update(epoch=1, step=0),
    Announce(epoch=found_epoch(1, PEER, 0, 4)),
    Announce(epoch=found_epoch(1, PEER, 5, 4, first_batch=7)),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_from_json(message):
    assert from_header(json.loads(json.dumps(to_header(message)))) == message


def test_an_epoch_says_only_with_a_batch_for_each_member_which_these_are():
    fixed, grown = (to_header(message)["epoch"] for message in MESSAGES[-2:])
    assert grown.keys() - fixed.keys() == {"member_slots", "first_batch"}
    assert list(fixed)[-2:] == ["every", "num_steps"]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_missing_unknown_or_ill_typed_field_is_refused(message):
    header = json.loads(json.dumps(to_header(message)))
    for name in header.keys() - {"kind"}:
        others = {key: value for key, value in header.items() if key != name}
        for wrong in (others, {**header, name: None}, {**header, name: 1.0}, {**header, name: -1}):
            with pytest.raises(HeaderError, match=header["kind"]):
                from_header(wrong)
    with pytest.raises(HeaderError, match="must have the fields"):
        from_header({**header, "more": 1})


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ([], "a header needs a kind"),
        ({"kind": ["vote"]}, "a header needs a kind"),
        ({"kind": "pickle"}, "one of chunk, vote, report"),
        ({"kind": "chunk", "epoch": True, "step": 2, "hop": 3}, "chunk.epoch must be int, not True"),
        ({"kind": "bye", "epoch": "3"}, "bye.epoch must be int, not '3'"),
        ({**to_header(REPORT), "lost": ["b", 3]}, r"report.lost\[1\] must be str, not 3"),
        ({**to_header(REPORT), "lost": ["b" * (MOST_TEXT + 1)]}, r"report.lost\[0\] must be str"),
        ({**to_header(REPORT), "lost": "bc"}, "report.lost must be a list"),
    ],
)
def test_another_header_is_refused(header, words):
    with pytest.raises(HeaderError, match=words):
        from_header(header)


def test_an_epoch_must_deal_each_slot_once_and_name_each_member_once():
    header = to_header(Announce(epoch=found_epoch(1, PEER, 0, 4)))
    for change in ({"slots": [[0, 1, 1]]}, {"slots": []}, {"members": []}, {"number": 0}):
        with pytest.raises(HeaderError, match=r"announce\.epoch"):
            from_header({**header, "epoch": {**header["epoch"], **change}})
    twice = {"members": header["epoch"]["members"] * 2, "slots": [[0, 1], [2, 3]]}
    with pytest.raises(HeaderError, match="unique names"):
        from_header({**header, "epoch": {**header["epoch"], **twice}})
