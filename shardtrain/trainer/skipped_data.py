"""The data that a run in waves skipped after rollbacks, in `waves/` of its folder: a replay skips it too.

A rollback restores the state of a step, and continues with later data; the events of `wave_log.py` after that
step are dropped. So a replay needs only the step and the position where the data continues.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from shardtrain.data import Position
from shardtrain.report.sinks.json_lines import JsonLines, read_jsonl
from shardtrain.system.untrusted_files import whole_number
from shardtrain.train_step.state import State
from shardtrain.trainer.resume import MOST_INDEX, StartPoint
from shardtrain.trainer.wave_log import WAVES


def skips_file(folder: Path, island: int) -> Path:
    """Return the file of an island; it is there only after a rollback."""
    return folder / WAVES / f"skipped-{island}.jsonl"


class SkippedData:
    """Writes what rollbacks of this run skip, and reads what those of the repeated run have skipped.

    Args:
      folder: of the run.
      island: this island.
      replay: the folder of the run that is repeated; None: none is.
      report: receives a line when the file cannot be written.

    Raises:
      ValueError: a line in the file of the repeated run is no step with a position.

    >>> from tempfile import mkdtemp
    >>> first, folder = (Path(mkdtemp()) for _ in range(2))
    >>> skipped = SkippedData(first, 0, None, print)
    >>> skipped.begin(0); skipped.add(8, Position(epoch=0, index=96))
    >>> again = SkippedData(folder, 0, first, print)
    >>> again.next(4), again.next(9)
    ((8, {'epoch': 0, 'index': 96}), None)
    """

    def __init__(self, folder: Path, island: int, replay: Path | None, report: Callable[[str], None]) -> None:
        self._path, self._report = skips_file(folder, island), report
        self._repeated = [] if replay is None else _read(skips_file(replay, island))

    def begin(self, step: int) -> None:
        """Drop the lines of a step and later ones: the run resumes from its checkpoint."""
        if self._path.is_file():
            JsonLines(self._path, resume_after=step - 1 if step else None, report=self._report).close()

    def add(self, step: int, position: Position) -> None:
        """Write the position where the data continues after a step, in place of later lines."""
        lines = JsonLines(self._path, resume_after=step - 1 if step else None, report=self._report)
        lines.write(step, {"epoch": position["epoch"], "index": position["index"]})
        lines.close()

    def next(self, step: int) -> tuple[int, Position] | None:
        """Return the first (step, position) at a step or later; each is returned until it is dropped."""
        return next((each for each in self._repeated if each[0] >= step), None)

    def drop(self, step: int) -> None:
        """Drop what was repeated, up to a step."""
        self._repeated = [each for each in self._repeated if each[0] > step]

    def end(self) -> None:
        """Repeat nothing more: the run has left the order of the other one."""
        self._repeated = []


def _read(path: Path) -> list[tuple[int, Position]]:
    found = []
    for record in read_jsonl(path) if path.is_file() else []:
        epoch, index = (_number(record.get(name), f"{path}: {name}") for name in ("epoch", "index"))
        found.append((int(record["step"]), Position(epoch=epoch, index=index)))
    return found


def _number(value: float | None, name: str) -> int:
    # numbers of these files are read as floats
    if isinstance(value, float) and value.is_integer():
        return whole_number(int(value), name, MOST_INDEX)
    return whole_number(value, name, MOST_INDEX)


def train_as_repeated(
    train: Callable[[StartPoint, int], tuple[State, int]],
    start: StartPoint,
    last_step: int,
    skipped: SkippedData | None,
) -> tuple[State, int]:
    """Train to the last step; where the run that is repeated has skipped data, skip it too.

    Args:
      train: (start, step) -> (state, steps done): trains up to a step, or until it is stopped.
      start: where the run starts.
      last_step: of the run.
      skipped: None for a run without waves, which repeats nothing.
    """
    while skipped is not None and (found := skipped.next(start.step)) is not None:
        step, position = found
        if step >= last_step:
            break
        if step > start.step:
            state, done = train(start, step)
            if done < step:
                return state, done
            start = replace(start, state=state, step=done, unlogged=None)
        start = replace(start, position=position)
        skipped.drop(step)
        skipped.add(step, position)
    return train(start, last_step)
