"""Format simulated steps as a trace for Perfetto or chrome://tracing, a row for each device and link. No jax.

The format is the Trace Event Format of Chrome (JSON, complete events, microseconds).
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain.plan.simulator.task_graph import TaskGraph
from shardtrain.report.quantities import seconds_text
from shardtrain.system.untrusted_files import open_regular

HEAD = '{"traceEvents": ['


class TracedStep(NamedTuple):
    """A step to show.

    Args:
      name: above its rows.
      graph: its tasks.
    """

    name: str
    graph: TaskGraph


def trace_text(steps: Sequence[TracedStep]) -> str:
    """Format steps as the text of a trace file: one process for each step, one thread for each queue.

    Tasks that take no time are left out.
    """
    events = [event for number, step in enumerate(steps) for event in _events(number, step)]
    return f'{HEAD}{json.dumps(events)[1:]}, "displayTimeUnit": "ms"}}\n'


def format_traces(steps: Sequence[TracedStep]) -> str:
    """Format the seconds of simulated steps, a line for each."""
    return "".join(
        f"{step.name}: {seconds_text(step.graph.timeline.makespan)}, {len(step.graph.by_key)} tasks\n"
        for step in steps
    )


def is_trace(path: Path) -> bool:
    """Return whether a file is one that `trace_text` made."""
    with open_regular(path) as file:
        return file.read(len(HEAD)) == HEAD.encode()


def _events(process: int, step: TracedStep) -> Iterator[dict[str, Any]]:
    yield _name_events("process_name", step.name, process)
    queues: dict[str, int] = {}
    for task in step.graph:
        if task.queue not in queues:
            queues[task.queue] = len(queues)
            yield _name_events("thread_name", task.queue, process, queues[task.queue])
        if task.seconds:
            begin, end = 1e6 * step.graph.timeline.start[task.key], 1e6 * step.graph.timeline.end[task.key]
            yield {
                "ph": "X",
                "name": task.name,
                "cat": task.kind,
                "ts": begin,
                "dur": end - begin,
                "pid": process,
                "tid": queues[task.queue],
            }


def _name_events(what: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
