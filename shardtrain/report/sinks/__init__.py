"""Open the sinks to which a run writes its metrics. To add a sink: CONTRIBUTING, "A metric sink"."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from shardtrain.errors.messages import near, refuse
from shardtrain.report.sinks.json_lines import JsonLines, open_json_lines
from shardtrain.report.sinks.mlflow import open_mlflow
from shardtrain.report.sinks.sink import OpenSink, Sinks
from shardtrain.report.sinks.tensorboard import open_tensorboard
from shardtrain.report.sinks.wandb import open_wandb

SINKS: dict[str, OpenSink] = {
    "jsonl": open_json_lines,
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
}
"""Name -> function that opens the sink."""

DEFAULT_SINKS = ("jsonl", "tensorboard")
"""The sinks of a run that names none."""

EXTRAS = ("wandb", "mlflow")
"""Sinks that need a library of their name, which comes with the extra of that name."""


def sink_problems(sinks: Sequence[str | OpenSink]) -> list[str]:
    """Return the problems of a run's sinks, one line each."""
    problems = [
        f"sinks has {near(name, SINKS)}" for name in sinks if isinstance(name, str) and name not in SINKS
    ]
    if "jsonl" not in sinks:
        problems.append(
            "sinks lacks jsonl: from metrics.jsonl a resumed run knows which lines it has, and draws its"
            " loss; add it"
        )
    names = [name for name in sinks if isinstance(name, str)]
    if len(set(names)) < len(names):
        problems.append(f"sinks is {', '.join(names)}; name each once")
    return problems


def check_installed(sinks: Sequence[str | OpenSink]) -> None:
    """Check that the libraries of a run's sinks are installed, before anything is computed.

    Raises:
        ValueError: lists those that are not, each with the command that installs it.
    """
    missing = [
        f"{name} needs the library {name}: install it with uv sync --extra {name} in a clone,"
        f" elsewhere with pip install 'path/to/shardtrain[{name}]'; or leave {name} out of --sinks"
        for name in sinks
        if isinstance(name, str) and name in EXTRAS and find_spec(name) is None
    ]
    refuse("the sinks of this run cannot be opened", missing)


def open_sinks(
    folder: Path,
    resume_after: int | None,
    report: Callable[[str], None],
    sinks: Sequence[str | OpenSink] = DEFAULT_SINKS,
    *,
    is_shared: bool = False,
) -> tuple[Sinks, int | None]:
    """Open the sinks of a run.

    Args:
      folder: the folder of the run.
      resume_after: the restored step, after which metrics are dropped; None starts empty files.
      report: receives warnings.
      sinks: names of `SINKS`, jsonl among them, or functions like theirs.
      is_shared: whether other processes may take over `metrics.jsonl`, see `JsonLines`.

    Returns:
      The sinks, and the step of the last line in `metrics.jsonl`.

    Raises:
      ValueError: a tracking service cannot be reached at the first start.
    """
    opened = []
    with ExitStack() as stack:
        for each in sinks:
            open_sink = SINKS[each] if isinstance(each, str) else each
            if open_sink is open_json_lines:
                open_sink = partial(open_json_lines, is_shared=is_shared)
            if (sink := open_sink(folder, resume_after, report)) is not None:
                opened.append(sink)
                stack.callback(sink.close)
        # all are open: none is closed here
        stack.pop_all()
    last_step = next(sink.last_step for sink in opened if isinstance(sink, JsonLines))
    return Sinks(*opened), last_step
