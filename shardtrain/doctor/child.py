"""Run a Python program that might crash or hang in a child process, and read its facts as JSON lines."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

from shardtrain.doctor.check import Facts
from shardtrain.islands.launcher_variables import outside_launch


def run_child(
    program: str, environ: Mapping[str, str], timeout_seconds: float, arguments: Sequence[str] = ()
) -> Facts:
    """Run a program that prints a JSON object per line, and return the merged objects.

    Args:
      program: Python source code.
      environ: environment of the parent; the child gets it without the variables of a launcher.
      timeout_seconds: seconds until the child and its own children are killed.
      arguments: arguments of the program.

    Returns:
      The facts that it printed, and `died`: None if it succeeded, else how it ended, as text.

    >>> run_child("print('{\\"a\\": 1}'); raise SystemExit('no b')", {}, 30.0)
    {'a': 1, 'died': 'no b'}
    """
    own = outside_launch(environ, keep_settings=False)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", program, *arguments]
    child = subprocess.Popen(command, env=own, start_new_session=True, **pipes)
    try:
        out, err = child.communicate(timeout=timeout_seconds)
        died = None if child.returncode == 0 else _failure_text(child.returncode, err)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        died = f"it did not end within {timeout_seconds:.0f} s"
    facts: Facts = {}
    for line in out.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    return facts | {"died": died}


def _failure_text(code: int, err: str) -> str:
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    # jax ends its own errors with a hint about filtered frames
    lines = [line for line in lines if not line.startswith(("For simplicity", "----"))]
    return lines[-1][:300] if lines else f"it ended with code {code}"
