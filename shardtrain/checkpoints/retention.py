"""Delete old checkpoints, and copy checkpoints from a fast disk to the run folder. No jax.

`policy.py` decides which to keep; `checkpointer.py` calls this.
"""

import shutil
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shardtrain.checkpoints import paths
from shardtrain.checkpoints.manifest_entries import WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy, select_steps_to_delete
from shardtrain.system.atomic_write import sync

FAST_KEPT = 2
"""Number of checkpoints kept on a fast disk."""


FindBest = Callable[[Sequence[int]], int | None]
"""Steps -> the best of them."""


def delete_old(
    folder: Path,
    policy: CheckpointPolicy,
    part: WriterPart,
    newest: int,
    broken: Collection[int] = (),
    in_use: Collection[int] = (),
    best: FindBest = lambda steps: None,
    writer: str = "",
) -> list[str]:
    """Delete checkpoints that the policy does not keep, and broken ones older than a complete one.

    Each writer deletes its own parts; the first also deletes parts of earlier starts with another number of
    writers.

    Args:
        folder: the folder of the checkpoints.
        policy: which steps to keep.
        part: the part of this writer.
        newest: a complete step; later ones are not deleted.
        broken: broken steps, which do not count as kept.
        in_use: steps not to delete now.
        best: steps -> the best of them, which is not deleted, or None if not known.
        writer: name of this process, if others may take over; their unfinished saves are left alone.

    Returns:
        A message for each folder that could not be deleted.
    """
    # 1. the policy selects the complete steps to keep
    found = {step: parts for step, parts in paths.find_finished_steps(folder).items() if step <= newest}
    whole = [step for step, parts in found.items() if step not in broken and _is_whole(parts, part)]
    keep = set(whole) - set(select_steps_to_delete(policy, whole)) | set(in_use) | {best(whole)}
    # 2. delete interrupted saves, what the policy does not keep, and parts of another number of writers
    old = [path for path in paths.partial_folders(folder, writer) if _is_left_behind(path, part, newest)]
    for step, parts in found.items():
        for other, path in parts.items():
            if other == part:
                is_old = step not in keep
            else:
                is_old = part.index == 0 and other.count != part.count and (part in parts or step not in keep)
            old += [path] * is_old
    # 3. a failed deletion is reported, and does not end the run
    notes = []
    for path in old:
        try:
            paths.delete(path)
        except OSError as error:
            notes.append(f"old checkpoint {path} could not be deleted: {error}")
    return notes


def _is_whole(parts: dict[WriterPart, Path], mine: WriterPart) -> bool:
    """Return whether this writer's part is finished, or all parts of another number of writers are."""
    finished = {part for part, path in parts.items() if paths.has_manifest(path)}
    others = {part.count for part in finished} - {mine.count}
    return mine in finished or any({WriterPart(i, n) for i in range(n)} <= finished for n in others)


def _is_left_behind(path: Path, mine: WriterPart, newest: int) -> bool:
    """Return whether a partial folder is left from an interrupted save or deletion."""
    step, part = paths.read_partial_name(path.name)
    if part.count == mine.count > 1:
        return part == mine and step <= newest
    return mine.index == 0 and (step <= newest or mine.count == 1)


class Mirror:
    """Copies finished checkpoints from a fast disk to the run folder in the background.

    Args:
        fast: the folder on the fast disk.
        shared: the run's folder of checkpoints.
        policy: which steps the run folder keeps.
        part: the part of this writer.
        best: steps -> the best of them, which the run folder keeps.
    """

    def __init__(
        self,
        fast: Path,
        shared: Path,
        policy: CheckpointPolicy,
        part: WriterPart,
        best: FindBest = lambda steps: None,
    ) -> None:
        self._fast, self._shared, self._policy, self._part = fast, shared, policy, part
        self._find_best = best
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy checkpoint")
        self._wanted: int | None = None
        self.busy: tuple[int, ...] = ()
        self._copying: Future[list[str]] | None = None
        self.left_behind: int | None = None
        """The newest step that could not be copied."""

    def copy(self, step: int) -> list[str]:
        """Start to copy a step after the current copy, instead of any step that still waits.

        Returns:
            Messages about earlier copies that failed.
        """
        notes = self._collect() if self._copying is not None and self._copying.done() else []
        self._wanted = step
        if self._copying is None:
            self._copying = self._thread.submit(self._copy_all)
        return notes

    def close(self) -> list[str]:
        """Wait for the newest copy; return messages about what failed."""
        notes = self._collect()
        if self._wanted is not None:
            notes += self._copy_all()
        self._thread.shutdown()
        return notes

    def _collect(self) -> list[str]:
        copying, self._copying = self._copying, None
        return [] if copying is None else copying.result()

    def _copy_all(self) -> list[str]:
        notes = []
        while (step := self._wanted) is not None:
            self._wanted, self.busy = None, (step,)
            try:
                self._copy(step)
                self.left_behind = None
                notes += delete_old(self._shared, self._policy, self._part, step, best=self._find_best)
            except (OSError, shutil.Error) as error:
                self.left_behind = step
                notes.append(
                    f"WARNING: step {step} is only on the fast disk ({self._fast}); it could not be"
                    f" copied to {self._shared}: {_first_reason(error)}"
                )
            self.busy = ()
        return notes

    def _copy(self, step: int) -> None:
        partial = paths.partial_folder(self._shared, step, self._part)
        goal = paths.step_folder(self._shared, step, self._part)
        paths.delete(partial)
        paths.delete(goal)
        try:
            shutil.copytree(paths.step_folder(self._fast, step, self._part), partial, symlinks=True)
            for path in (*partial.rglob("*"), partial):
                sync(path)
            partial.rename(goal)
        except (OSError, shutil.Error):
            # free the space of an incomplete copy
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync(self._shared)


def _first_reason(error: OSError) -> str:
    """Return the reason why the first file could not be copied."""
    return str(error.args[0][0][2]) if isinstance(error, shutil.Error) else str(error)
