"""Launches of tiny programs under the real mpiexec: logs, exit codes, errors named, nothing left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
from launches import ROOT, finish, start_launch, until
from live_processes import alive, parent

GONE_SECONDS = 150
"""Far below the seconds that a rank sleeps; a busy machine takes some to end processes."""
START = """
import os, sys
from pathlib import Path
from shardtrain.launch import local, mpi
from shardtrain.launch.job import Job
from shardtrain.launch.supervise import supervise_once
logs, processes, limit, *program = sys.argv[1:]
each = tuple(map(int, processes.split(",")))
job = Job(arguments=tuple(program), islands=len(each), processes_per_island=each, program=(sys.executable,),
          logs=Path(logs), time_seconds=int(limit) or None, stop_seconds=1)
launch = local.launch_by(job, mpi.find_mpiexec(), os.environ)
environ = dict(os.environ)
ended = supervise_once(launch, job.logs, environ, time_seconds=job.time_seconds, stop_seconds=1)
sys.exit(ended.code)
"""
RANK = (
    "import os, sys, time, signal\n"
    "from shardtrain.islands.rank_environment import find_rank_environment\n"
    "r = find_rank_environment(os.environ).rank\n"
)
STOPS = (
    RANK + "import subprocess\n"
    "got = []\n"
    "for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):\n"
    "    signal.signal(each, lambda number, frame: got.append(number))\n"
    "worker = subprocess.Popen(['sleep', '300'])\n"
    "open(sys.argv[1] + f'/pids-{r}', 'w').write(f'{os.getpid()} {os.getppid()} {worker.pid}')\n"
    "print('ready', flush=True)\n"
    "while not got: time.sleep(0.05)\n"
    "if sys.argv[2] == 'hang': time.sleep(300)\n"
    "print('saved')\n"
    "sys.exit(128 + got[0])\n"
)


def start(folder, program, *arguments, processes="1,1", limit=0, **options):
    words = [str(folder / "logs"), processes, str(limit), str(folder / "program.py"), *arguments]
    return start_launch(folder, START, program, words, **options)


def launched(folder, program, *arguments, **options):
    return finish(start(folder, program, *arguments, **options))


def pids(folder):
    """Of both programs, their keepers and their workers."""
    paths = [folder / f"pids-{rank}" for rank in (0, 1)]
    until(lambda: all(path.is_file() and len(path.read_text().split()) == 3 for path in paths))
    return [int(pid) for path in paths for pid in path.read_text().split()]


def test_each_rank_has_a_whole_log_and_the_first_is_passed_on_as_it_is(tmp_path):
    program = (
        RANK + "sys.stdout.write(f'begin {r}\\n10%\\r20%\\n')\n"
        "sys.stderr.write('warned\\n')\n"
        "for i in range(2000): print(r, i, 'x' * 80)\n"
        "sys.stdout.write('no end of line')\n"
    )
    code, out, err = launched(tmp_path, program, processes="1,2")
    assert (code, err) == (0, "")
    whole = [
        f"begin {r}\n10%\r20%\nwarned\n"
        + "".join(f"{r} {i} {'x' * 80}\n" for i in range(2000))
        + "no end of line"
        for r in range(3)
    ]
    # read as bytes: a carriage return is no end of a line here
    assert [(tmp_path / f"logs/rank-{r}.log").read_bytes().decode() for r in range(3)] == whole
    for rank, name in ((1, "1.0"), (2, "1.1")):
        lines = [line for line in out.splitlines() if f"[island {name}] " in line]
        texts = [line.partition(f"[island {name}] ")[2] for line in lines]
        assert texts == whole[rank].replace("10%\r", "").splitlines()
    assert "begin 0\n10%\n20%\nwarned\n" in out


def test_an_error_is_shown_first_named_and_ends_the_others(tmp_path):
    """Before MPI_Init no mpiexec of MPICH would end them."""
    program = RANK + "if r == 1: raise ValueError('the bad sample')\ntime.sleep(120)\n"
    code, out, err = launched(tmp_path, program)
    assert code == 1
    assert "[island 1] ValueError: the bad sample" in out
    before, headline, after = err.partition("=== island 1 failed first: rank 1 on ")
    assert (before.strip(), bool(headline)) == ("", True)
    assert ", exit code 1, " in after.splitlines()[0]
    assert after.splitlines()[1] == "Traceback (most recent call last):"
    assert "ValueError: the bad sample\n\nthen: island 0 on " in after
    assert f"whole log: {tmp_path}/logs/rank-1.log" in after


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
        ("raise ValueError('bad')", 1, "called MPI_Abort"),
    ],
)
def test_a_rank_of_mpi_that_ends_ends_all(how, code, text, tmp_path):
    program = (
        "import os, signal, sys\nfrom mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n"
        "print('last words', file=sys.stderr)\n"
        f"if MPI.COMM_WORLD.rank == 1: {how}\n"
        "MPI.COMM_WORLD.barrier()\n"
    )
    (tmp_path / "mpi.py").write_text(program)
    run = "import runpy, sys\nsys.argv = ['', 'mpi.py']\nrunpy.run_module('mpi4py', run_name='__main__')\n"
    ended, _, err = launched(tmp_path, run)
    assert ended == code
    assert "=== island 1 failed first: rank 1 on " in err
    # Open MPI leaves the keeper time to see an abort as what it is for the program: exit code 1
    assert f", {text}, " in err or (code == 1 and ", exit code 1, " in err)
    assert ("ValueError: bad" if code == 1 else "last words") in err


def test_ctrl_c_asks_all_ranks_once_and_they_end_in_order(tmp_path):
    process = start(tmp_path, STOPS, str(tmp_path), "save", start_new_session=True)
    everybody = pids(tmp_path)
    # as a terminal does: to the whole group in its foreground
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "SIGINT: all ranks are asked to stop and save; Ctrl-C kills them" in err
    assert "stopped by SIGINT: islands 0, 1\n" in err
    assert sorted(out.splitlines()) == ["[island 1] ready", "[island 1] saved", "ready", "saved"]
    until(lambda: not any(map(alive, everybody)), GONE_SECONDS)


@pytest.mark.parametrize(
    ("victim", "text"),
    [
        ("mpiexec", "=== mpiexec was killed by SIGKILL ===\nislands 0, 1 ended"),
        ("keeper", "=== island 1 was lost first: the process that keeps rank 1 on "),
    ],
)
def test_who_was_killed_from_outside_is_named(victim, text, tmp_path):
    process = start(tmp_path, STOPS, str(tmp_path), "hang")
    everybody = pids(tmp_path)
    keeper = int((tmp_path / "pids-1").read_text().split()[1])
    proxy = parent(keeper)
    mpiexec = parent(proxy)
    if victim == "mpiexec":
        os.kill(mpiexec, signal.SIGKILL)
    else:
        # on a busy machine the launcher could end the other rank before it is written that this one was lost
        os.kill(proxy, signal.SIGSTOP)
        os.kill(keeper, signal.SIGKILL)
        until((tmp_path / "logs/rank-1.lost").is_file)
        os.kill(proxy, signal.SIGCONT)
    _, err = process.communicate(timeout=300)
    assert process.returncode not in (0, 2)
    assert text in err
    until(lambda: not any(map(alive, everybody)), GONE_SECONDS)


def test_a_second_ctrl_c_kills(tmp_path):
    process = start(tmp_path, STOPS, str(tmp_path), "hang", start_new_session=True)
    everybody = pids(tmp_path)
    process.send_signal(signal.SIGTERM)
    assert process.stderr is not None
    assert any("asked to stop and save" in line for line in process.stderr)
    time.sleep(0.7)  # sooner it would be the same Ctrl-C
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 137
    assert "killed; what was saved before is still there" in err
    until(lambda: not any(map(alive, everybody)), GONE_SECONDS)


def test_nothing_outlives_a_launcher_that_is_killed(tmp_path):
    process = start(tmp_path, STOPS, str(tmp_path), "hang")
    everybody = pids(tmp_path)
    process.kill()
    until(lambda: not any(map(alive, everybody)), GONE_SECONDS)
    process.communicate(timeout=300)


def test_a_terminal_that_goes_away_lets_the_ranks_save(tmp_path):
    process = start(tmp_path, STOPS, str(tmp_path), "save")
    pids(tmp_path)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    assert process.wait(300) == 129
    for rank in (0, 1):
        assert (tmp_path / f"logs/rank-{rank}.log").read_text() == "ready\nsaved\n"


def test_the_time_limit_asks_first(tmp_path):
    code, out, err = launched(tmp_path, STOPS, str(tmp_path), "save", limit=3)
    assert code == 130
    assert "1 s before the time limit: all ranks are asked to stop and save" in err
    assert "[island 1] saved" in out


def test_the_time_limit_ends_what_does_not_stop(tmp_path):
    code, _, err = launched(tmp_path, STOPS, str(tmp_path), "hang", limit=3)
    assert code == 137
    assert "killed; what was saved before is still there" in err
    until(lambda: not any(map(alive, pids(tmp_path))), GONE_SECONDS)


def test_an_mpiexec_that_starts_nothing_is_told(tmp_path):
    """And what an earlier launch left in the folder is not taken for this one's."""
    assert launched(tmp_path, "raise ValueError('of an earlier launch')")[0] == 1
    broken = START.replace("launch = local", "job = job; launch = local").replace(
        "environ = dict", "from dataclasses import replace\n"
        "launch = replace(launch, lines=(('false',), *launch.lines))\nenviron = dict"
    )  # fmt: skip
    words = [sys.executable, "-c", broken, str(tmp_path / "logs"), "1,1", "0", "x.py"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert "=== false ended with exit code 1, and no rank says why ===\nNo rank was started" in done.stderr
