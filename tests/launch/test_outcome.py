"""Who failed first, by what ranks left: records and logs written by hand."""

import json
import os
import signal

import pytest

from shardtrain.launch import outcome
from shardtrain.launch.outcome import diagnose_launch
from shardtrain.launch.rank_end import error_text, has_failed, read_ranks
from shardtrain.launch.restarts import LaunchEnd

ERROR = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: bad data\n'
NEIGHBOUR = (
    'Traceback (most recent call last):\n  File "b.py", line 2\nmpi4py.MPI.Exception: MPI_ERR_OTHER: known\n'
)


@pytest.fixture
def left(tmp_path):
    """Write what one rank left: (rank, code, end, text, asked, ...), of 4 ranks on 4 islands."""

    def write(rank, code, end=None, text="step 1\n", touched=0.0, **changes):
        log = tmp_path / f"rank-{rank}.log"
        log.write_text(f"of an earlier launch\n{ERROR}" + text)
        os.utime(log, (touched, touched))
        record = {
            "rank": rank, "size": 4, "host": f"n{rank}", "island": rank, "num_islands": 4, "process": 0,
            "num_processes": 1, "asked": None, "code": code, "signal": None, "start_seconds": 100.0,
            "end_seconds": end, "log_from": len(log.read_bytes()) - len(text.encode()), "pid": 1,
        }  # fmt: skip
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(record | changes))

    return write


def told(folder, code=1):
    return diagnose_launch(read_ranks(folder), "mpiexec", code)


def test_of_a_mistake_its_message_alone_is_shown(left, tmp_path):
    message = "shardtrain train: shares\n  - one each\n(the traceback: SHARDTRAIN_TRACEBACK=1)\n"
    abort = "Abort(2) on node 0: application called MPI_Abort(MPI_COMM_WORLD, 2) - process 0\n"
    left(0, None, text="a table\nshardtrain train: waiting\n" + message + abort)
    text = told(tmp_path, 2).text
    assert f"called MPI_Abort, 0 s after its start ===\n{message}\nwhole log" in text, text


def test_the_first_error_is_shown_and_named(left, tmp_path):
    left(0, 0, 120)
    left(1, 3, 112, "step 1\n" + ERROR)
    left(2, None)
    left(3, 4, 115, ERROR.replace("bad", "worse"))
    assert has_failed(tmp_path)
    assert told(tmp_path, 9) == LaunchEnd(
        code=3,
        text=(
            "\n=== island 1 failed first: rank 1 on n1, exit code 3, 12 s after its start ===\n"
            f"{ERROR}\n"
            "then: island 0 on n0 finished\n"
            "then: island 2 on n2 ended by the launcher\n"
            "then: island 3 on n3 failed too: exit code 4\n"
            f"whole log: {tmp_path}/rank-1.log (the others are beside it)\n"
        ),
    )


def test_errors_for_want_of_a_neighbour_come_after_their_cause(left, tmp_path):
    """By another host's clock they may seem earlier."""
    left(0, 1, 111, NEIGHBOUR)
    left(1, 1, 112, ERROR)
    left(2, 143, 110, asked="SIGTERM", signal=None)
    left(3, 1, 110, "ended badly at the launcher's signal\n", asked="SIGTERM")
    assert "island 1 failed first" in told(tmp_path).text
    assert "bad data" in told(tmp_path).text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_rank_comes_before_one_that_gave_up_without_it(number, left, tmp_path):
    abort = "Abort(1) on node 0: application called MPI_Abort(MPI_COMM_WORLD, 1) - process 0\n"
    left(0, None, text=f"step 1\n{abort}", touched=111.0)
    left(1, 128 + number, 112, signal=number)
    # libraries abort where another rank is lost
    left(2, 134, 110, text=NEIGHBOUR, signal=signal.SIGABRT)
    left(3, 134, 110, text=abort, signal=signal.SIGABRT)
    found = told(tmp_path, 1)
    assert found.code == 128 + number
    assert f"island 1 failed first: rank 1 on n1, killed by {number.name}" in found.text


@pytest.mark.parametrize(
    ("said", "code"), [("application called MPI_Abort(MPI_COMM_WORLD, 7) - process 2\n", 7), ("", 5)]
)
def test_a_rank_that_aborted_takes_its_keeper_along(said, code, left, tmp_path):
    left(0, None, touched=130)
    left(1, None, text=NEIGHBOUR, touched=111)
    left(2, None, text=ERROR + said, touched=112)
    ended = told(tmp_path, 5)
    assert ended.code == code
    assert "=== island 2 failed first: rank 2 on n2, called MPI_Abort, 12 s after its start ===" in ended.text
    assert "MPI_Abort(" not in ended.text


def test_ranks_that_stopped_as_asked_did_not_fail(left, tmp_path):
    for rank in range(4):
        left(rank, 138 if rank < 3 else 0, 111, asked="SIGUSR1")
    assert not has_failed(tmp_path)
    ended = told(tmp_path, 0)
    assert (ended.code, ended.text) == (138, "stopped by SIGUSR1: islands 0, 1, 2\n")


def test_a_failure_while_stopping_is_one(left, tmp_path):
    left(0, 138, 111, asked="SIGUSR1")
    left(1, 1, 112, ERROR, asked="SIGUSR1")
    ended = told(tmp_path)
    assert ended.code == 1
    assert "island 1 failed first" in ended.text
    assert "then: island 0 on n0 stopped at SIGUSR1" in ended.text


def test_ranks_that_never_started_are_named(left, tmp_path):
    left(0, 0, 111)
    left(2, None)
    ended = told(tmp_path, 255)
    assert ended.code == 255
    assert "=== mpiexec ended with exit code 255, and no rank says why ===" in ended.text
    assert "Never started: rank 1, 3 of 4." in ended.text
    assert f"Ended from outside: island 2 on n2; logs: {tmp_path}" in ended.text


def test_a_launcher_that_starts_nothing(tmp_path):
    ended = told(tmp_path, -9)
    assert ended.code == 137
    assert "No rank was started: what the launcher printed is above." in ended.text
    assert told(tmp_path, 0) == LaunchEnd(code=0)


def test_processes_of_an_island_are_named(left, tmp_path):
    left(3, 1, 111, ERROR, island=1, process=2, num_processes=3)
    assert "=== island 1.2 failed first: rank 3 on n3" in told(tmp_path).text


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ("", "(its log is empty)"),
        ("\n".join(map(str, range(20))), "\n".join(map(str, range(5, 20)))),
        ("10%\r20%\r30%\nwrong\n", "30%\nwrong"),
        (f"{ERROR}went on\n{ERROR.replace('bad', 'worse')}", ERROR.replace("bad", "worse").rstrip()),
        (
            f"before\n{ERROR}\nDuring handling of the above exception, another occurred:\n\n{NEIGHBOUR}",
            f"{ERROR}\nDuring handling of the above exception, another occurred:\n\n{NEIGHBOUR.rstrip()}",
        ),
        (
            f"{ERROR}Exception ignored in: <f>\nTraceback (most recent call last):\n  x\nImportError\n",
            ERROR.rstrip(),
        ),
        (f"{ERROR}application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n", ERROR.rstrip()),
    ],
)
def test_the_error_is_found_in_a_log(log, text):
    assert error_text(log) == text


def test_a_long_traceback_is_cut_in_its_middle():
    log = (
        "Traceback (most recent call last):\n" + "".join(f"  line {i}\n" for i in range(99)) + "ValueError\n"
    )
    lines = error_text(log).splitlines()
    assert len(lines) == 61
    assert lines[7:10] == ["  line 6", "  ... 41 lines, see the log ...", "  line 48"]
    assert lines[-1] == "ValueError"


def test_behind_srun_it_tells_and_gives_the_code(left, tmp_path):
    left(1, 3, 112, ERROR)
    written = []
    assert outcome.main([str(tmp_path), "--code", "143"], written.append) == 3
    assert "island 1 failed first" in "".join(written)


ABORTED = (
    "shardtrain train: interrupted\nAbort(130) on node 0: application called MPI_Abort(MPI_COMM_WORLD, 130)\n"
)


def test_ranks_that_were_asked_before_their_first_step_have_stopped(left, tmp_path):
    """They end at once, one of them all others."""
    left(0, None, text=ABORTED, asked="SIGINT")
    left(1, None, asked="SIGINT")
    ended = diagnose_launch(read_ranks(tmp_path), "mpiexec", 130, signal.SIGINT)
    assert (ended.code, ended.asked) == (130, True)
    assert ended.text == "stopped by SIGINT before all ranks had begun\n"
    left(1, 130, 101, asked="SIGINT")
    assert diagnose_launch(read_ranks(tmp_path), "mpiexec", 130).text == "stopped by SIGINT: islands 0, 1\n"


def test_an_error_is_told_though_the_launch_was_asked_to_stop(left, tmp_path):
    left(0, 1, 110, ERROR)
    assert diagnose_launch(read_ranks(tmp_path), "mpiexec", 1, signal.SIGTERM).code == 1


def test_of_killed_keepers_the_first_is_named(left, tmp_path):
    for rank, seconds in ((0, 7.25), (1, 7.125), (2, 7.5)):
        left(rank, None, pid=40 + rank)
        (tmp_path / f"rank-{rank}.lost").write_text(str(seconds))
    ended = told(tmp_path, 9)
    assert ended.code == 9
    assert ended.text == (
        "\n=== island 1 was lost first: the process that keeps rank 1 on n1 ===\n"
        "That process (41) was killed from outside, and its rank with it.\n"
        "then: islands 0, 2 ended by the launcher\n"
        "Never started: rank 3 of 4.\n"
    )


def test_a_launcher_that_is_killed_is_named_and_not_its_ranks(left, tmp_path):
    left(0, 137, 101, signal=9, orphaned=True)
    left(1, None)
    (tmp_path / "rank-1.lost").write_text("7.5")
    ended = told(tmp_path, -9)
    assert ended.code == 137
    assert ended.text.startswith("\n=== mpiexec was killed by SIGKILL ===\n")
    assert "islands 0, 1 ended with it.\n" in ended.text
