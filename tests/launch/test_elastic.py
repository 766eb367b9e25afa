"""Elastic islands of tiny programs on this machine, without MPI: how they start, end, and start again."""

import os
import signal

import pytest
from launches import finish, start_launch, until
from live_processes import alive

START = """
import os, sys
from pathlib import Path
from shardtrain.launch import local
from shardtrain.launch.elastic import supervise_islands
from shardtrain.launch.job import Job
from shardtrain.launch.mpi import MpiOptions
from shardtrain.launch.restarts import Restarts
islands, restarts, limit, *program = sys.argv[1:]
job = Job(arguments=tuple(program), islands=int(islands), program=(sys.executable,), interface="lo")
launches = local.launch_islands(job, MpiOptions(), os.environ)
logs = Path("logs")
logs.mkdir()
again = Restarts(most=int(restarts), backoff_seconds=0.1)
limits = {"time_seconds": int(limit) or None, "stop_seconds": 1}
sys.exit(supervise_islands(launches, logs, again, os.environ, **limits))
"""
# an island knows no number: the order of their starts stands in files, made once
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
def starts(): return len(list(Path().glob("start-*")))
def wait(condition):
    while not condition(): time.sleep(0.02)
def is_seen(number):
    # that it ended: then it is a zombie no more
    return not Path("/proc", Path(f"start-{number}").read_text()).exists()
def claim():
    for number in range(100):
        try:
            with open(f"start-{number}", "x") as file: file.write(str(os.getpid()))
            return number
        except FileExistsError: pass
"""
WAITS = (
    PROGRAM + "got = []\n"
    "for each in (signal.SIGINT, signal.SIGTERM):\n"
    "    signal.signal(each, lambda number, frame: got.append(number))\n"
    "claim()\n"
    "while not got: time.sleep(0.02)\n"
    "if sys.argv[1:] == ['hang']: time.sleep(300)\n"
    "print('left after', signal.Signals(got[0]).name)\n"
    "sys.exit(128 + got[0])\n"
)


def start(folder, program, *arguments, islands=3, restarts=0, limit=0, **options):
    words = [str(islands), str(restarts), str(limit), "program.py", *arguments]
    return start_launch(folder, START, program, words, **options)


def launched(folder, program, *arguments, **options):
    return finish(start(folder, program, *arguments, **options))


def pids(folder, number):
    """Of all islands, once so many have started."""
    paths = [folder / f"start-{each}" for each in range(number)]
    until(lambda: all(path.is_file() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def test_each_is_a_process_of_its_own_with_whole_lines_and_a_log(tmp_path):
    program = (
        PROGRAM + "print(os.environ['SHARDTRAIN_ADDRESS'], [n for n in os.environ if n.startswith('PMI')])\n"
        "for i in range(2000): print(i, 'x' * 80)\n"
        "print(*os.sched_getaffinity(0), end='')\n"
    )
    code, out, err = launched(tmp_path, program, islands=2)
    assert (code, err) == (0, "")
    lines = [f"{i} {'x' * 80}" for i in range(2000)]
    cores = set()
    for number in (0, 1):
        log = (tmp_path / f"logs/rank-{number}.log").read_text().splitlines()
        assert log[:-1] == ["127.0.0.1 []", *lines]
        shown = [
            line.removeprefix(f"[island {number}] ") for line in out.splitlines() if f"d {number}]" in line
        ]
        assert shown == log
        cores |= {frozenset(log[-1].split())}
    # each has its half, unless the tests have one core, or were bound themselves
    if os.sched_getaffinity(0) == set(range(os.cpu_count() or 1)) and os.cpu_count() != 1:
        first, second = cores
        assert not first & second


def ends_in_turn(*hows):
    """A program of islands that end one after the other, each in its way."""
    lines = [
        "number = claim()",
        f"wait(lambda: starts() == {len(hows)})",
        "if number: wait(lambda: is_seen(number - 1))",
        f"exec({list(hows)!r}[number])",
    ]
    return PROGRAM + "\n".join(lines) + "\n"


KILL, DONE, AGAIN = "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)", "sys.exit(75)"


@pytest.mark.parametrize(
    ("hows", "code", "told"),
    [
        ((KILL, AGAIN, DONE), 0, ["killed by SIGKILL", "exit code 75"]),
        (("sys.exit(143)", DONE), 0, []),
        ((DONE, KILL), 0, ["killed by SIGKILL"]),
        ((KILL, AGAIN), 75, ["killed by SIGKILL", "exit code 75"]),
        (("raise ValueError('the bad sample')", KILL), 1, ["exit code 1", "killed by SIGKILL"]),
        (("sys.exit(143)", "sys.exit(2)"), 2, ["exit code 2"]),
        (("sys.exit(143)", "sys.exit(143)"), 143, []),
    ],
)
def test_the_code_says_whether_the_run_is_done(hows, code, told, tmp_path):
    found, _, err = launched(tmp_path, ends_in_turn(*hows), islands=len(hows))
    assert found == code, err
    lines = [line for line in err.splitlines() if line.startswith("launch: ")]
    assert [line.partition(" ended: ")[2] for line in lines] == told
    assert ("ValueError: the bad sample\n\nwhole log: logs/rank-" in err) == (code == 1)
    assert (" failed first: exit code 1 ===\nTraceback (most recent" in err) == (code == 1)


@pytest.mark.parametrize("how", [KILL, AGAIN, "raise OSError(5, 'bad disk')"])
def test_one_that_dies_is_started_again_while_the_others_continue(how, tmp_path):
    program = PROGRAM + f"if claim() == 1: {how}\nwait(lambda: starts() == 4)\nprint('done')\n"
    code, out, err = launched(tmp_path, program, restarts=2)
    assert code == 0
    assert out.count("done\n") == 3
    assert err.count("launch: ") == err.count("; restart 1 of 2 in 0.1 s\n") == 1
    # its log goes on
    assert sum(path.read_text().endswith("done\n") for path in tmp_path.glob("logs/*.log")) == 3


def test_restarts_are_counted_over_all_islands_and_end(tmp_path):
    code, _, err = launched(tmp_path, PROGRAM + f"claim()\n{KILL}\n", restarts=3)
    assert code == 137
    assert len(list(tmp_path.glob("start-*"))) == 3 + 3
    assert err.count("; restart ") == 3
    assert "; restart 3 of 3 in 0.4 s\n" in err
    assert err.count("; all 3 restarts are used\n") == 3


@pytest.mark.parametrize("how", ["sys.exit(2)", "sys.exit(143)"])
def test_a_mistake_or_one_that_left_is_not_started_again(how, tmp_path):
    program = PROGRAM + f"if claim() == 1: {how}\nwait(lambda: starts() == 3 and is_seen(1))\n"
    assert launched(tmp_path, program, restarts=3)[0] == 0
    assert len(list(tmp_path.glob("start-*"))) == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_all_to_leave(number, tmp_path):
    process = start(tmp_path, WAITS, restarts=3, start_new_session=True)
    everybody = pids(tmp_path, 3)
    # as a terminal does: to the whole group in its foreground
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + number
    assert f"{number.name}: all islands are asked to stop and save; Ctrl-C kills them" in err
    assert out.count(f"left after {number.name}\n") == 3
    assert not any(map(alive, everybody))
    assert len(list(tmp_path.glob("start-*"))) == 3


def test_a_second_signal_kills(tmp_path):
    process = start(tmp_path, WAITS, "hang")
    everybody = pids(tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert any("asked to stop and save" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 137
    assert "killed; what was saved before is still there" in err
    assert not any(map(alive, everybody))


def test_the_time_limit_asks_first(tmp_path):
    code, out, err = launched(tmp_path, WAITS, limit=4)
    assert code == 143
    assert "1 s before the time limit: all islands are asked to stop and save" in err
    assert out.count("left after SIGTERM\n") == 3


def test_nothing_outlives_a_launch_that_is_killed(tmp_path):
    process = start(tmp_path, WAITS, "hang")
    everybody = pids(tmp_path, 3)
    process.kill()
    until(lambda: not any(map(alive, everybody)))
    process.communicate(timeout=300)
