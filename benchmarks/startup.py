"""How long the main job takes from the start of its process to the end of its first step, and on what.

Each start is a process of its own: cold without compiled programs, then warm with those of the start before.
Figures: docs/speed.md.

uv run python benchmarks/startup.py
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from shardtrain.report.tables import table_text

PARTS = ("imports", "data", "set-up", "initial state", "first step", "together")
COMPILED = "/jax/core/compile/backend_compile_duration"
FOUND = "STARTUP "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      starts: number of warm starts, of which the medians are shown.
      words: the command line after `train`.
    """

    starts: int = 5
    words: tuple[str, ...] = ("examples/gpt_text.py",)


def main(options: Options) -> None:
    with tempfile.TemporaryDirectory() as folder:
        programs = Path(folder, "programs")
        cold, _ = start(options.words, Path(folder, "cold"), programs)
        warm = [start(options.words, Path(folder, f"warm{i}"), programs)[0] for i in range(options.starts)]
    columns = {
        "cold": cold,
        "warm": {part: [median(each[part][i] for each in warm) for i in (0, 1)] for part in PARTS},
    }
    rows = [
        (part, *(f"{seconds:.2f}" for found in columns.values() for seconds in found[part])) for part in PARTS
    ]
    header = [f"{name}{what}" for name in columns for what in (" s", ", of it compiling or loading")]
    print(table_text(("until the end of the first step", *header), rows))


def start(
    words: Sequence[str], run_dir: Path, programs: Path
) -> tuple[dict[str, tuple[float, float]], int | None]:
    """Start a job and end it after its first step.

    Args:
      words: the command line after `train`.
      run_dir: its run folder.
      programs: the user's cache, with the programs that were compiled.

    Returns:
      Part -> (seconds, seconds of them that compile or load programs); the most bytes that were in use on the
      device, None where it does not count them.
    """
    command = [sys.executable, __file__, "child", *words, "--run-dir", str(run_dir)]
    environ = {**os.environ, "XDG_CACHE_HOME": str(programs)}
    began = time.time()
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    line = next((line for line in done.stdout.splitlines() if line.startswith(FOUND)), None)
    assert line is not None, done.stderr
    printed = json.loads(line.removeprefix(FOUND))
    marks = [("process", began, 0.0), *printed["marks"]]
    found = {
        name: (now - before, compiled - compiled_before)
        for (_, before, compiled_before), (name, now, compiled) in pairwise(marks)
    }
    return {**found, "together": (marks[-1][1] - began, marks[-1][2])}, printed["peak_bytes"]


def child(words: Sequence[str]) -> None:
    """Train until the end of the first step, and print when each part ended."""
    from shardtrain import cli
    from shardtrain.cli import train as command

    marks: list[tuple[str, float, float]] = []
    compiled = 0.0

    def mark(name: str) -> None:
        marks.append((name, time.time(), compiled))

    def after(module: Any, name: str, called: Callable[[Any], Any]) -> None:
        """Call something with what a function of a module returns."""
        whole = getattr(module, name)
        setattr(module, name, lambda *a, **o: called(whole(*a, **o)))

    def imported(parsed: Any) -> Any:
        import jax

        from shardtrain.trainer import prepared_run, train

        def add(event: str, duration_secs: float, **_: Any) -> None:
            nonlocal compiled
            compiled += duration_secs * (event == COMPILED)

        jax.monitoring.register_event_duration_secs_listener(add)
        mark("imports")
        after(prepared_run, "open_sources", lambda found: (mark("data"), found)[1])
        after(train, "PreparedRun", lambda found: (mark("set-up"), found)[1])
        after(train, "find_start_point", lambda found: (mark("initial state"), found)[1])

        def timed(session: Any) -> Any:
            def step(*arguments: Any) -> None:
                jax.block_until_ready(plain(*arguments))
                mark("first step")
                counted = jax.local_devices()[0].memory_stats() or {}
                printed = {"marks": marks, "peak_bytes": counted.get("peak_bytes_in_use")}
                print(FOUND + json.dumps(printed), flush=True)
                os._exit(0)

            plain, session.step = session.step, step
            return session

        after(train, "Session", timed)
        return parsed

    after(command, "parse_run", imported)
    sys.exit(cli.main(["train", *words]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(sys.argv[2:])
    else:
        main(tyro.cli(Options, description=__doc__))
