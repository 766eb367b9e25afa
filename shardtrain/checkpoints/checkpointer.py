"""The boundary to Orbax: save in the background, delete old checkpoints, restore the newest whole one.

When to save is in `policy.py`, what makes a checkpoint whole in `manifest.py`, which one a run
resumes from in `discover.py`, how it is read in `restore.py`.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from shardtrain.checkpoints import manifest as manifests
from shardtrain.checkpoints.discover import Discovered, Gather, discover
from shardtrain.checkpoints.fast_disk import check as check_fast
from shardtrain.checkpoints.fast_disk import claim, fast_folder
from shardtrain.checkpoints.flatten import check, describe, flatten, restorable
from shardtrain.checkpoints.manifest import WHOLE, ArrayOrigin, Leaf, Manifest, WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.processes import gather_alone, is_primary, on_any_process
from shardtrain.checkpoints.restore import Allow, restore_arrays
from shardtrain.checkpoints.retention import FAST_KEPT, Mirror, delete_old

_LOG = logging.getLogger(__name__)
_SAVE_TIMEOUT_SECONDS = 4 * 60 * 60
_MOST_CHUNK_BYTES = 1 << 23
_LARGE_ROW_BYTES = 1 << 20


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. Older checkpoints are untouched, and the run can continue.

    Args:
        text: what happened, and what to do.
        step: the step that is not saved.
    """

    def __init__(self, text: str, *, step: int) -> None:
        super().__init__(text)
        self.step = step


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


@dataclass(frozen=True)
class _Pending:
    step: int
    num_bytes: int
    notes: Future[list[str]]


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
        self.policy, self.part = policy, part
        self._report = report
        if policy.fast is not None and jax.process_count() > 1:
            raise ValueError(
                f"checkpoints go to {policy.fast} first, and {jax.process_count()} processes save together:"
                " none sees the disk of the others. Leave --checkpoints.fast out, or use one process each"
            )
        if policy.fast is not None and part.count > 1:
            raise ValueError(
                f"checkpoints go to {policy.fast} first, and {part.count} islands save a part each, whose"
                " copies would come to the run folder at different times. Leave --checkpoints.fast out"
            )
        # the runs of a host gather its fast disk; whatever a run's folder is called, it is one folder there
        self._resolved = self.folder.resolve()
        fast = policy.fast and fast_folder(Path(policy.fast).absolute(), self._resolved)
        if fast and os.path.lexists(fast):
            check_fast(fast, self._resolved)
        self._mirror = Mirror(fast, self.folder, policy, part) if fast else None
        self._fast, self._target = fast, fast or self.folder
        self._orbax = _orbax()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._deleting: Future[list[str]] | None = None
        self.save_id = ""
        """What the writers of a step agreed on, so that parts of two saves are never taken for one."""
        self._confirmed: int | None = None
        self._broken: set[int] = set()
        self._latest = max(self.steps(), default=None)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that may hold checkpoints, the fastest first."""
        return tuple(dict.fromkeys((self._fast or self.folder, self.folder)))

    def latest(self) -> int | None:
        """The newest step of which this part is finished (a running save is not), or None."""
        return self._latest

    def steps(self) -> list[int]:
        """The steps of all checkpoints of which this part is finished, broken ones too."""
        return sorted({step for folder in self.folders for step in self._with_manifest(folder)})

    def save(
        self, step: int, state: Any, extra: dict[str, Any], origins: Mapping[str, ArrayOrigin] | None = None
    ) -> None:
        """Start to save; the arrays may be donated or deleted as soon as this returns.

        Waits for the save before, if that is still running.

        Args:
            step: steps done, larger than that of every checkpoint so far.
            state: pytree of jax arrays, sharded in any way.
            extra: what JSON can hold: data position, seed, description of the run, metrics.
            origins: path -> which piece of the whole an array is; those that are not named are whole.

        Raises:
            SaveFailed: the save *before* this one failed, or this one cannot begin; it is not begun. A fast
                disk that fails is told, and given up: what follows goes straight to the run folder.
            ValueError: all that cannot be saved, or a step that is not new.
        """
        self.wait()
        arrays = flatten(state)
        check(manifests.extra_problems(extra), "these values cannot be saved", "Use JSON's types")
        self._check_new(step)
        leaves = describe(arrays, origins or {})
        num_bytes = sum(array.nbytes for array in arrays.values())
        try:
            try:
                self._begin(step, arrays)
            except Exception as error:
                if not self._is_on_fast:
                    raise
                self._leave_fast(error)
                self._begin(step, arrays)
        except Exception as error:
            raise self._failure(step, num_bytes, error) from error
        self._broken.discard(step)
        finish = self._background.submit(self._finish, step, leaves, deepcopy(extra))
        self._pending = _Pending(step, num_bytes, finish)

    def _begin(self, step: int, arrays: dict[str, jax.Array]) -> None:
        partial = manifests.partial_folder(self._target, step, self.part)
        try:
            if is_primary():
                if self._is_on_fast:
                    claim(self._target, self._resolved)
                # Larger than the newest whole step, so what lies in its place is not whole.
                for folder in self.folders:
                    manifests.delete(manifests.step_folder(folder, step, self.part))
                manifests.delete(partial)
                partial.mkdir(parents=True)
            cuts = {path: _cut(array) for path, array in arrays.items()}
            self._orbax.save(partial / manifests.ARRAYS, args=ocp.args.PyTreeSave(arrays, cuts))
        except Exception:
            if is_primary():
                shutil.rmtree(partial, ignore_errors=True)
            if jax.process_count() == 1:
                self._renew_orbax()
            raise

    def _renew_orbax(self) -> None:
        """After a failure: the old one would tell it again at the next save, and not begin that."""
        failed, self._orbax = self._orbax, _orbax()
        try:
            failed.close()
        except Exception as error:
            _LOG.debug("what failed before: %s", error)

    @property
    def _is_on_fast(self) -> bool:
        return self._target != self.folder

    def _leave_fast(self, error: Exception) -> None:
        """A fast disk that fails is worth nothing: the run folder may be as good as ever."""
        self._report(
            f"WARNING: the fast disk {self._target} cannot be written: {_first_line(error)}. From now on"
            f" saves go straight to {self.folder}"
        )
        self._target = self.folder

    def wait(self) -> None:
        """Wait until the running save is on the disk and is `latest`; return at once if none runs.

        Raises:
            SaveFailed: it failed. Raised once; what is saved next is not affected.
        """
        pending, failure = self._pending, self._collect()
        if on_any_process(failure is not None) and pending is not None:
            self._renew_orbax()
            raise failure or self._failure(
                pending.step, pending.num_bytes, RuntimeError("another process failed")
            )

    def confirm(self, step: int | None) -> None:
        """Delete what the policy does not keep: all parts of this step are finished.

        Where there is but one part, that is so as soon as it is finished, and nobody needs to call this.
        """
        if self.part.count == 1 or step in (None, self._confirmed) or not is_primary():
            return
        self._confirmed = step
        if self._deleting is not None and self._deleting.done():
            for note in self._deleting.result():
                self._report(note)
        self._deleting = self._background.submit(self._delete_old, step)

    def drop_after(self, step: int) -> None:
        """Delete this writer's part of all later steps, which were found to be bad."""
        for folder in self.folders if is_primary() else ():
            for later, parts in manifests.finished(folder).items():
                if later > step and self.part in parts:
                    manifests.delete(parts[self.part])

    def forget_after(self, step: int) -> None:
        """Resume from this step (-1: the start): later ones are replaced when the run reaches them."""
        steps = self.steps()
        self._broken.update(later for later in steps if later > step)
        self._latest = max((earlier for earlier in steps if earlier <= step), default=None)

    def discover(self, newest: int | None = None, gather: Gather | None = None) -> Discovered:
        """Find the newest whole checkpoint, each part of which is visible to some island.

        Before anything is loaded, every file's size and checksum are compared with the manifest (for the
        cost see `manifest.problems`): those of a part by one island that sees it. What is broken or
        unfinished is skipped and reported with its reason.

        Args:
            newest: take none after this step.
            gather: where several islands look together, all of them call this.

        Raises:
            ValueError: every checkpoint is broken.
        """
        found = discover(self.folders, newest, gather or gather_alone)
        for line in found.skipped:
            self._report(f"checkpoint skipped: {line}")
        self._broken.update(found.broken)
        self.forget_after(-1 if found.step is None else found.step)
        if self._mirror and self._fast and found.step is not None:
            on_fast, shared = map(self._with_manifest, (self._fast, self.folder))
            if found.step in on_fast and found.step not in shared:
                # the run before ended between a save and its copy
                self._mirror.copy(found.step)
        return found

    def restore(
        self,
        abstract_state: Any,
        newest: int | None = None,
        origins: Mapping[str, ArrayOrigin] | None = None,
        allow: Allow = Allow(),
    ) -> Restored | None:
        """Read the newest whole checkpoint, each array straight into the sharding asked for.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings, or of arrays like them; the mesh
                may differ from the one that saved.
            newest: take none after this step.
            origins: path -> which piece of the whole an array is; those that are not named are whole.
            allow: in what the checkpoint may differ; an array that is not read is None in the state.

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
            elif failure := self._collect():
                self._report(str(failure))
        finally:
            self._background.shutdown()
            self._orbax.close()
            if self._mirror:
                for note in self._mirror.close():
                    self._report(note)
        step = self._mirror.left_behind if self._mirror else None
        if error is None and step is not None and step == self._latest:
            raise SaveFailed(
                f"step {step} lies on the fast disk alone ({self._fast}). Free space in {self.folder}, and"
                " give the same command on this host: it copies it",
                step=step,
            )

    def _with_manifest(self, folder: Path) -> list[int]:
        found = manifests.finished(folder)
        return [
            step
            for step, parts in found.items()
            if self.part in parts and manifests.has_manifest(parts[self.part])
        ]

    def _check_new(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"step {step} cannot be saved: steps count from 0.")
        if self._latest is not None and step <= self._latest:
            raise ValueError(
                f"step {step} cannot be saved: {self.folder} holds step {self._latest} already. "
                f"Restore from it and go on from step {self._latest + 1}, or use another run folder."
            )

    def _finish(self, step: int, leaves: Mapping[str, Leaf], extra: dict[str, Any]) -> list[str]:
        """In the background: when Orbax has written all, add the manifest, give the name, delete old ones."""
        partial = manifests.partial_folder(self._target, step, self.part)
        try:
            self._orbax.wait_until_finished()
            if not is_primary():
                return []
            manifests.write_manifest(
                partial,
                Manifest(
                    step=step,
                    orbax_version=ocp.__version__,
                    files={},
                    leaves=leaves,
                    extra=extra,
                    part=self.part,
                    saved_seconds=time.time(),
                    save_id=self.save_id,
                ),
            )
            partial.rename(manifests.step_folder(self._target, step, self.part))
            manifests.sync(self._target)
        except BaseException:
            if is_primary():
                shutil.rmtree(partial, ignore_errors=True)
            raise
        notes = self._delete_old(step) if self.part.count == 1 else []
        return notes + (self._mirror.copy(step) if self._mirror and self._is_on_fast else [])

    def _delete_old(self, newest: int) -> list[str]:
        """Delete what the policy does not keep, and what is broken and older than this whole checkpoint."""
        if self._mirror and self._is_on_fast:
            fast = CheckpointPolicy(keep=FAST_KEPT)
            return delete_old(self._target, fast, self.part, newest, self._broken, self._mirror.busy)
        return delete_old(self._target, self.policy, self.part, newest, self._broken)

    def _collect(self) -> SaveFailed | None:
        """Wait for the running save; this process's failure, if any."""
        if self._pending is None:
            return None
        pending = self._pending
        try:
            notes = pending.notes.result()
        except Exception as error:
            self._pending = None
            failure = self._failure(pending.step, pending.num_bytes, error)
            failure.__cause__ = error
            if self._is_on_fast:
                self._leave_fast(error)
            return failure
        self._pending, self._latest = None, pending.step
        for note in notes:
            self._report(note)
        return None

    def _failure(self, step: int, num_bytes: int, error: Exception) -> SaveFailed:
        older = (
            "there is no older checkpoint" if self._latest is None else f"step {self._latest} is untouched"
        )
        existing = next(path for path in (self._target, *self._target.parents) if path.exists())
        return SaveFailed(
            f"step {step} is not saved in {self._target} ({older}): {_first_line(error)}. The state has "
            f"{num_bytes:,} bytes, the disk has {shutil.disk_usage(existing).free:,} free. "
            "Free space, make the folder writable, or use another.",
            step=step,
        )


def _orbax() -> ocp.AsyncCheckpointer:
    # Orbax's default gives up after 20 minutes, and a folder that it makes in the background
    # keeps its threads waiting for minutes where it cannot be made.
    options = ocp.options.AsyncOptions(
        timeout_secs=_SAVE_TIMEOUT_SECONDS, create_directories_asynchronously=False
    )
    # with zstd a restore takes twice the processor time, for 8 % of random float32 numbers
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    return ocp.AsyncCheckpointer(handler, async_options=options)


def _cut(array: jax.Array) -> ocp.SaveArgs:
    """Into chunks, of which a reader takes whole ones: small, so that other layouts read little in vain.

    Large rows, as stacked blocks have them, have chunks of their own: a stage reads its blocks.
    """
    shape = array.sharding.shard_shape(array.shape)
    has_large_rows = array.ndim > 1 and array.dtype.itemsize * math.prod(shape[1:]) >= _LARGE_ROW_BYTES
    return ocp.SaveArgs(chunk_byte_size=_MOST_CHUNK_BYTES, shard_axes=(0,) if has_large_rows else ())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
