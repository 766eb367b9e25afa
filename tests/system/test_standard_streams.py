"""What a run prints on a full disk, or to nobody: dropped, and told once on the other stream."""

import os
import subprocess
import sys

import pytest

PROGRAM = r"""
import sys
from shardtrain.system.standard_streams import steady_output
with steady_output():
    for number in range(3):
        print("x" * 10_000, flush=number == 1)
    sys.stdout.writelines(["y" * 10_000, "\n"])
    print("and to stderr", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("out", "err"), [("/dev/full", "/dev/full"), ("/dev/full", None), (None, "/dev/full"), ("closed", None)]
)
def test_nothing_that_is_printed_ends_a_program(out, err, tmp_path):
    with open(err or tmp_path / "err", "w") as errors, open("/dev/full", "w") as full:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdout=full if out == "/dev/full" else subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        if out == "closed":
            assert process.stdout is not None
            process.stdout.close()
        printed = process.communicate()[0] if out is None else None
    assert process.wait() == 7
    if out is None:
        assert printed == ("x" * 10_000 + "\n") * 3 + "y" * 10_000 + "\n"
    if err is None:
        told = (tmp_path / "err").read_text()
        warning = "WARNING: standard output cannot be written: [Errno 28] No space left on device; the run"
        assert told.count(warning) == (out == "/dev/full")
        assert told.endswith("and to stderr\n")


NEXT_FILE = """
import os, sys
from shardtrain.system.standard_streams import fill_closed
fill_closed()
print("lost")
sys.stderr.write(f"number {os.open(os.devnull, os.O_RDONLY)}")
"""


@pytest.mark.parametrize(
    ("words", "redirect", "code", "told"),
    [
        ("-m shardtrain --help", ">&- 2>&- <&-", 0, ""),
        ("-m shardtrain checkpoint ls .", ">&-", 2, "shardtrain checkpoint: . contains no checkpoints"),
        ("-m shardtrain --help", ">/dev/full", 1, "shardtrain --help: [Errno 28] No space left on device\n"),
        (f"-c '{NEXT_FILE}'", ">&- <&-", 0, "number 3"),
    ],
)
def test_streams_that_are_closed_or_full_end_no_command_with_a_traceback(
    words, redirect, code, told, tmp_path
):
    shell = ["sh", "-c", f'exec "$0" {words} {redirect}', sys.executable]
    done = subprocess.run(shell, cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(told)
    assert bool(done.stderr) == bool(told)
    assert "Traceback" not in done.stderr


def test_a_process_can_wait_until_its_message_is_read(tmp_path):
    """MPI_Abort ends the launcher before it has read the message."""
    aborted = tmp_path / "aborted"
    program = f"""
import sys
from shardtrain.system.standard_streams import wait_until_read
sys.stderr.write("what is wrong")
wait_until_read(600)
open({str(aborted)!r}, "w").close()
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        assert not aborted.exists()
        assert process.communicate()[1] == b"what is wrong"
    assert process.returncode == 0
    assert aborted.exists()


def test_the_wait_for_a_reader_has_an_end():
    program = (
        "from shardtrain.system import standard_streams as s; print('x', flush=True); s.wait_until_read(0.1)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.wait(60) == 0


def test_output_that_is_not_utf_8_gets_escapes():
    """A run prints lines of its own in it, and what its files and hooks print."""
    program = (
        "from shardtrain.trainer.console import RunConsole\n"
        "RunConsole(None, None).say('a \\u2713 \\u2500')\n"
        "print('b \\u2713')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"a \\u2713 \\u2500\nb \\u2713\n"
