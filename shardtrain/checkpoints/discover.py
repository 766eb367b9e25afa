"""Discover the checkpoint from which a run resumes: the newest complete and undamaged one. No jax.

All islands gather the parts that each of them sees, so that they choose the same one. Next: `restore.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardtrain.checkpoints.paths import partial_folders
from shardtrain.checkpoints.reader import CheckpointReader, visible_readers
from shardtrain.errors.messages import problems_error
from shardtrain.system.excerpts import some

Gather = Callable[[str, Callable[[int], Any]], list[Any]]
"""All-gather: (name, function of an island's number) -> its result on each island, as JSON values."""


@dataclass(frozen=True, kw_only=True)
class DiscoveredCheckpoint:
    """The checkpoint to resume from, and why newer ones were skipped.

    Args:
        step: the newest complete step; None if no save was ever finished.
        num_parts: the number of its parts.
        save_id: the identifier that its parts share.
        extra: its extra data.
        skipped: unfinished or broken folders, each with the reason.
        broken: steps that are incomplete, damaged, or newer than allowed.
    """

    step: int | None = None
    num_parts: int = 1
    save_id: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    broken: frozenset[int] = frozenset()

    def reader(self, folders: Sequence[Path]) -> CheckpointReader:
        """Return a reader of its parts in these folders; of two saves of one step, the later."""
        mine = (self.step, self.num_parts, self.save_id)
        none = CheckpointReader(step=self.step or 0, folders={}, num_parts=self.num_parts)
        seen = reversed(visible_readers(*folders))
        return next((each for each in seen if (each.step, each.num_parts, each.save_id) == mine), none)


def discover(folders: Sequence[Path], newest: int | None, gather: Gather) -> DiscoveredCheckpoint:
    """Find the newest step whose parts are all visible and undamaged.

    Args:
        folders: the folders of this island's checkpoints, the fastest first.
        newest: the last step that may be used; None means any.
        gather: all-gathers values of the islands.

    Raises:
        ValueError: every checkpoint is broken, or one is of a later version of shardtrain.
    """
    # 1. gather the parts that every island sees
    listings = gather("checkpoints", lambda island: _list_parts(folders))
    skipped = [
        f"{name}: unfinished, left by a save or a deletion that was interrupted"
        for name in sorted({name for found in listings for name in found["partial"]})
    ]
    broken: set[int] = set()
    incomplete: set[int] = set()
    complete = []
    # 2. a step is complete if some island sees each of its parts
    for (step, num_parts, save_id), seers in _visible_to(listings):
        missing = [part for part in range(num_parts) if part not in seers]
        if newest is not None and step > newest:
            # replaced when the run reaches this step again, like a broken one
            broken.add(step)
        elif missing:
            skipped.append(f"step {step}: unfinished: no island sees parts [{some(missing)}] of {num_parts}")
            broken.add(step)
            incomplete.add(step)
        else:
            complete.append((DiscoveredCheckpoint(step=step, num_parts=num_parts, save_id=save_id), seers))
    _check_any(folders[-1], [choice for choice, _ in complete], incomplete)
    # 3. verify the newest complete step first; the islands share the parts, and all get the same answer
    for choice, seers in reversed(complete):
        step = choice.step
        assert step is not None
        found = gather(f"verify step {step}", _verifying(folders, choice, seers))
        if errors := [each["error"] for each in found if each["error"]]:
            raise ValueError(errors[0])
        wrong = {name: problems for each in found for name, problems in each["broken"].items()}
        if not wrong:
            extra = next(each["extra"] for each in found if each["extra"] is not None)
            return replace(choice, extra=extra, skipped=skipped, broken=frozenset(broken - {step}))
        broken.add(step)
        skipped += [f"{name}: broken: {'; '.join(problems)}" for name, problems in sorted(wrong.items())]
    if complete:
        raise problems_error(
            f"every checkpoint in {folders[-1]} is broken; restore a copy of one, or use another run folder"
            " to start from the beginning",
            skipped,
        )
    return DiscoveredCheckpoint(skipped=skipped, broken=frozenset(broken))


def _list_parts(folders: Sequence[Path]) -> dict[str, Any]:
    partial = [path.name for folder in folders for path in partial_folders(folder)]
    found = [
        [each.step, each.num_parts, each.save_id, sorted(each.folders)] for each in visible_readers(*folders)
    ]
    return {"partial": partial, "found": found}


def _check_any(folder: Path, complete: Sequence[DiscoveredCheckpoint], incomplete: set[int]) -> None:
    """Refuse to start from the beginning if several steps are incomplete; one may be an interrupted save.

    Raises:
        ValueError: there are checkpoints, but no complete one is visible.
    """
    if not complete and len(incomplete) > 1:
        raise ValueError(
            f"steps {sorted(incomplete)} in {folder} were saved in parts, and no step has all of its parts"
            " visible here. Give a run folder that has all of them, or start on the hosts that saved them; to"
            " start from the beginning use another --run-dir"
        )


def _visible_to(
    listings: Sequence[dict[str, Any]],
) -> list[tuple[tuple[int, int, str], dict[int, list[int]]]]:
    """Return ((step, number of parts, save), part -> islands that see it) by step, then from old to new."""
    seen: dict[tuple[int, int, str], dict[int, list[int]]] = {}
    for island, found in enumerate(listings):
        for step, num_parts, save_id, parts in found["found"]:
            for part in parts:
                seen.setdefault((step, num_parts, save_id), {}).setdefault(part, []).append(island)
    return sorted(seen.items(), key=lambda item: item[0][0])


def _verifying(
    folders: Sequence[Path], choice: DiscoveredCheckpoint, seers: dict[int, list[int]]
) -> Callable[[int], dict[str, Any]]:
    """Return a function that verifies the parts assigned to an island, all of which it sees."""

    def verify(island: int) -> dict[str, Any]:
        mine = [part for part, seen_by in seers.items() if seen_by[part % len(seen_by)] == island]
        reader = choice.reader(folders)
        try:
            wrong = reader.broken(mine)
            extra = reader.extra if 0 in mine and not wrong else None
        except ValueError as error:
            # all islands raise it after the gather, where the others would wait for this one
            return {"broken": {}, "extra": None, "error": str(error)}
        return {"broken": wrong, "extra": extra, "error": ""}

    return verify
