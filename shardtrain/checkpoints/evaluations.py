"""Record metrics on held-out data for saved steps, and find the best step. No jax.

They have their own file, because a step is saved before it is evaluated. `retention.py` keeps the best step;
`policy.py` has the metric.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardtrain.checkpoints.paths import partial_path
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import check_whole_number, parse_json, read_text

EVALUATIONS = "evaluations.json"
"""The file in a folder of checkpoints."""

MOST_BYTES, MOST_STEP = 1 << 24, 1 << 62


class BestStep(NamedTuple):
    """The best of the saved steps.

    Args:
      step: the step.
      metric: the name of the metric.
      value: its value.
    """

    step: int
    metric: str
    value: float


class EvaluatedSteps(NamedTuple):
    """The held-out values of steps, and the metric that selects the best step.

    Args:
      metric: the name of the metric.
      best_is: "lowest" or "highest".
      values: step -> name of a metric -> value; values that are not finite are left out.

    >>> found = EvaluatedSteps("loss", "lowest", {10: {"loss": 2.0}, 20: {"loss": 1.0}, 30: {"loss": 1.0}})
    >>> found.best([10, 20, 30])
    BestStep(step=20, metric='loss', value=1.0)
    >>> print(found.best([40]))
    None
    """

    metric: str
    best_is: str
    values: Mapping[int, Mapping[str, float]]

    def best(self, steps: Iterable[int]) -> BestStep | None:
        """Return the best of some steps, or the first of equal ones; None if none was evaluated."""
        of_steps = {step: self.values.get(step, {}).get(self.metric) for step in sorted(steps)}
        known = {step: value for step, value in of_steps.items() if value is not None}
        if not known:
            return None
        choose = min if self.best_is == "lowest" else max
        step = choose(known, key=lambda step: known[step])
        return BestStep(step, self.metric, known[step])


def read_evaluations(folder: Path) -> EvaluatedSteps | None:
    """Read the file of a folder of checkpoints; None if there is none.

    Raises:
      OSError: the file cannot be read.
      ValueError: it does not have the form that is written; the message says how.
    """
    path = folder / EVALUATIONS
    if not path.exists():
        return None
    try:
        body = parse_json(read_text(path, MOST_BYTES), ours=True)
        metric, best_is, steps = body["metric"], body["best_is"], body["steps"]
        values = {
            check_whole_number(int(step), "step", MOST_STEP): {
                str(name): float(value) for name, value in of_step.items() if math.isfinite(float(value))
            }
            for step, of_step in steps.items()
        }
        if not isinstance(metric, str) or best_is not in ("lowest", "highest"):
            raise ValueError(f"metric is {short(metric)}, and best_is {short(best_is)}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); it must have metric, best_is (lowest or"
            " highest) and steps with their values. Delete it: then no step is the best until the run"
            " evaluates the next one"
        ) from error
    return EvaluatedSteps(metric, best_is, values)


def find_best_saved(folder: Path, steps: Iterable[int]) -> BestStep | None:
    """Return the best step in a folder of checkpoints; None if it is not known, or the file is damaged.

    Args:
      folder: the folder of the checkpoints.
      steps: the steps to choose from.
    """
    try:
        found = read_evaluations(folder)
    except (OSError, ValueError):
        return None
    return None if found is None else found.best(steps)


def find_best_step(folder: Path, steps: Iterable[int]) -> int:
    """Return the best of some steps in a folder of checkpoints.

    Raises:
        ValueError: it is not known, or the file is damaged.
    """
    found = read_evaluations(folder)
    best = None if found is None else found.best(steps)
    if best is None:
        raise ValueError(
            f"{folder} has no best step: a run records it with --checkpoints.best heldout/loss; give the"
            " number of a step"
        )
    return best.step


class Evaluations:
    """Records the held-out values of saved steps for one writer of checkpoints.

    Args:
      folder: the run's folder of checkpoints.
      policy: the policy; without its `best` metric nothing is recorded, read or written.
      report: receives a warning if the file cannot be read or written.
      writes: whether this process writes the file.
    """

    def __init__(
        self, folder: Path, policy: CheckpointPolicy, report: Callable[[str], None], *, writes: bool = True
    ) -> None:
        self._folder, self._policy, self._report, self._writes = folder, policy, report, writes
        self._writer, self._may_write = "", lambda: True
        # never changed in place: a thread that deletes old steps reads it
        self._steps = EvaluatedSteps(policy.best or "", policy.best_is, self._read())

    def _read(self) -> Mapping[int, Mapping[str, float]]:
        """Return the values of the file; {} if there is none, or, with a warning, if it is damaged."""
        try:
            found = None if self._policy.best is None else read_evaluations(self._folder)
        except (OSError, ValueError) as error:
            self._report(f"WARNING: the best checkpoint so far is not known: {error}")
            found = None
        return {} if found is None else found.values

    def set_writer(self, name: str, may_write: Callable[[], bool]) -> None:
        """Let other processes write the file, each of which calls `take_over` before; values are forgotten.

        Args:
          name: see `paths.partial_path`.
          may_write: asked before the file gets its name; values that may not be written are remembered.
        """
        self._writer, self._may_write = name, may_write
        self._steps = self._steps._replace(values={})

    def take_over(self) -> None:
        """Add the values that earlier writers have written, which can write no more, to those known here."""
        if self._policy.best is not None:
            self._write({**self._read(), **self._steps.values})

    def best(self, steps: Iterable[int]) -> int | None:
        """Return the best of some steps; None if none of them was evaluated."""
        found = self._steps.best(steps)
        return None if found is None else found.step

    def best_recorded(self) -> int | None:
        """Return the best of all recorded steps, or the first of equal ones; None if there is none."""
        return self.best(self._steps.values)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Return whether held-out values are better than all that are recorded."""
        value = values.get(self._policy.best or "")
        if value is None or not math.isfinite(value):
            return False
        best = self._steps.best(self._steps.values)
        if best is None:
            return True
        return value < best.value if self._policy.best_is == "lowest" else value > best.value

    def add(self, step: int, values: Mapping[str, float], saved: Iterable[int]) -> None:
        """Record the held-out values of a step.

        Args:
          step: the step.
          values: its held-out values by name.
          saved: all saved steps; values of deleted ones are forgotten.
        """
        if self._policy.best is None:
            return
        there = set(saved)
        newest = max(there, default=-1)
        kept = {each: of for each, of in self._steps.values.items() if each in there or each > newest}
        finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
        self._write({**kept, step: finite})

    def drop_after(self, step: int) -> None:
        """Forget later steps, because training continues after this one."""
        if any(later > step for later in self._steps.values):
            self._write({each: of for each, of in self._steps.values.items() if each <= step})

    def _write(self, values: Mapping[int, Mapping[str, float]]) -> None:
        self._steps = self._steps._replace(values=values)
        if not (self._writes and self._may_write()):
            return
        steps = {str(step): dict(of_step) for step, of_step in sorted(values.items())}
        body = {"metric": self._policy.best, "best_is": self._policy.best_is, "steps": steps}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._replace(self._folder / EVALUATIONS, (json.dumps(body, indent=1) + "\n").encode())
        except OSError as error:
            self._report(
                f"WARNING: {self._folder / EVALUATIONS} cannot be written: {error}. The run continues; after"
                " a restart another checkpoint may count as the best"
            )

    def _replace(self, path: Path, content: bytes) -> None:
        if not self._writer:
            replace_file(path, content)
            return
        partial = partial_path(path, self._writer)
        replace_file(partial, content)
        # what this process writes if it sleeps here is deleted by the one that takes over
        with suppress(FileNotFoundError):
            if self._may_write():
                partial.rename(path)
            else:
                partial.unlink()
