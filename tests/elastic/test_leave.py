"""`shardtrain leave`: an island leaves by its name, and what is no island is told."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shardtrain import cli

sys.path.insert(0, str(Path(__file__).parent))
from chaos import Run

from shardtrain.cli.leave import find_member
from shardtrain.elastic.epoch import Epoch, Peer
from shardtrain.elastic.epoch_files import list_epochs
from shardtrain.elastic.messages import to_json
from shardtrain.elastic.run_files import RunFiles


def epoch(number, *names, why="dealt anew"):
    members = tuple(Peer(name=name, address="a") for name in names)
    return Epoch(
        number=number, step=number, members=members, slots=tuple((n,) for n in range(len(names))), why=why
    )


def test_islands_leave_by_command_or_signal_and_nothing_is_repeated(tmp_path, warm_python, capsys):
    run = Run(warm_python, tmp_path, steps=250, seconds=0.004)
    try:
        first, second, _ = (run.start() for _ in range(3))
        run.wait_for(lambda: all(each.is_member for each in run.processes))
        assert cli.main(["leave", str(tmp_path)]) == 0
        listed = [line.split() for line in capsys.readouterr().out.splitlines()]
        names = list_epochs(RunFiles(tmp_path / "elastic"))[-1].names
        assert listed == [[names[0], "chief"], [names[1]], [names[2]]]
        (name,) = (text for text in first.list_texts() if text.startswith("name "))
        assert cli.main(["leave", str(tmp_path), name.removeprefix("name ")]) == 0
        assert capsys.readouterr().out == f"{name.removeprefix('name ')} is asked to leave\n"
        second.signal(signal.SIGINT)
        epochs = run.finish()
        assert [each.outcome.split()[0] for each in (first, second)] == ["left"] * 2
    finally:
        run.end()
    assert not any(each.repeats for each in epochs)


def test_a_folder_without_islands_is_left_as_it_is(tmp_path, capsys):
    assert cli.main(["leave", str(tmp_path)]) == 2
    assert f"{tmp_path} has no run of elastic islands, which has files" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vm-12", "'vm-12' begins the names of 2 islands; give one of vm-12-a, vm-12-b"),
        ("vm-7", "vm-7-c is not in the run any more, since epoch 2: lost vm-7-c"),
        ("vm-12-c", "there is no island 'vm-12-c' (did you mean 'vm-12-b' or 'vm-12-a'?)"),
        ("x", "there is no island 'x' (known: vm-12-a, vm-12-b, vm-3-d)"),
    ],
)
def test_an_island_that_is_not_there_is_refused(text, problem):
    epochs = [
        epoch(1, "vm-12-a", "vm-7-c", "vm-12-b"),
        epoch(2, "vm-12-a", "vm-12-b", why="lost vm-7-c"),
        epoch(3, "vm-12-a", "vm-12-b", "vm-3-d", why="joined vm-3-d"),
    ]
    assert find_member("vm-12-a", epochs) == "vm-12-a"
    assert find_member("vm-3", epochs) == "vm-3-d"
    with pytest.raises(ValueError) as error:
        find_member(text, epochs)
    assert str(error.value) == problem


def test_a_run_that_is_done_or_stopped_has_no_islands(tmp_path, capsys):
    files = RunFiles(tmp_path / "elastic")
    first = replace(epoch(1, "vm-1-a"), num_steps=20)
    files.propose(1, json.dumps(to_json(first)).encode())
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert cli.main(["leave", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "vm-1-a  chief\n"
    for last in (
        tmp_path / "checkpoints" / "step_00000020",
        tmp_path / "elastic/checkpoints/step-20-epoch-1",
    ):
        last.mkdir()
        assert cli.main(["leave", str(tmp_path)]) == 0
        done = "the run is done: its 20 steps are saved, and it has no islands any more\n"
        assert capsys.readouterr().out == done
        assert cli.main(["leave", str(tmp_path), "vm-1"]) == 2
        assert f"there is no island 'vm-1': {done}" in capsys.readouterr().err
        last.rmdir()
    stopped = replace(epoch(2, "vm-1-a", why="left vm-1-a"), step=15, stops=True)
    files.propose(2, json.dumps(to_json(stopped)).encode())
    assert cli.main(["leave", str(tmp_path)]) == 0
    assert "stopped after step 15; an island that is started now continues it" in capsys.readouterr().out


def test_one_that_is_silent_is_told(tmp_path, capsys):
    files = RunFiles(tmp_path / "elastic")
    files.propose(1, json.dumps(to_json(epoch(1, "vm-1-a", "vm-2-b"))).encode())
    files.touch_alive("vm-2-b")
    long_ago = time.time() - 1000
    os.utime(tmp_path / "elastic/alive/vm-2-b", (long_ago, long_ago))
    assert cli.main(["leave", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "vm-1-a  chief"
    assert re.fullmatch(r"vm-2-b  \(no sign of life for 1?[09]\d\d s\)", second)
    assert cli.main(["leave", str(tmp_path), "vm-2"]) == 0
    assert capsys.readouterr().out == f"vm-2-b is asked to leave{second.removeprefix('vm-2-b')}\n"
    assert files.is_asked_to_leave("vm-2-b")
    assert not files.is_asked_to_leave("vm-1-a")
