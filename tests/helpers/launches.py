"""Start launches of tiny programs, which print nothing else."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def start_launch(folder, text, program, arguments, **options):
    """Start the program that a text launches; `arguments` are those of the text."""
    (folder / "program.py").write_text(program)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [sys.executable, "-c", text, *arguments]
    return subprocess.Popen(words, env=environ, cwd=folder, **{**pipes, **options})


def finish(process):
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def until(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
