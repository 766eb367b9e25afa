"""Save, discover and restore the checkpoints of a run.

`policy.py` decides when to save, `save.py` saves, `folders.py` chooses the folder; `discover.py` finds the
checkpoint from which a run resumes, `restore.py` reads it.
"""

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from shardtrain.checkpoints.differences import Allow
from shardtrain.checkpoints.discover import DiscoveredCheckpoint, Gather, discover
from shardtrain.checkpoints.flatten import describe, describe_restorable, find_extra_problems, flatten
from shardtrain.checkpoints.folders import CheckpointFolders
from shardtrain.checkpoints.manifest_entries import WHOLE, ArrayOrigin, WriterPart
from shardtrain.checkpoints.paths import revoke_unfinished
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.processes import gather_alone
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.checkpoints.save import SaveFailed, Saver
from shardtrain.errors.messages import refuse

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RestoredCheckpoint:
    """A restored checkpoint.

    Args:
        step: the step after which it was saved.
        state: the tree of jax arrays, with the wanted shardings.
        extra: the extra data, in which tuples are lists.
        skipped: broken newer checkpoints, and all unfinished ones, each with the reason.
    """

    step: int
    state: Any
    extra: dict[str, Any]
    skipped: tuple[str, ...]


class Checkpoints:
    """Save and restore the checkpoints of one run folder, to which one run at a time writes.

    If several processes form one JAX runtime, all of them make the same calls in the same order, and share
    the folder.

    Args:
        folder: folder of the checkpoints; made at the first save.
        policy: the checkpoints to keep.
        part: the part of each step that this writer saves; a step is finished when it has all parts.
        report: receives each line for the user, on the caller's thread.

    Raises:
        ValueError: several processes would save to a fast disk that they do not share; or the folder on the
            fast disk is not this run's own.

    Examples:
        >>> import tempfile, jax.numpy as jnp
        >>> state = {"w": jnp.arange(3.0)}
        >>> with tempfile.TemporaryDirectory() as run:
        ...     with Checkpoints(Path(run), CheckpointPolicy(keep=2)) as checkpoints:
        ...         checkpoints.save(10, state, {"seed": 1})
        ...         checkpoints.wait()
        ...         restored = checkpoints.restore(state)
        >>> restored.step, restored.extra, restored.state["w"].tolist()
        (10, {'seed': 1}, [0.0, 1.0, 2.0])
    """

    def __init__(
        self,
        folder: Path,
        policy: CheckpointPolicy,
        part: WriterPart = WHOLE,
        *,
        report: Callable[[str], None] = _LOG.warning,
    ) -> None:
        self.folder = Path(folder).absolute()
        self._report = report
        self._folders = CheckpointFolders(self.folder, policy, part, report)
        self._saver = Saver(self._folders, report)
        self.save_id = ""
        """An identifier that all writers of a step share, so that parts of two saves are not mixed."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that may hold checkpoints, the fastest first."""
        return self._folders.all

    def set_writer(self, name: str, may_finish: Callable[[], bool]) -> None:
        """Let other processes take over, each of which calls `revoke` before it saves.

        Args:
            name: name of this process, which no other one ever has.
            may_finish: asked, in the background, after a step is written and before it gets its name; if
                False, the save fails. Another process must take over only after this would return False.
                Without it held-out values are only remembered.
        """
        self._folders.writer, self._saver.may_finish = name, may_finish
        self._folders.evaluations.set_writer(name, may_finish)

    def revoke(self, select: Callable[[set[str]], set[str]]) -> None:
        """Take over from other processes, which can finish no save any more, with the values of their steps.

        Args:
            select: names of processes with unfinished saves -> those from whom this one takes over.
        """
        revoke_unfinished(self.folder, self._folders.writer, select)
        self._folders.evaluations.take_over()

    def latest(self) -> int | None:
        """Return the newest step of which this part is finished, or None; call `wait` to finish a save."""
        return self._saver.latest

    def newest_finished_step(self) -> int | None:
        """Return the newest step of which this part is on the disk, even before `wait`."""
        return self._saver.newest_finished_step()

    def find_folder(self, step: int) -> Path:
        """Return the folder of this part of a finished step, on the fast disk if it is there."""
        return self._folders.find_folder(step)

    def steps(self) -> list[int]:
        """Return the steps of which this part is finished, broken ones included."""
        return self._folders.steps()

    def save(
        self, step: int, state: Any, extra: dict[str, Any], origins: Mapping[str, ArrayOrigin] | None = None
    ) -> None:
        """Start to save, after the previous save; the arrays may be donated or deleted after this returns.

        Args:
            step: steps done, more than in every checkpoint so far.
            state: pytree of jax arrays with any sharding.
            extra: JSON values: data position, seed, description of the run, metrics.
            origins: path -> origin of an array in the whole model; other arrays are whole.

        Raises:
            SaveFailed: the *previous* save failed, or this one cannot begin; nothing is saved. If the fast
                disk fails, it is reported, and later saves go directly to the run folder.
            ValueError: lists the leaves that cannot be saved; or the step is not new.
        """
        self.wait()
        arrays = flatten(state)
        refuse("these values cannot be saved; use JSON's types", find_extra_problems(extra))
        self._check_new(step)
        self._saver.start(step, arrays, describe(arrays, origins or {}), deepcopy(extra), self.save_id)

    def wait(self) -> None:
        """Wait until the running save, if any, is on the disk and is `latest`.

        Raises:
            SaveFailed: it failed. Raised once; the next save is not affected.
        """
        self._saver.wait()

    def confirm(self, step: int | None) -> None:
        """Delete old steps that the policy does not keep, now that all parts of this step are finished.

        With a single part this happens automatically.
        """
        self._saver.confirm(step)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Return whether held-out values are better than those of every saved step, by `policy.best`."""
        return self._folders.evaluations.is_best(values)

    def best_evaluated(self) -> int | None:
        """Return the best of the saved steps and those evaluated since, by `policy.best`; None if unknown."""
        return self._folders.evaluations.best_recorded()

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record the held-out values of a step; the best saved step is kept."""
        self._folders.evaluations.add(step, values, self._folders.steps_of_all())

    def forget_evaluations(self) -> None:
        """Forget all held-out values, because the data has changed."""
        self._folders.evaluations.drop_after(-1)

    def drop_after(self, step: int) -> None:
        """Delete this writer's part of all later steps, which are bad."""
        self._folders.delete_after(step)

    def resume_after(self, step: int) -> None:
        """Resume from this step (-1: the start): later ones are replaced when the run reaches them."""
        steps = self.steps()
        self._folders.broken.update(later for later in steps if later > step)
        self._folders.evaluations.drop_after(step)
        self._saver.latest = max((earlier for earlier in steps if earlier <= step), default=None)

    def discover(self, newest: int | None = None, gather: Gather | None = None) -> DiscoveredCheckpoint:
        """Find the newest undamaged checkpoint whose parts are all visible to some island.

        First, one island that sees a part compares the size and checksum of its files with the manifest (for
        the cost see `manifest.problems`). Broken and unfinished checkpoints are skipped and reported.

        Args:
            newest: the last step that may be used; None means any.
            gather: all-gathers values of the islands, all of which call this.

        Raises:
            ValueError: every checkpoint is broken.
        """
        found = discover(self.folders, newest, gather or gather_alone)
        for line in found.skipped:
            self._report(f"checkpoint skipped: {line}")
        self._folders.broken.update(found.broken)
        self.resume_after(-1 if found.step is None else found.step)
        if found.step is not None:
            self._folders.copy_missing(found.step)
        return found

    def restore(
        self,
        abstract_state: Any,
        newest: int | None = None,
        origins: Mapping[str, ArrayOrigin] | None = None,
        allow: Allow = Allow(),
    ) -> RestoredCheckpoint | None:
        """Read the newest undamaged checkpoint, each array directly into its wanted sharding.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings, or of arrays; the mesh may differ
                from the saved one.
            newest: the last step that may be used; None means any.
            origins: path -> origin of an array in the whole model; other arrays are whole.
            allow: the allowed differences of the checkpoint; an array that is not read is None in the state.

        Returns:
            The checkpoint, or None if no step was ever saved completely.

        Raises:
            ValueError: every checkpoint is broken; or the newest complete one is of another model or
                optimizer (lists all arrays that differ).
            SaveFailed: the previous save failed.
        """
        self.wait()
        wanted = describe_restorable(abstract_state)
        chosen = self.discover(newest)
        if chosen.step is None:
            return None
        reader = chosen.reader(self.folders)
        arrays = restore_arrays(reader, wanted, origins or {}, allow)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays.get(path) for path in wanted])
        return RestoredCheckpoint(
            step=chosen.step, state=state, extra=reader.extra, skipped=tuple(chosen.skipped)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
            elif failure := self._saver.collect():
                # the error that ended the run is the one to raise
                self._report(str(failure))
        finally:
            self._saver.close()
            uncopied = self._folders.close()
        if error is None and uncopied is not None and uncopied == self.latest():
            raise SaveFailed(
                f"step {uncopied} is only on the fast disk ({self._folders.fast}). Free space in"
                f" {self.folder}, and give the same command on this host, which copies the step",
                step=uncopied,
            )

    def _check_new(self, step: int) -> None:
        latest = self.latest()
        if step < 0:
            raise ValueError(f"step {step} cannot be saved: steps count from 0.")
        if latest is not None and step <= latest:
            raise ValueError(
                f"step {step} cannot be saved: {self.folder} holds step {latest} already. "
                f"Restore from it and continue from step {latest + 1}, or use another run folder."
            )
