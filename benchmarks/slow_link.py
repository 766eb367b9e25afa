"""Ways to synchronise two islands over a slow link: held-out loss at equal samples and at equal time.

uv run python benchmarks/slow_link.py [--megabits 100] [--steps 100] [--every 20] [--folder runs/slow_link]

The islands are hosts that are network namespaces of this machine (tests/faults/network.py), joined by links
that traffic control limits; they train the model of examples/gpt_text.py on real text. Each way first takes
the same number of steps, then, with a learning rate that ends in time, as many as it can take while
every-step takes those. Runs that --folder has from before are not repeated. Needs Linux, and root or user
namespaces. With --overlap instead: steps with gradients in one program and in several, in turn, with the
options of bridge.py that follow it. Without a link: synchronisation.py. Figures: docs/benchmarks/bridge.md
and synchronisation.md.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

BASE = "every-step"

WAITS = "islands"
"""The kind of a run's seconds in which it waits for the other island."""

NOT_STEPS = ("save", "evaluation")
"""The kinds of a run's seconds that are no part of its steps."""

LATE = 2
"""A line of metrics is written so many steps late, with the bytes and seconds until then."""


class Figures(NamedTuple):
    """What one run took.

    Args:
      steps: number of steps.
      loss: held-out loss after the last step.
      step_seconds: mean seconds of a step, after the rounds in which programs are compiled.
      waiting: part of those in which island 0 waited for the other one.
      mean_bytes: mean of the bytes that island 0 gives to MPI in a step.
      peak_bytes: the same of the step with most, but for the last step, which may merge all that is left.
    """

    steps: int
    loss: float
    step_seconds: float
    waiting: float
    mean_bytes: float
    peak_bytes: float


class Row(NamedTuple):
    """A way to synchronise.

    Args:
      name: its name.
      equal_samples: the run with as many steps as every other.
      equal_time: the run with the steps that fit in the time of every-step's.
    """

    name: str
    equal_samples: Figures
    equal_time: Figures


def ways(every: int) -> dict[str, list[str]]:
    """Return name -> options of `shardtrain train`."""
    diloco = ["--local-steps", str(every), "--outer-rate", "0.7", "--outer-momentum", "0.5"]
    return {
        BASE: [],
        "int8+mean in every step": ["--combine", "int8+mean"],
        "diloco": ["--synchronisation", "diloco", *diloco],
        "diloco with overlap": ["--synchronisation", "diloco", *diloco, "--overlap", "2"],
        "streaming-diloco": ["--synchronisation", "streaming-diloco", *diloco],
    }


def figures(lines: Sequence[Mapping[str, Any]], first_step: int) -> Figures:
    """Return the figures of a run.

    Args:
      lines: its metrics, a line each step.
      first_step: the first of the steps whose seconds count.
    """
    timed = [line for line in lines if line["step"] >= first_step]
    seconds = {
        kind: sum(line[f"seconds/{kind}"] for line in timed)
        for kind in (name.removeprefix("seconds/") for name in lines[0] if name.startswith("seconds/"))
    }
    in_steps = sum(x for kind, x in seconds.items() if kind not in NOT_STEPS)
    sent = [line["bytes/islands"] for line in lines]
    last = lines[-1]["step"]
    return Figures(
        steps=last,
        loss=lines[-1]["heldout/loss"],
        step_seconds=in_steps / len(timed),
        waiting=seconds[WAITS] / in_steps,
        mean_bytes=sum(sent) / last,
        # the first line has the bytes of several steps, those of the last step are in one before the end
        peak_bytes=max(sent[1 : -LATE - 1]),
    )


def fitting_steps(seconds: float, step_seconds: float, every: int) -> int:
    """Return how many steps take so many seconds: whole rounds, and at least one.

    >>> fitting_steps(seconds=10, step_seconds=0.11, every=20)
    80
    """
    return max(int(seconds / step_seconds) // every, 1) * every


def measure(train: Callable[[str, int], Figures], names: Sequence[str], steps: int, every: int) -> list[Row]:
    """Return the rows of all ways.

    Args:
      train: (name, steps) -> figures of a run.
      names: the ways, every-step first.
      steps: of each at equal samples.
      every: steps between two merges.
    """
    rows: list[Row] = []
    for name in names:
        equal_samples = train(name, steps)
        base = rows[0].equal_samples if rows else equal_samples
        fitting = fitting_steps(steps * base.step_seconds, equal_samples.step_seconds, every)
        equal_time = equal_samples if not rows else train(name, fitting)
        rows.append(Row(name, equal_samples, equal_time))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Format the rows as a table beside the first."""
    base = rows[0].equal_samples
    whole = base.steps * base.step_seconds
    lines = [
        f"| synchronisation | bytes a step | ratio | bytes at most | ratio | s a step | waiting |"
        f" loss after {base.steps} steps | ratio | seconds | steps in {whole:.0f} s | loss | ratio |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name, samples, time in rows:
        lines.append(
            f"| {name} | {samples.mean_bytes:,.0f} | {samples.mean_bytes / base.mean_bytes:.4f} |"
            f" {samples.peak_bytes:,.0f} | {samples.peak_bytes / base.peak_bytes:.3f} |"
            f" {samples.step_seconds:.3f} | {samples.waiting:.0%} |"
            f" {samples.loss:.4f} | {samples.loss / base.loss:.4f} |"
            f" {samples.steps * samples.step_seconds:.0f} |"
            f" {time.steps} | {time.loss:.4f} | {time.loss / base.loss:.4f} |"
        )
    return "\n".join(lines)


def trained(hosts: Any, folder: Path, options: argparse.Namespace, name: str, steps: int) -> Figures:
    """Train on two hosts unless the folder has the run, and return its figures."""
    from shardtrain.report.sinks.json_lines import read_jsonl

    where = folder / f"{name.replace(' ', '_')}-{steps}"
    metrics = where / "run" / "metrics.jsonl"
    lines = read_jsonl(metrics) if metrics.is_file() else []
    if not lines or lines[-1]["step"] != steps or "heldout/loss" not in lines[-1]:
        where.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-m", "shardtrain", "launch", "--hosts", ",".join(hosts.names)]
        words += ["--logs", str(where / "logs"), "--", "train", str(ROOT / "examples" / "gpt_text.py")]
        words += ["--run-dir", str(where / "run"), *run_options(options, name, steps)]
        with (where / "output.txt").open("w") as output:
            subprocess.run(
                hosts.command(0, words),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(hosts),
                check=True,
            )
        lines = read_jsonl(metrics)
    found = figures(lines, first_step=2 * options.every + 1)
    sys.stderr.write(f"{name}: {found}\n")
    return found


def environment(hosts: Any) -> dict[str, str]:
    """Return the variables with which MPI starts on the hosts and sends over their links."""
    return {
        **os.environ,
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": str(hosts.remote),
        # the hosts share one machine's memory, which MPI must not use
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": "eth0",
    }


def overlap(hosts: Any, words: Sequence[str]) -> None:
    """Run benchmarks/bridge.py on both hosts, see there."""
    start = [str(Path(sys.executable).with_name("mpiexec")), "-hosts", ",".join(hosts.names), "-n", "2"]
    program = [sys.executable, str(ROOT / "benchmarks" / "bridge.py"), "--part", "overlap"]
    subprocess.run(hosts.command(0, [*start, *program, *words]), env=environment(hosts), check=True)


def run_options(options: argparse.Namespace, name: str, steps: int) -> list[str]:
    """Return the options of a run after its file and folder."""
    fixed = {
        "cpu-devices": 1,
        "batch": options.batch,
        "seed": options.seed,
        "steps": steps,
        "log-every": 1,
        "evaluate-every": "None",
        "evaluate-batches": options.evaluate_batches,
        "sinks": "jsonl",
    }
    words = [word for option, value in fixed.items() for word in (f"--{option}", str(value))]
    return [*words, *ways(options.every)[name]]


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--megabits", type=int, default=100, help="a second, to each host")
    parser.add_argument("--steps", type=int, default=100, help="at equal samples, a multiple of --every")
    parser.add_argument("--every", type=int, default=20, help="steps between two merges")
    parser.add_argument("--batch", type=int, default=4, help="rows of 128 bytes in a step, over both islands")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data")
    parser.add_argument("--evaluate-batches", type=int, default=64, help="held-out batches")
    parser.add_argument("--ways", help="names, separated by semicolons, beside every-step; default: all")
    parser.add_argument("--folder", type=Path, help="keeps the runs; default: a temporary folder")
    parser.add_argument("--overlap", nargs=argparse.REMAINDER, help="options of bridge.py; may be none")
    options = parser.parse_args(arguments)
    names = list(ways(options.every)) if options.ways is None else [BASE, *options.ways.split(";")]
    sys.path.insert(0, str(ROOT / "tests" / "faults"))
    from network import Hosts  # type: ignore[import-not-found]

    with TemporaryDirectory() as temporary, Hosts(2, Path(temporary)) as hosts:
        if hosts.forbidden:
            sys.stderr.write(
                "network namespaces cannot be made here, and the benchmark needs two for its hosts; run it as"
                f" root, or allow user namespaces: {hosts.forbidden}\n"
            )
            return 1
        for host in range(2):
            hosts.turn(host, "limit", options.megabits)
        if options.overlap is not None:
            overlap(hosts, options.overlap)
            return 0
        folder = (options.folder or Path(temporary) / "runs").absolute()
        rows = measure(
            lambda name, steps: trained(hosts, folder, options, name, steps),
            list(dict.fromkeys(names)),
            options.steps,
            options.every,
        )
    sys.stdout.write(table(rows) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
