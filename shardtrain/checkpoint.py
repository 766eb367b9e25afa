"""The one door to Orbax: save in the background, keep a few, restore the newest whole one on any mesh.

When to save is in `checkpoint_policy.py`, what makes a checkpoint whole in `manifest.py`.
"""

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from shardtrain import manifest as manifests
from shardtrain.checkpoint_policy import CheckpointPolicy, steps_to_delete
from shardtrain.manifest import Leaf

_LOG = logging.getLogger(__name__)
_SAVE_TIMEOUT_SECONDS = 4 * 60 * 60
_NONE_SAVED, _ALL_BROKEN = -1, -2


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. Older checkpoints are untouched, and the run can go on.

    Args:
        text: what happened, and what to do.
        step: the step that is not saved.
    """

    def __init__(self, text: str, *, step: int) -> None:
        super().__init__(text)
        self.step = step


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a run goes on from.

    Args:
        step: the step it was saved after.
        state: the tree that was asked for, of jax arrays with the shardings that were asked for.
        extra: what was saved beside the state (tuples come back as lists).
        passed_over: newer checkpoints that are broken, and all that are unfinished, each with the reason.
    """

    step: int
    state: Any
    extra: dict[str, Any]
    passed_over: tuple[str, ...]


@dataclass(frozen=True)
class _Pending:
    step: int
    num_bytes: int
    notes: Future[list[str]]


class Checkpoints:
    """The checkpoints of one run folder; one run at a time writes to a folder.

    Where several processes form one JAX runtime, all of them make the same calls in the same order, and the
    folder is one that all of them see.

    Args:
        folder: where the checkpoints lie; made at the first save.
        policy: what to keep.
        report: called on the caller's thread with each line that people must see.

    Example:
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
        self, folder: Path, policy: CheckpointPolicy, *, report: Callable[[str], None] = _LOG.warning
    ) -> None:
        self.folder = Path(folder).absolute()
        self.policy = policy
        self._report = report
        # Orbax's default gives up after 20 minutes, and a folder that it makes in the background
        # keeps its threads waiting for minutes where it cannot be made.
        options = ocp.options.AsyncOptions(
            timeout_secs=_SAVE_TIMEOUT_SECONDS, create_directories_asynchronously=False
        )
        self._orbax = ocp.StandardCheckpointer(async_options=options)
        self._background = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _Pending | None = None
        self._broken: set[int] = set()
        self._latest = max(self._with_manifest(), default=None)

    def latest(self) -> int | None:
        """The step of the newest finished checkpoint (a running save is not one yet), or None."""
        return self._latest

    def steps(self) -> list[int]:
        """The steps of all finished checkpoints, broken ones too."""
        return self._with_manifest()

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Begin to save; the arrays may be donated or deleted as soon as this returns.

        Waits for the save before, if that is still running.

        Args:
            step: steps done, larger than that of every checkpoint so far.
            state: pytree of jax arrays, sharded in any way.
            extra: what JSON can hold: data position, seed, description of the run, metrics.

        Raises:
            SaveFailed: the save *before* this one failed, or this one cannot begin; it is not begun.
            ValueError: all that cannot be saved, or a step that is not new.
        """
        self.wait()
        arrays = _saveable(state)
        _check(manifests.extra_problems(extra), "these values cannot be saved", "Use JSON's types")
        self._check_new(step)
        leaves = _describe(arrays)
        num_bytes = sum(array.nbytes for array in arrays.values())
        partial = manifests.partial_folder(self.folder, step)
        try:
            if _is_primary():
                # Larger than the newest whole step, so what lies in its place is not whole.
                manifests.delete(manifests.step_folder(self.folder, step))
                manifests.delete(partial)
                partial.mkdir(parents=True)
            self._orbax.save(partial / manifests.ARRAYS, arrays)
        except Exception as error:
            if _is_primary():
                shutil.rmtree(partial, ignore_errors=True)
            raise self._failure(step, num_bytes, error) from error
        self._broken.discard(step)
        finish = self._background.submit(self._finish, step, leaves, deepcopy(extra))
        self._pending = _Pending(step, num_bytes, finish)

    def wait(self) -> None:
        """Return when the running save is on the disk and `latest`; at once where none runs.

        Raises:
            SaveFailed: it failed. Raised once; what is saved next is not affected.
        """
        pending, failure = self._pending, self._collect()
        if _on_any_process(failure is not None) and pending is not None:
            raise failure or self._failure(
                pending.step, pending.num_bytes, RuntimeError("another process failed")
            )

    def forget_after(self, step: int) -> None:
        """Go on from this step (-1: the start): later ones are replaced when the run comes there."""
        finished = self._with_manifest()
        self._broken.update(later for later in finished if later > step)
        self._latest = max((earlier for earlier in finished if earlier <= step), default=None)

    def restore(self, abstract_state: Any, newest: int | None = None) -> Restored | None:
        """Read the newest whole checkpoint, each array straight into the sharding asked for.

        Before anything is loaded, every file's size and checksum are compared with the manifest (for the
        cost see `manifest.problems`). What is broken or unfinished is passed over and
        reported with its reason.

        Args:
            abstract_state: pytree of `jax.ShapeDtypeStruct` with shardings, or of arrays like them; the mesh
                may differ from the one that saved.
            newest: take none after this step.

        Returns:
            None where nothing was ever saved completely.

        Raises:
            ValueError: every checkpoint is broken; or the newest whole one is that of another model or
                optimizer (all arrays that differ are listed).
            SaveFailed: the save before failed.
        """
        self.wait()
        wanted = _restorable(abstract_state)
        choice, passed_over = self._choose(newest) if _is_primary() else (_NONE_SAVED, [])
        step = int(multihost_utils.broadcast_one_to_all(np.int32(choice)))
        for line in passed_over:
            self._report(f"checkpoint passed over: {line}")
        if step == _ALL_BROKEN:
            raise ValueError(_all_broken_text(self.folder, passed_over))
        if step == _NONE_SAVED:
            return None
        folder = manifests.step_folder(self.folder, step)
        manifest, reason = manifests.read_manifest(folder)
        assert manifest is not None, reason
        _check(
            manifests.mismatches(manifest.leaves, _describe(wanted)),
            f"{folder} holds another state than this run has",
            "Use the model and optimizer that it was saved with, or another run folder",
        )
        arrays = self._orbax.restore(folder / manifests.ARRAYS, wanted)
        self._latest = step
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), [arrays[path] for path in wanted])
        return Restored(step=step, state=state, extra=manifest.extra, passed_over=tuple(passed_over))

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

    def _with_manifest(self) -> list[int]:
        steps = manifests.finished_steps(self.folder)
        return [step for step in steps if manifests.has_manifest(manifests.step_folder(self.folder, step))]

    def _check_new(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"step {step} cannot be saved: steps count from 0.")
        if self._latest is not None and step <= self._latest:
            raise ValueError(
                f"step {step} cannot be saved: {self.folder} holds step {self._latest} already. "
                f"Restore from it and go on from step {self._latest + 1}, or use another run folder."
            )

    def _choose(self, newest: int | None) -> tuple[int, list[str]]:
        """The newest whole step (or why there is none), and all that was passed over on the way."""
        passed_over = [
            f"{path.name}: unfinished, left by a save or a deletion that was interrupted"
            for path in manifests.partial_folders(self.folder)
        ]
        finished = manifests.finished_steps(self.folder)
        steps = [step for step in finished if newest is None or step <= newest]
        # to be replaced when the run comes there again, as a broken one is
        self._broken.update(set(finished) - set(steps))
        for step in reversed(steps):
            folder = manifests.step_folder(self.folder, step)
            found = manifests.problems(folder)
            if not found:
                return step, passed_over
            self._broken.add(step)
            passed_over.append(f"{folder.name}: broken: {'; '.join(found)}")
        return (_ALL_BROKEN if steps else _NONE_SAVED), passed_over

    def _finish(self, step: int, leaves: Mapping[str, Leaf], extra: dict[str, Any]) -> list[str]:
        """In the background: when Orbax has written all, add the manifest, give the name, delete old ones."""
        partial = manifests.partial_folder(self.folder, step)
        try:
            self._orbax.wait_until_finished()
            if not _is_primary():
                return []
            manifests.write_manifest(
                partial, step=step, orbax_version=ocp.__version__, leaves=leaves, extra=extra
            )
            partial.rename(manifests.step_folder(self.folder, step))
            manifests.sync(self.folder)
        except BaseException:
            if _is_primary():
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return self._delete_old(step)

    def _delete_old(self, newest: int) -> list[str]:
        """Delete what the policy does not keep, and what is broken and older than this whole checkpoint."""
        whole = [step for step in self._with_manifest() if step <= newest and step not in self._broken]
        keep = set(whole) - set(steps_to_delete(self.policy, whole))
        steps = [
            step for step in manifests.finished_steps(self.folder) if step <= newest and step not in keep
        ]
        notes = []
        for path in [
            *manifests.partial_folders(self.folder),
            *(manifests.step_folder(self.folder, step) for step in steps),
        ]:
            try:
                manifests.delete(path)
            except OSError as error:
                notes.append(f"old checkpoint {path} could not be deleted: {error}")
        return notes

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
            return failure
        self._pending, self._latest = None, pending.step
        for note in notes:
            self._report(note)
        return None

    def _failure(self, step: int, num_bytes: int, error: Exception) -> SaveFailed:
        older = (
            "there is no older checkpoint" if self._latest is None else f"step {self._latest} is untouched"
        )
        existing = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        return SaveFailed(
            f"step {step} is not saved in {self.folder} ({older}): {_first_line(error)}. The state has "
            f"{num_bytes:,} bytes, the disk has {shutil.disk_usage(existing).free:,} free. "
            "Free space, make the folder writable, or use another.",
            step=step,
        )


def _saveable(state: Any) -> dict[str, jax.Array]:
    """The arrays of a state by path; Orbax gets them flat, so that no two of its names can fall together."""
    by_path = _by_path(state)
    wrong = [f"{path}: {reason}" for path, leaf in by_path.items() if (reason := _unsaveable(leaf))]
    _check(wrong, "these leaves of the state cannot be saved", "Change them where the state is made")
    return by_path


def _unsaveable(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array):
        return f"{type(leaf).__name__}; use jnp.asarray"
    if kind := _unsaveable_kind(leaf):
        return kind
    # A weak type is lost on the way, and with it the dtype of results after resuming.
    return f"weakly typed; use .astype({leaf.dtype.name!r})" if leaf.weak_type else ""


def _unsaveable_kind(leaf: Any) -> str:
    """What shape and dtype alone tell, so that a run hears of it before its first step."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return "typed key; use jax.random.key_data"
    return f"no elements, shape {leaf.shape}; leave it out" if leaf.size == 0 else ""


def _restorable(abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    by_path = _by_path(abstract_state)
    never = [f"{path}: {reason}" for path, leaf in by_path.items() if (reason := _unsaveable_kind(leaf))]
    _check(never, "these leaves of the state could never be saved", "Change them where the state is made")
    wrong = [path for path, leaf in by_path.items() if getattr(leaf, "sharding", None) is None]
    _check(wrong, "these leaves say not where to restore to", "Use jax.ShapeDtypeStruct(..., sharding=...)")
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for path, leaf in by_path.items()
    }


def _by_path(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(tree)
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    twice = [path for path, count in Counter(paths).items() if count > 1]
    _check(twice, "these paths stand for several leaves", "Rename the keys of one")
    if not paths:
        raise ValueError("the state has no arrays: nothing can be saved or restored.")
    return dict(zip(paths, (leaf for _, leaf in leaves), strict=True))


def _describe(arrays: Mapping[str, Any]) -> dict[str, Leaf]:
    return {path: Leaf(shape=tuple(leaf.shape), dtype=leaf.dtype.name) for path, leaf in arrays.items()}


def _check(wrong: list[str], what: str, change: str) -> None:
    if wrong:
        raise ValueError("\n  ".join([f"{what}:", *wrong]) + f"\n{change}.")


def _all_broken_text(folder: Path, passed_over: list[str]) -> str:
    listed = "\n  ".join([f"every checkpoint in {folder} is broken:", *passed_over])
    return f"{listed}\nBring back a copy of one, or use another run folder to start from the beginning."


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _is_primary() -> bool:
    return jax.process_index() == 0


def _on_any_process(flag: bool) -> bool:
    return (
        bool(np.any(multihost_utils.process_allgather(np.bool_(flag)))) if jax.process_count() > 1 else flag
    )
