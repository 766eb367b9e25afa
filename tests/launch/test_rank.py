"""The keeper of a rank, started as any launcher would: by the variables of its environment."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from launches import ROOT, until

SECOND = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def words(folder, *options, program):
    keeper = [sys.executable, "-m", "shardtrain.launch.rank", str(folder / "logs"), *options, "--"]
    return keeper, [sys.executable, "-c", program]


def kept(folder, program, *options, **environ):
    keeper, command = words(folder, *options, program=program)
    return subprocess.run(
        [*keeper, *command],
        env={**os.environ, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def record(folder, rank=0):
    return json.loads((folder / f"logs/rank-{rank}.json").read_text())


def test_alone_nothing_stands_before_its_lines(tmp_path):
    done = kept(tmp_path, "import sys; print('a'); sys.stderr.write('b'); sys.exit(5)")
    assert (done.returncode, done.stdout, done.stderr) == (5, "a\nb", "")
    assert (tmp_path / "logs/rank-0.log").read_text() == "a\nb"
    left = record(tmp_path)
    assert (left["rank"], left["size"], left["code"], left["signal"]) == (0, 1, 5, None)
    assert left["end_seconds"] > left["start_seconds"] > time.time() - 60


def test_a_second_start_adds_to_the_log_and_passes_on_its_own(tmp_path):
    kept(tmp_path, "print('one')", **SECOND)
    for rank in (0, 1):
        # as a requeued batch job finds it, whose first start lost both
        (tmp_path / f"logs/rank-{rank}.lost").write_text("7.5")
    done = kept(tmp_path, "print('two')", **SECOND)
    assert done.stdout == "[island 1] two\n"
    assert (tmp_path / "logs/rank-1.log").read_text() == "one\ntwo\n"
    assert record(tmp_path, 1)["log_from"] == 4
    assert [path.name for path in tmp_path.glob("logs/*.lost")] == ["rank-0.lost"]


LISTENS = """
import os, socket
for name in os.listdir("/proc/self/fd"):
    try:
        each = socket.socket(fileno=os.dup(int(name)))
        print(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        pass
"""


def test_the_program_has_no_socket_that_listens_for_its_launcher(tmp_path):
    keeper, command = words(tmp_path, program=LISTENS)
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, ours, theirs:
        kept_open = (listener.fileno(), ours.fileno())
        done = subprocess.run(
            [*keeper, *command], cwd=ROOT, capture_output=True, text=True, check=False, pass_fds=kept_open
        )
    # what connects it with the launcher stays
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_log_that_is_a_link_is_not_written_through(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.log").symlink_to(tmp_path / "theirs")
    done = kept(tmp_path, "print('a')")
    assert done.returncode == 2
    assert "the log of rank 0 cannot be written: " in done.stderr
    assert "is a link, which is not followed; remove it" in done.stderr
    assert not (tmp_path / "theirs").exists()


def test_a_signal_that_ends_the_program_is_told(tmp_path):
    done = kept(tmp_path, "import os; os.kill(os.getpid(), 11)")
    assert done.returncode == 128 + 11
    assert (record(tmp_path)["code"], record(tmp_path)["signal"]) == (139, 11)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        (
            SECOND | {"SHARDTRAIN_ISLAND_PROCESSES": "1,3"},
            "islands of 1,3 processes need 4 ranks, and there are 2",
        ),
        ({"SHARDTRAIN_ISLAND_PROCESSES": "x"}, "'x' is no number from 1"),
        ({"PMIX_RANK": "0"}, "and no number of ranks"),
    ],
)
def test_a_rank_without_a_placement_starts_nothing(environ, text, tmp_path):
    done = kept(tmp_path, "print('started')", **environ)
    assert done.returncode == 2
    assert text in done.stderr
    assert "started" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_program_that_is_not_there_is_in_the_log(tmp_path):
    keeper, _ = words(tmp_path, program="")
    done = subprocess.run([*keeper, "/no/such"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "/no/such cannot be run: No such file" in (tmp_path / "logs/rank-0.log").read_text()
    assert record(tmp_path)["code"] == 127
    done = subprocess.run(keeper, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the program is missing: LOGS -- python" in done.stderr


WAITS = (
    "import signal, sys, time\n"
    "got = []\n"
    "for n in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM): signal.signal(n, lambda n, f: got.append(n))\n"
    "print('ready')\n"
    "while not got: time.sleep(0.02)\n"
    "time.sleep(0.3)\n"
    "print(*map(int, got))\n"
    "sys.exit(int(sys.argv[1]) or 128 + got[0])\n"
)


@pytest.mark.parametrize(
    ("options", "number", "heard", "code", "returned"),
    [
        (("--usr1", "INT"), signal.SIGUSR1, signal.SIGINT, 0, 0),
        ((), signal.SIGTERM, signal.SIGTERM, 9, 9),
    ],
)
def test_signals_reach_the_program_once(options, number, heard, code, returned, tmp_path):
    """Also where a launcher sends them to the whole group of the keeper."""
    keeper, command = words(tmp_path, *options, program=WAITS)
    started = subprocess.Popen(
        [*keeper, *command, str(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with started as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, number)
        assert process.stdout.read() == f"{int(heard)}\n"
    assert process.returncode == returned
    assert record(tmp_path)["asked"] == heard.name
    assert record(tmp_path)["code"] == (code or 128 + heard)


def test_an_unfinished_line_is_passed_on_only_without_a_prefix(tmp_path):
    """A bar moves; the lines of other islands stay whole."""
    program = "import sys; sys.stdout.write('\\r10%'); sys.stdout.flush(); sys.stdin.read(); print('\\r20%')"
    for rank, environ, first in ((0, {}, b"\r10%"), (1, SECOND, b"")):
        keeper, command = words(tmp_path, program=program)
        environ = {**os.environ, **environ}
        with subprocess.Popen(
            [*keeper, *command], cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            log = tmp_path / f"logs/rank-{rank}.log"
            until(lambda log=log: log.is_file() and log.read_bytes() == b"\r10%")
            if first:
                assert process.stdout.read(len(first)) == first
            process.stdin.close()
            assert process.stdout.read() == (b"\r20%\n" if first else b"[island 1] 20%\n")
