"""Save one part of a step in the background; the boundary to Orbax.

Orbax writes the arrays; then the manifest is written and the folder gets its final name. `folders.py` chooses
the folder. Next: `checkpointer.py`.
"""

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import orbax.checkpoint as ocp

from shardtrain.checkpoints import manifest as manifests
from shardtrain.checkpoints import paths
from shardtrain.checkpoints.folders import CheckpointFolders, first_line
from shardtrain.checkpoints.manifest_entries import Leaf, Manifest
from shardtrain.checkpoints.processes import is_primary, is_set_on_any_process
from shardtrain.system.atomic_write import is_full, write_advice

_LOG = logging.getLogger(__name__)
_SAVE_TIMEOUT_SECONDS = 4 * 60 * 60
_MOST_CHUNK_BYTES = 1 << 23
_LARGE_ROW_BYTES = 1 << 20
_LEAST_SLICE_BYTES = 1 << 20


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. Older checkpoints are untouched, and the run can continue.

    Args:
        text: the cause, and what to change.
        step: the step that is not saved.
    """

    def __init__(self, text: str, *, step: int) -> None:
        super().__init__(text)
        self.step = step


@dataclass(frozen=True)
class _PendingSave:
    """The running save.

    Args:
        step: the step.
        num_bytes: the size in bytes of its arrays.
        notes: lines for the user at its end.
    """

    step: int
    num_bytes: int
    notes: Future[list[str]]


class Saver:
    """Saves one part of a step at a time, in the background, and deletes old steps after it.

    Args:
        folders: the folders of the checkpoints.
        report: receives each line for the user, on the caller's thread.

    Attributes:
        latest: the newest step of which this part is finished; None before the first.
        may_finish: asked before a step gets its name, in the background; if False, the save fails.
    """

    def __init__(self, folders: CheckpointFolders, report: Callable[[str], None]) -> None:
        self._folders, self._report = folders, report
        self.latest = max(folders.steps(), default=None)
        self._orbax = _orbax()
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _PendingSave | None = None
        self._confirmed: int | None = None
        self.may_finish: Callable[[], bool] = lambda: True
        self._deleting: Future[list[str]] | None = None

    def start(
        self,
        step: int,
        arrays: dict[str, jax.Array],
        leaves: Mapping[str, Leaf],
        extra: dict[str, Any],
        save_id: str,
    ) -> None:
        """Start to save; the arrays may be donated or deleted as soon as this returns.

        Args:
            step: steps done; no save is running.
            arrays: path -> array.
            leaves: path -> entry of the manifest.
            extra: the extra data; not changed afterwards.
            save_id: the identifier that all parts of this save share.

        Raises:
            SaveFailed: it cannot begin, even in the run folder after the fast disk failed.
        """
        num_bytes = sum(array.nbytes for array in arrays.values())
        try:
            try:
                # after the fast disk failed, use the run folder
                self._start_arrays(step, arrays)
            except Exception as error:
                if not self._folders.is_on_fast:
                    raise
                self._folders.leave_fast(error)
                self._start_arrays(step, arrays)
        except Exception as error:
            raise self._failure(step, num_bytes, error) from error
        self._folders.broken.discard(step)
        manifest = Manifest(
            step=step,
            orbax_version=ocp.__version__,
            files={},
            leaves=leaves,
            extra=extra,
            part=self._folders.part,
            save_id=save_id,
        )
        # the manifest is written last, in the background: a folder without one is not a checkpoint
        self._pending = _PendingSave(step, num_bytes, self._background.submit(self._finish, step, manifest))

    def _start_arrays(self, step: int, arrays: dict[str, jax.Array]) -> None:
        """Copy the arrays to the host, and let Orbax write them in its own threads."""
        try:
            partial = self._folders.make_partial(step)
            chunks = {path: _chunks(array) for path, array in arrays.items()}
            self._orbax.save(partial / paths.ARRAYS, args=ocp.args.PyTreeSave(arrays, chunks))
        except Exception:
            self._delete_partial(step)
            # several processes renew Orbax together, in `wait`
            if jax.process_count() == 1:
                self._renew_orbax()
            raise

    def _finish(self, step: int, manifest: Manifest) -> list[str]:
        """Complete a save, in the background; return the lines for the user."""
        folders = self._folders
        try:
            self._orbax.wait_until_finished()
            if not is_primary():
                return []
            manifests.write_manifest(folders.partial(step), replace(manifest, saved_seconds=time.time()))
            if not self.may_finish():
                raise RuntimeError("this process may not save any more: others train the run without it")
            folders.finish(step)
        except BaseException:
            self._delete_partial(step)
            raise
        # if other writers save parts of the step, `confirm` tells when it is complete
        notes = folders.delete_old(step) if folders.part.count == 1 else []
        return notes + folders.copy(step)

    def _delete_partial(self, step: int) -> None:
        if is_primary():
            shutil.rmtree(self._folders.partial(step), ignore_errors=True)

    def _renew_orbax(self) -> None:
        """Replace the checkpointer after a failure, which it would raise again at the next save."""
        failed, self._orbax = self._orbax, _orbax()
        try:
            failed.close()
        except Exception as error:
            _LOG.debug("Orbax failed before: %s", error)

    def wait(self) -> None:
        """Wait until the running save, if any, is on the disk and is `latest`.

        Raises:
            SaveFailed: it failed, on this process or another. Raised once; the next save is not affected.
        """
        pending, failure = self._pending, self.collect()
        if is_set_on_any_process(failure is not None) and pending is not None:
            self._renew_orbax()
            other = RuntimeError("another process failed")
            raise failure or self._failure(pending.step, pending.num_bytes, other)

    def newest_finished_step(self) -> int | None:
        """Return the newest step that is on the disk, without waiting for the running save."""
        pending = self._pending
        if pending is not None and pending.notes.done() and pending.notes.exception() is None:
            return pending.step
        return self.latest

    def collect(self) -> SaveFailed | None:
        """Wait for the running save; return this process's failure, if any."""
        if self._pending is None:
            return None
        pending = self._pending
        try:
            notes = pending.notes.result()
        except Exception as error:
            self._pending = None
            failure = self._failure(pending.step, pending.num_bytes, error)
            failure.__cause__ = error
            if self._folders.is_on_fast:
                self._folders.leave_fast(error)
            return failure
        self._pending, self.latest = None, pending.step
        for note in notes:
            self._report(note)
        return None

    def confirm(self, step: int | None) -> None:
        """Delete old steps, in the background, once all parts of this one are finished.

        Args:
            step: the newest complete step, or None.
        """
        if self._folders.part.count == 1 or step in (None, self._confirmed) or not is_primary():
            return
        self._confirmed = step
        if self._deleting is not None and self._deleting.done():
            for note in self._deleting.result():
                self._report(note)
        self._deleting = self._background.submit(self._folders.delete_old, step)

    def close(self) -> None:
        """Wait for the background thread, and close Orbax."""
        self._background.shutdown()
        self._orbax.close()

    def _failure(self, step: int, num_bytes: int, error: Exception) -> SaveFailed:
        older = "there is no older checkpoint" if self.latest is None else f"step {self.latest} is untouched"
        target = self._folders.target
        existing = next(path for path in (target, *target.parents) if path.exists())
        sizes = f"The state has {num_bytes:,} bytes, the disk has {shutil.disk_usage(existing).free:,} free. "
        return SaveFailed(
            f"step {step} is not saved in {target} ({older}): {first_line(error)}."
            f" {sizes if is_full(error) else ''}{write_advice(error).capitalize()}, or use another folder.",
            step=step,
        )


def _orbax() -> ocp.AsyncCheckpointer:
    # Orbax's default gives up after 20 minutes, and waits for minutes if it cannot make a folder
    options = ocp.options.AsyncOptions(
        timeout_secs=_SAVE_TIMEOUT_SECONDS, create_directories_asynchronously=False
    )
    # replicas share only the writing of large arrays, because each slice is a compiled program
    default = ocp.type_handlers.get_type_handler(jax.Array)
    arrays = ocp.type_handlers.ArrayHandler(
        min_slice_bytes_for_replica_parallel=_LEAST_SLICE_BYTES,
        # Orbax's own record of arrays, which has no public name; a save works without it
        array_metadata_store=getattr(default, "_array_metadata_store", None),
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    # with zstd a restore takes twice the processor time, for 8 % of random float32 numbers
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    return ocp.AsyncCheckpointer(handler, async_options=options)


def _chunks(array: jax.Array) -> ocp.SaveArgs:
    """Return the chunks of an array: small, because a reader reads whole chunks.

    Large rows, as of stacked blocks, have their own chunks, so that a stage reads only its blocks.
    """
    shape = array.sharding.shard_shape(array.shape)
    has_large_rows = array.ndim > 1 and array.dtype.itemsize * math.prod(shape[1:]) >= _LARGE_ROW_BYTES
    return ocp.SaveArgs(chunk_byte_size=_MOST_CHUNK_BYTES, shard_axes=(0,) if has_large_rows else ())
