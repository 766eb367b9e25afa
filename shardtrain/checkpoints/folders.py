"""Choose the folder of a save, on a fast disk or in the run folder, and list the folders of all steps.

`retention.py` copies from the fast disk and deletes old steps. Next: `save.py`.
"""

import os
from collections.abc import Callable
from pathlib import Path

import jax

from shardtrain.checkpoints import paths
from shardtrain.checkpoints.evaluations import Evaluations
from shardtrain.checkpoints.fast_disk import check, claim, name_fast_folder
from shardtrain.checkpoints.manifest_entries import WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.processes import is_primary
from shardtrain.checkpoints.retention import FAST_KEPT, Mirror, delete_old
from shardtrain.system.atomic_write import sync


class CheckpointFolders:
    """The folders of one writer's checkpoints.

    Args:
        shared: the run's folder of checkpoints, an absolute path.
        policy: the checkpoints to keep, and the fast disk.
        part: the part of each step that this writer saves.
        report: receives each line for the user.

    Attributes:
        target: the folder of the next save.
        evaluations: the held-out values of steps.
        broken: broken steps, which are deleted once an equal or newer step is complete.
        writer: name of this process, if others may take over and save the run; else "".

    Raises:
        ValueError: several processes or islands would save to a fast disk that they do not share; or the
            folder on the fast disk is not this run's own.
    """

    def __init__(
        self, shared: Path, policy: CheckpointPolicy, part: WriterPart, report: Callable[[str], None]
    ) -> None:
        self.shared, self.policy, self.part, self._report = shared, policy, part, report
        if policy.fast is not None:
            _check_alone(policy.fast, part)
        # many runs share a fast disk; the real path of a run's folder names its folder there
        self._resolved = shared.resolve()
        self.fast = policy.fast and name_fast_folder(Path(policy.fast).absolute(), self._resolved)
        if self.fast and os.path.lexists(self.fast):
            check(self.fast, self._resolved)
        self.evaluations = Evaluations(shared, policy, report, writes=is_primary())
        best = self.evaluations.best
        self._mirror = Mirror(self.fast, shared, policy, part, best) if self.fast else None
        self.target = self.fast or shared
        self.broken: set[int] = set()
        self.writer = ""

    @property
    def all(self) -> tuple[Path, ...]:
        """The folders that may hold checkpoints, the fastest first."""
        return tuple(dict.fromkeys((self.fast or self.shared, self.shared)))

    @property
    def is_on_fast(self) -> bool:
        """Whether the next save goes to the fast disk first."""
        return self.target != self.shared

    def find_folder(self, step: int) -> Path:
        """Return the folder of this part of a step, the fastest that has it."""
        found = [paths.step_folder(folder, step, self.part) for folder in self.all]
        return next((path for path in found if path.exists()), found[-1])

    def steps(self) -> list[int]:
        """Return the steps of which this part is finished in any folder, broken ones too, ascending."""
        return sorted({step for folder in self.all for step in self._steps_in(folder)})

    def steps_of_all(self) -> set[int]:
        """Return the steps of which any part is finished."""
        return {step for folder in self.all for step in paths.find_finished_steps(folder)}

    def _steps_in(self, folder: Path) -> list[int]:
        return [
            step
            for step, parts in paths.find_finished_steps(folder).items()
            if self.part in parts and paths.has_manifest(parts[self.part])
        ]

    def make_partial(self, step: int) -> Path:
        """Create the empty folder in which this part of a step is written, on the first process only.

        Args:
            step: newer than the newest complete step.

        Raises:
            ValueError: the folder on the fast disk is not this run's own.
            OSError: the folder cannot be made.
        """
        partial = self.partial(step)
        if is_primary():
            if self.is_on_fast:
                claim(self.target, self._resolved)
            # folders of a step newer than the newest complete one are incomplete
            for folder in self.all:
                paths.delete(paths.step_folder(folder, step, self.part))
            paths.delete(partial)
            partial.mkdir(parents=True)
        return partial

    def partial(self, step: int) -> Path:
        """Return the folder in which this part of a step is written."""
        return paths.partial_folder(self.target, step, self.part, self.writer)

    def finish(self, step: int) -> None:
        """Rename the partial folder of a step, complete with its manifest, to its final name.

        Raises:
            FileNotFoundError: another writer has taken over, see `paths.revoke_unfinished`.
        """
        self.partial(step).rename(paths.step_folder(self.target, step, self.part))
        sync(self.target)

    def leave_fast(self, error: Exception) -> None:
        """Save directly to the run folder from now on, after the fast disk failed."""
        self._report(
            f"WARNING: the fast disk {self.target} cannot be written: {first_line(error)}. From now on"
            f" saves go straight to {self.shared}"
        )
        self.target = self.shared

    def delete_old(self, newest: int) -> list[str]:
        """Delete checkpoints that the policy does not keep, and broken ones older than a complete one.

        Args:
            newest: a complete step.

        Returns:
            A message for each folder that could not be deleted.
        """
        best = self.evaluations.best
        if self._mirror and self.is_on_fast:
            fast = CheckpointPolicy(keep=FAST_KEPT)
            return delete_old(self.target, fast, self.part, newest, self.broken, self._mirror.busy, best)
        return delete_old(
            self.target, self.policy, self.part, newest, self.broken, best=best, writer=self.writer
        )

    def delete_after(self, step: int) -> None:
        """Delete this part of all later steps."""
        for folder in self.all if is_primary() else ():
            for later, parts in paths.find_finished_steps(folder).items():
                if later > step and self.part in parts:
                    paths.delete(parts[self.part])

    def copy(self, step: int) -> list[str]:
        """Start to copy a step to the run folder, if it was saved on the fast disk.

        Returns:
            Messages about earlier copies that failed.
        """
        return self._mirror.copy(step) if self._mirror and self.is_on_fast else []

    def copy_missing(self, step: int) -> None:
        """Start to copy a step that only the fast disk has, because the previous start ended too early."""
        if self._mirror is None or self.fast is None:
            return
        if step in self._steps_in(self.fast) and step not in self._steps_in(self.shared):
            self._mirror.copy(step)

    def close(self) -> int | None:
        """Wait for the copies; return the newest step that is only on the fast disk, or None."""
        if self._mirror is None:
            return None
        for note in self._mirror.close():
            self._report(note)
        return self._mirror.left_behind


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error.

    >>> first_line(OSError("disk full\\nmore"))
    'OSError: disk full'
    """
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _check_alone(fast: Path, part: WriterPart) -> None:
    """Refuse a fast disk if several processes or islands save, because none sees the others' disks."""
    if jax.process_count() > 1:
        raise ValueError(
            f"checkpoints go to {fast} first, and {jax.process_count()} processes save together: none sees"
            " the others' disks. Leave --checkpoints.fast out, or use one process each"
        )
    if part.count > 1:
        raise ValueError(
            f"checkpoints go to {fast} first, and {part.count} islands save a part each, whose"
            " copies would come to the run folder at different times. Leave --checkpoints.fast out"
        )
