"""Save, discover and restore the checkpoints of a run: the object that a run holds.

When to save is in `policy.py`, how in `save.py`, where in `folders.py`; which checkpoint a run resumes from
in `discover.py`, how it is read in `restore.py`.
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
from shardtrain.checkpoints.discover import Discovered, Gather, discover
from shardtrain.checkpoints.flatten import check, describe, extra_problems, flatten, restorable
from shardtrain.checkpoints.folders import CheckpointFolders
from shardtrain.checkpoints.manifest_entries import WHOLE, ArrayOrigin, WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.processes import gather_alone
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.checkpoints.save import SaveFailed, Saver

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state that a run resumes from.

    Args:
        step: the step it was saved after.
        state: the tree that was asked for, of jax arrays with the shardings that were asked for.
        extra: what was saved beside the state (tuples come back as lists).
        skipped: newer checkpoints that are broken, and all that are unfinished, each with the reason.
    """

    step: int
    state: Any
    extra: dict[str, Any]
    skipped: tuple[str, ...]


class Checkpoints:
    """Save and restore the checkpoints of one run folder, to which one run at a time writes.

    Where several processes form one JAX runtime, all of them make the same calls in the same order, and the
    folder is one that all of them see.

    Args:
        folder: folder of the checkpoints; made at the first save.
        policy: what to keep.
        part: which part of each step this writer saves; a step is finished when it has all of them.
        report: called on the caller's thread with each line that people must see.

    Raises:
        ValueError: several processes would save to a fast disk that each has for itself; or the folder there
            is not this run's own.

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
        """The same on all writers of a step, so that parts of two saves are never taken for one."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that may hold checkpoints, the fastest first."""
        return self._folders.all

    def latest(self) -> int | None:
        """Return the newest step of which this part is finished (a running save is not), or None."""
        return self._saver.latest

    def newest_finished_step(self) -> int | None:
        """Return the newest step of which this part is finished, also one that `wait` did not wait for."""
        return self._saver.newest_finished_step()

    def find_folder(self, step: int) -> Path:
        """Return the folder of this part of a finished step, on the fast disk if it is there."""
        return self._folders.find_folder(step)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints of which this part is finished, broken ones too."""
        return self._folders.steps()

    def save(
        self, step: int, state: Any, extra: dict[str, Any], origins: Mapping[str, ArrayOrigin] | None = None
    ) -> None:
        """Start to save; the arrays may be donated or deleted as soon as this returns.

        Waits for the save before, if that is still running.

        Args:
            step: steps done, larger than that of every checkpoint so far.
            state: pytree of jax arrays, sharded in any way.
            extra: what JSON can hold: data position, seed, description of the run, metrics.
            origins: path -> part of the whole model's array that an array is; those that are not named are
                whole.

        Raises:
            SaveFailed: the save *before* this one failed, or this one cannot begin; it is not begun. A fast
                disk that fails is reported, and given up: later saves go straight to the run folder.
            ValueError: all that cannot be saved, or a step that is not new.
        """
        self.wait()
        arrays = flatten(state)
        check(extra_problems(extra), "these values cannot be saved", "Use JSON's types")
        self._check_new(step)
        self._saver.start(step, arrays, describe(arrays, origins or {}), deepcopy(extra), self.save_id)

    def wait(self) -> None:
        """Wait until the running save is on the disk and is `latest`; return at once if none runs.

        Raises:
            SaveFailed: it failed. Raised once; what is saved next is not affected.
        """
        self._saver.wait()

    def confirm(self, step: int | None) -> None:
        """Delete old steps that the policy does not keep, as all parts of this one are finished.

        If there is one part, this happens by itself once the part is finished.
        """
        self._saver.confirm(step)

    def is_best(self, values: Mapping[str, float]) -> bool:
        """Return whether held-out values are better than those of every saved step, by `policy.best`."""
        return self._folders.evaluations.is_best(values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record the held-out values of a step that is saved, or being saved; the best step is kept."""
        self._folders.evaluations.add(step, values, self._folders.steps_of_all())

    def forget_evaluations(self) -> None:
        """Forget all held-out values: those to come are of other data."""
        self._folders.evaluations.drop_after(-1)

    def drop_after(self, step: int) -> None:
        """Delete this writer's part of all later steps, which turned out to be bad."""
        self._folders.delete_after(step)

    def resume_after(self, step: int) -> None:
        """Resume from this step (-1: the start): later ones are replaced when the run reaches them."""
        steps = self.steps()
        self._folders.broken.update(later for later in steps if later > step)
        self._folders.evaluations.drop_after(step)
        self._saver.latest = max((earlier for earlier in steps if earlier <= step), default=None)

    def discover(self, newest: int | None = None, gather: Gather | None = None) -> Discovered:
        """Find the newest undamaged checkpoint, each part of which is visible to some island.

        Before anything is loaded, every file's size and checksum are compared with the manifest (for the
        cost see `manifest.problems`): those of a part by one island that sees it. What is broken or
        unfinished is skipped and reported with its reason.

        Args:
            newest: take none after this step.
            gather: all-gathers values of the islands; with several islands all of them call this.

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
    ) -> Restored | None:
        """Read the newest undamaged checkpoint, each array directly into its wanted sharding.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings, or of arrays like them; the mesh
                may differ from the one that saved.
            newest: take none after this step.
            origins: path -> which piece of the whole an array is; those that are not named are whole.
            allow: the allowed differences of the checkpoint; an array that is not read is None in the state.

        Returns:
            None where nothing was ever saved completely.

        Raises:
            ValueError: every checkpoint is broken; or the newest whole one is that of another model or
                optimizer (all arrays that differ are listed).
            SaveFailed: the save before failed.
        """
        self.wait()
        wanted = restorable(abstract_state)
        chosen = self.discover(newest)
        if chosen.step is None:
            return None
        reader = chosen.reader(self.folders)
        arrays = restore_arrays(reader, wanted, origins or {}, allow)
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays.get(path) for path in wanted])
        return Restored(step=chosen.step, state=state, extra=reader.extra, skipped=tuple(chosen.skipped))

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
                f"step {uncopied} is on the fast disk alone ({self._folders.fast}). Free space in"
                f" {self.folder}, and give the same command on this host: it copies it",
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
