"""What a run prints on a full disk, or to nobody: dropped, and told once on the other stream."""

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
        ("-m shardtrain", ">&-", 2, ""),
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
