"""The metrics of a run that are the same when it is repeated."""

from pathlib import Path

from shardtrain.report.sinks.json_lines import read_jsonl


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics without what depends on the clock or on the machine's memory."""
    return [
        {k: v for k, v in line.items() if "second" not in k and k != "peak_memory_bytes"}
        for line in read_jsonl(folder / "metrics.jsonl")
    ]
