"""What happened in an elastic run, and `shardtrain report`: times by value, the picture, other folders."""

import json
import os
from dataclasses import replace

import pytest

from shardtrain import cli
from shardtrain.elastic.epoch import Epoch, Peer, found_epoch
from shardtrain.elastic.history import History
from shardtrain.elastic.messages import to_json
from shardtrain.elastic.run_files import RunFiles
from shardtrain.report.elastic_run import past_text, summarize
from shardtrain.report.plots.members import find_seconds

A, B, C, D = (Peer(name=name, address="") for name in "abcd")
EPOCHS = (
    found_epoch(1, A, 0, 2),
    Epoch(number=2, step=10, members=(A, B), slots=((0,), (1,)), why="joined b"),
    Epoch(number=3, step=30, members=(B,), slots=((1, 0),), why="lost a", kept=(1,)),
    Epoch(number=4, step=30, members=(B, C), slots=((1,), (0,)), why="joined c", kept=(1, 0)),
    found_epoch(5, D, 35, 2),
)
MADE = (100.0, 110.0, 125.0, 145.0, 200.0)
ALIVE = {"a": 124.5, "b": 150.0, "c": 160.0, "d": 210.0}
STEPS = [(step, 0.5 if 10 < step <= 35 else 1.0) for step in range(1, 41)]
LINES = [
    {"step": step, "train/loss": 9 - step / 10, "seconds/step": seconds, "seconds/save": 2.0 * (step == 20)}
    for step, seconds in STEPS
]


def test_each_second_is_accounted_for():
    history = History(
        epochs=EPOCHS,
        made=MADE,
        alive=ALIVE,
        members={"b": {"host": "one", "mesh": {"data": 2}}, "c": {"mesh": "?"}},
        saved=35,
        plain={},
    )
    # two of the steps were done by a run without islands that come and go
    after = summarize(replace(history, plain={5: 38}), LINES, now=1000.0)
    assert (after.num_steps, after.num_plain, after.epochs[-1].steps) == (38, 2, range(35, 38))
    assert "at once; 2 more steps were trained without --elastic\n" in past_text(after)
    past = summarize(history, LINES, now=1000.0)
    assert past.num_plain == 0
    assert (past.num_steps, past.step_seconds, past.wall_seconds) == (40, 0.5, 110.0)
    assert past.goodput == pytest.approx(40 * 0.5 / 110)
    assert past.lost_seconds == pytest.approx(
        {
            "fewer": 10 * 0.5 + 5 * 0.5,
            "few": 20.0,  # in the third epoch
            "saves": 2.0,
            "deaths": 0.5,
            "repeats": 0.5 / 2,  # before the fourth epoch nothing else happened than waiting
            "absent": 40.0,
            "void": 15 - 5 * 0.5,
            "rest": 15 - 20 * 0.5 - 2.0 - 0.5 - 0.25 + 10 - 5 * 1.0,
        }
    )
    assert sum(past.lost_seconds.values()) + 40 * 0.5 == pytest.approx(110.0)
    assert [(each.name, each.came, each.gone, each.why, each.num_slots) for each in past.islands] == [
        ("a", 0.0, 25.0, "lost", 2 * 10 + 20),
        ("b", 10.0, 50.0, "ended", 20 + 5),
        ("c", 45.0, 60.0, "ended", 5),
        ("d", 100.0, 110.0, "ended", 2 * 5),
    ]
    assert [dict(each.mesh) for each in past.islands] == [{}, {"data": 2}, {}, {}]
    assert summarize(history, LINES, now=212.0).islands[-1].why == "present"
    assert [find_seconds(past, step) for step in (5, 10, 30, 35, 40)] == [5.0, 10.0, 25.0, 60.0, 110.0]
    text = past_text(past)
    assert text.startswith("40 steps of 2 slots in 1m50s, 1 of them repeated; 4 islands, 2 at most at once\n")
    assert "goodput 18.2%" in text
    # without metrics an epoch as a whole has the speed of its steps; the most islands were no faster than all
    assert summarize(history, [], now=1000.0).step_seconds == pytest.approx((10 + 15 + 15) / 35)


@pytest.mark.parametrize("every", [1, 5])
def test_only_the_slots_that_nobody_kept_of_a_repeated_step_are_computed_again(every):
    first = found_epoch(1, A, 0, 4, every=every)
    two = Epoch(number=2, step=10, members=(A, B), slots=((0, 1), (2, 3)), why="joined b", every=every)
    lost = Epoch(number=3, step=30, members=(B,), slots=((2, 0, 1, 3),), why="lost a", kept=(1,), every=every)
    history = History(
        epochs=(first, two, lost),
        made=(0.0, 10.0, 40.0),
        alive={"a": 38.0, "b": 50.0},
        members={},
        saved=0,
        plain={},
    )
    lines = [{"step": step, "seconds/step": 1.0} for step in range(1, 41)]
    past = summarize(history, lines, now=1000.0)
    lost_seconds = past.lost_seconds
    # 10 s more than the steps took: 2 until the others noticed, 3 of 4 slots, and the rest
    assert (lost_seconds["deaths"], lost_seconds["repeats"]) == (2.0, every * 3 / 4)
    assert lost_seconds["rest"] == pytest.approx(10 - 2 - every * 3 / 4)


def test_steps_with_fewer_batches_are_less_work():
    first = found_epoch(1, A, 0, 2, first_batch=0)
    grown = replace(EPOCHS[1], slots=((0, 1), (2, 3)), member_slots=2, first_batch=10)
    history = History(
        epochs=(first, grown),
        made=(0.0, 10.0),
        alive={"a": 50.0, "b": 50.0},
        members={},
        saved=0,
        plain={},
    )
    lines = [{"step": step, "seconds/step": 1.0} for step in range(1, 41)]
    past = summarize(history, lines, now=1000.0)
    # steps of one island are as long, and read half as much
    assert (past.step_seconds, past.useful_seconds, past.lost_seconds["fewer"]) == (1.0, 35.0, 5.0)
    assert past.goodput == pytest.approx(35 / 50)
    assert [each.num_slots for each in past.islands] == [2 * 10 + 2 * 30, 2 * 30]
    text = past_text(past)
    assert text.startswith("40 steps of 2 slots for each island in 50s,")
    assert "57.1%" in text


def test_the_report_of_a_folder(tmp_path, capsys):
    files = RunFiles(tmp_path / "run" / "elastic")
    for epoch, made in zip(EPOCHS, MADE, strict=True):
        files.propose(epoch.number, json.dumps(to_json(epoch)).encode())
        os.utime(tmp_path / "run" / "elastic" / "epochs" / f"{epoch.number}.json", (made, made))
    for name, alive in ALIVE.items():
        files.touch_alive(name)
        os.utime(tmp_path / "run" / "elastic" / "alive" / name, (alive, alive))
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in LINES))
    before = sorted((tmp_path / "run").rglob("*"))
    picture = tmp_path / "out" / "islands.png"
    assert cli.main(["report", str(tmp_path / "run"), "--output", str(picture)]) == 0
    assert "goodput 18.2%" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert cli.main(["report", str(tmp_path / "run"), "--output", "islands.pdf"]) == 2
    assert "use islands.png" in capsys.readouterr().err


def test_a_run_that_is_not_elastic_has_other_reports(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "is no elastic run" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert cli.main(["report", str(tmp_path)]) == 2
    assert f"shardtrain advise speed {tmp_path}" in capsys.readouterr().err
