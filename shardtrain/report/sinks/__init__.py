"""Where a run writes its metrics. To add a sink: CONTRIBUTING, "A metric sink"."""

from collections.abc import Callable
from pathlib import Path

from shardtrain.report.sinks.json_lines import JsonLines, open_json_lines
from shardtrain.report.sinks.sink import OpenSink, Sinks
from shardtrain.report.sinks.tensorboard import open_tensorboard

SINKS: dict[str, OpenSink] = {
    "jsonl": open_json_lines,
    "tensorboard": open_tensorboard,
}
"""Name -> function that opens the sink; a run writes to all of them."""


def open_sinks(
    folder: Path, resume_after: int | None, report: Callable[[str], None]
) -> tuple[Sinks, int | None]:
    """Open all sinks of a run.

    Args:
      folder: the folder of the run.
      resume_after: the restored step; later metrics are dropped. None starts empty files.
      report: receives warnings.

    Returns:
      The sinks, and the step of the last line in `metrics.jsonl`.
    """
    opened = [sink for open_sink in SINKS.values() if (sink := open_sink(folder, resume_after, report))]
    last_step = next(sink.last_step for sink in opened if isinstance(sink, JsonLines))
    return Sinks(*opened), last_step
