"""Find the checkpoint that a path names: a run's folder, its checkpoints, a step's folder, or PATH@STEP."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.checkpoints.evaluations import find_best_step
from shardtrain.checkpoints.paths import find_finished_steps, partial_folders, read_name
from shardtrain.checkpoints.reader import CheckpointReader, visible_readers
from shardtrain.system.excerpts import some

CHECKPOINTS, BEST = "checkpoints", "best"

MODEL = "model."
"""Prefix of the options of a model among the options of a run."""


def select_options(options: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the options whose names begin with a prefix, without the prefix.

    >>> select_options({"model.seq": 8, "data.seq": 4}, "model.")
    {'seq': 8}
    """
    return {name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)}


@dataclass(frozen=True, kw_only=True)
class CheckpointPath:
    """A folder of checkpoints, and the step to use.

    Args:
      folder: the folder of checkpoints.
      step: the step; None if the path names none.
    """

    folder: Path
    step: int | None

    def readers(self) -> list[CheckpointReader]:
        """Return readers of the step, or of all steps.

        Raises:
          ValueError: there is no such step.
        """
        found = visible_readers(self.folder)
        chosen = [each for each in found if self.step in (None, each.step)]
        if not chosen:
            steps = ", ".join(str(each.step) for each in found)
            have = f"there are {steps}" if found else "there is no finished one"
            raise ValueError(f"{self.folder} has no step {'' if self.step is None else self.step}: {have}")
        return chosen

    def reader(self) -> CheckpointReader:
        """Return a reader of the step, or of the newest step that has all of its parts.

        Raises:
          ValueError: there is no such step, or parts of it are missing.
        """
        found = self.readers()
        whole = [each for each in found if not each.missing]
        if not whole:
            lines = [
                f"step {each.step} lacks parts [{some(each.missing)}] of {each.num_parts}" for each in found
            ]
            raise ValueError(f"{self.folder}: {'; '.join(lines)}; bring their folders here")
        return whole[-1]


def find_checkpoint_path(where: str, step: int | None = None) -> CheckpointPath:
    """Find the folder of checkpoints, and the step, that a path names.

    Args:
      where: a path, or PATH@STEP; PATH@best is the best step, see `CheckpointPolicy.best`.
      step: the step, if the path does not name it.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: the folder contains no checkpoints, or two different steps are given.
    """
    path, named, is_best = _split(where)
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no folder {path}; give a run's folder, or its folder of checkpoints"
        )
    own, _ = read_name(path.name)
    if own >= 0 and not (path / CHECKPOINTS).is_dir():
        folder, named = path.parent, [*named, own]
    else:
        folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    if is_best:
        whole = [each.step for each in visible_readers(folder) if not each.missing]
        named.append(find_best_step(folder, whole))
    steps = {*named, *([] if step is None else [step])}
    if len(steps) > 1:
        raise ValueError(f"{where} is step {min(steps)} and step {max(steps)} at once; name one")
    if not find_finished_steps(folder) and not partial_folders(folder):
        raise ValueError(f"{path} contains no checkpoints; give a run's folder, or its folder of checkpoints")
    return CheckpointPath(folder=folder, step=next(iter(steps), None))


def _split(where: str) -> tuple[Path, list[int], bool]:
    """Return the path, the step that it names, and whether it names the best step.

    Raises:
      ValueError: the step is neither a number nor the best.
    """
    path, at, name = where.rpartition("@")
    if not at or Path(where).exists():
        return Path(where), [], False
    if name.isdecimal() or name == BEST:
        return Path(path), [int(name)] if name != BEST else [], name == BEST
    if Path(path).is_dir():
        raise ValueError(f"{where} has the step {name!r}; write {path}@NUMBER or {path}@{BEST}")
    return Path(where), [], False
