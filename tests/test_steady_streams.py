"""What a run prints on a full disk, or to nobody: dropped, and told once on the other stream."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from shardtrain.steady_streams import steady_output
with steady_output():
    for number in range(3):
        print("x" * 10_000, flush=number == 1)
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
        assert printed == ("x" * 10_000 + "\n") * 3
    if err is None:
        told = (tmp_path / "err").read_text()
        warning = "WARNING: standard output cannot be written: [Errno 28] No space left on device; the run"
        assert told.count(warning) == (out == "/dev/full")
        assert told.endswith("and to stderr\n")
