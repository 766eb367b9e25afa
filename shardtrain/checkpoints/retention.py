"""Delete old checkpoints, and copy those of a fast disk to the run folder. No jax.

What a policy keeps is in `policy.py`; who calls this is `checkpointer.py`.
"""

import shutil
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from shardtrain.checkpoints import paths
from shardtrain.checkpoints.manifest_entries import WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy, steps_to_delete

FAST_KEPT = 2
"""How many checkpoints stay on a fast disk."""


def delete_old(
    folder: Path,
    policy: CheckpointPolicy,
    part: WriterPart,
    newest: int,
    broken: Collection[int] = (),
    in_use: Collection[int] = (),
) -> list[str]:
    """Delete what the policy does not keep, and what is broken and older than a whole checkpoint.

    Each writer deletes its own parts; the first also what another number of writers left.

    Args:
        folder: of checkpoints.
        policy: what to keep.
        part: whose.
        newest: a step that is whole; later ones stay.
        broken: steps that count for nothing.
        in_use: steps that stay for now.

    Returns:
        What could not be deleted, in sentences.
    """
    # 1. the policy counts whole steps only, and decides which of them stay
    found = {step: parts for step, parts in paths.finished(folder).items() if step <= newest}
    whole = [step for step, parts in found.items() if step not in broken and _is_whole(parts, part)]
    keep = set(whole) - set(steps_to_delete(policy, whole)) | set(in_use)
    # 2. delete interrupted saves, what the policy does not keep, and parts of another number of writers
    old = [path for path in paths.partial_folders(folder) if _is_left_behind(path, part, newest)]
    for step, parts in found.items():
        for other, path in parts.items():
            if other == part:
                is_old = step not in keep
            else:
                is_old = part.index == 0 and other.count != part.count and (part in parts or step not in keep)
            old += [path] * is_old
    # 3. what cannot be deleted is reported; it is no reason to end the run
    notes = []
    for path in old:
        try:
            paths.delete(path)
        except OSError as error:
            notes.append(f"old checkpoint {path} could not be deleted: {error}")
    return notes


def _is_whole(parts: dict[WriterPart, Path], mine: WriterPart) -> bool:
    """My own part is there; or all parts of another number of writers are."""
    finished = {part for part, path in parts.items() if paths.has_manifest(path)}
    others = {part.count for part in finished} - {mine.count}
    return mine in finished or any({WriterPart(i, n) for i in range(n)} <= finished for n in others)


def _is_left_behind(path: Path, mine: WriterPart, newest: int) -> bool:
    """A save or deletion was interrupted here; no writer is at it now."""
    step, part = paths.read_name(path.name.removesuffix(paths.PARTIAL))
    if part.count == mine.count > 1:
        return part == mine and step <= newest
    return mine.index == 0 and (step <= newest or mine.count == 1)


class Mirror:
    """Copies finished checkpoints from a fast disk to the run folder, in the background, the newest first.

    Args:
        fast: the folder on the fast disk.
        shared: the run's.
        policy: what the run folder keeps.
        part: of the writer.
    """

    def __init__(self, fast: Path, shared: Path, policy: CheckpointPolicy, part: WriterPart) -> None:
        self._fast, self._shared, self._policy, self._part = fast, shared, policy, part
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy checkpoint")
        self._wanted: int | None = None
        self.busy: tuple[int, ...] = ()
        self._copying: Future[list[str]] | None = None
        self.left_behind: int | None = None
        """The newest step that could not be copied."""

    def copy(self, step: int) -> list[str]:
        """Begin to copy a step once the copy under way is done; one that waits is left out for it.

        Returns:
            What went wrong with copies before, in sentences.
        """
        notes = self._collect() if self._copying is not None and self._copying.done() else []
        self._wanted = step
        if self._copying is None:
            self._copying = self._thread.submit(self._copy_all)
        return notes

    def close(self) -> list[str]:
        """Wait for the newest copy; what went wrong, in sentences."""
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
                notes += delete_old(self._shared, self._policy, self._part, step)
            except (OSError, shutil.Error) as error:
                self.left_behind = step
                notes.append(
                    f"WARNING: step {step} is on the fast disk alone ({self._fast}); it could not be"
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
                paths.sync(path)
            partial.rename(goal)
        except (OSError, shutil.Error):
            # half a copy would keep a full disk full
            shutil.rmtree(partial, ignore_errors=True)
            raise
        paths.sync(self._shared)


def _first_reason(error: OSError) -> str:
    """Of many files that could not be copied, what is wrong with the first."""
    return str(error.args[0][0][2]) if isinstance(error, shutil.Error) else str(error)
