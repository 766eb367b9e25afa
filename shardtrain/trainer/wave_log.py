"""The events of an island's shard of the parameters, in `waves/` of the run folder: what a replay repeats."""

from collections.abc import Callable
from pathlib import Path

from shardtrain.islands.parameter_shard import Event, Kind
from shardtrain.report.sinks.json_lines import JsonLines, read_jsonl

WAVES = "waves"
"""Folder in that of a run; each island writes a file there."""

KINDS: tuple[Kind, ...] = ("push", "pull", "meeting")

MOST_ISLANDS = 1 << 20
"""A larger number in a file of events is no island."""


def wave_file(folder: Path, island: int) -> Path:
    """Return the file of the shard that an island serves."""
    return folder / WAVES / f"shard-{island}.jsonl"


class WaveLog:
    """Writes the events of a shard, one on a line, as in `{"step": 8, "push": 1.0}`.

    Args:
      folder: the folder of the run.
      island: the island that serves the shard.
      report: receives a line when the file cannot be written.
    """

    def __init__(self, folder: Path, island: int, report: Callable[[str], None]) -> None:
        self._path, self.report = wave_file(folder, island), report
        self._file: JsonLines | None = None

    def begin(self, step: int) -> None:
        """Drop the events after a step, from which the run goes on."""
        self.close()
        self._file = JsonLines(self._path, resume_after=step or None, report=self.report)

    def write(self, event: Event) -> None:
        """Append an event."""
        assert self._file is not None
        self._file.write(event.step, {event.kind: event.island})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_wave_log(folder: Path, island: int, num_workers: int) -> list[Event]:
    """Return the events of the shard that an island served in an earlier run.

    Raises:
      ValueError: the folder has no such file, or it has other lines, or those of more virtual workers.
    """
    path = wave_file(folder, island)
    if not path.is_file():
        raise ValueError(
            f"replay is {folder}, and {path} is not there; give the folder of a run in waves"
            " (--clock-distance) of as many islands as this one"
        )
    found = []
    for record in read_jsonl(path):
        kinds: list[Kind] = [each for each in KINDS if each in record]
        kind = (kinds or KINDS)[0]
        number = record.get(kind, -1.0)
        if not (0 <= number < MOST_ISLANDS and number.is_integer() and record["step"] > 0):
            raise ValueError(
                f"{path} has the line {record}, which is no event of a wave, such as"
                ' {"step": 8, "push": 1}; give the folder of a run as it wrote it'
            )
        found.append(Event(kind, int(number), int(record["step"])))
    if (most := max((event.island for event in found), default=0)) >= num_workers:
        raise ValueError(
            f"replay is {folder}, a run of {most + 1} virtual workers (islands, or pipelines of islands) or"
            f" more, and this one has {num_workers}; launch as many islands, in pipelines as long"
        )
    return found
