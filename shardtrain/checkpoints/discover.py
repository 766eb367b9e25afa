"""Discover the checkpoint that a run resumes from: the newest of which all parts are whole. No jax.

All islands gather what each of them sees, so they reach the same answer. Next: `restore.py`, which reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardtrain.checkpoints.paths import partial_folders
from shardtrain.checkpoints.reader import CheckpointReader, visible_readers
from shardtrain.system.excerpts import some

Gather = Callable[[str, Callable[[int], Any]], list[Any]]
"""All-gather: (name, function of an island's number) -> its result on each island, as JSON has it."""


@dataclass(frozen=True, kw_only=True)
class Discovered:
    """The checkpoint to resume from, and why newer ones were skipped.

    Args:
        step: the newest whole step; None where nothing was ever saved completely.
        num_parts: in how many parts it was saved.
        save_id: what these have in common.
        extra: what was saved beside its state.
        skipped: what is unfinished or broken, each with the reason.
        broken: steps that are not whole, or newer than asked for.
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
        found = [
            each for each in visible_readers(*folders) if (each.step, each.num_parts, each.save_id) == mine
        ]
        return (
            found[-1]
            if found
            else CheckpointReader(step=self.step or 0, folders={}, num_parts=self.num_parts)
        )


def discover(folders: Sequence[Path], newest: int | None, gather: Gather) -> Discovered:
    """Find the newest step of which all parts are whole.

    Args:
        folders: of this island's checkpoints, the fastest first.
        newest: take none after this step.
        gather: with the other islands.

    Raises:
        ValueError: every checkpoint is broken, or one is of a later version of shardtrain.
    """
    # 1. gather what every island sees
    looked = gather("checkpoints", lambda island: _look(folders))
    skipped = [
        f"{name}: unfinished, left by a save or a deletion that was interrupted"
        for name in sorted({name for found in looked for name in found["partial"]})
    ]
    broken: set[int] = set()
    incomplete: set[int] = set()
    complete = []
    # 2. a step is complete if each of its parts is seen by some island
    for (step, num_parts, save_id), seers in _seers(looked):
        missing = [part for part in range(num_parts) if part not in seers]
        if newest is not None and step > newest:
            # to be replaced when the run comes there again, as a broken one is
            broken.add(step)
        elif missing:
            skipped.append(
                f"step {step}: unfinished: parts [{some(missing)}] of {num_parts} are nowhere to be seen"
            )
            broken.add(step)
            incomplete.add(step)
        else:
            complete.append((Discovered(step=step, num_parts=num_parts, save_id=save_id), seers))
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
        raise ValueError(all_broken_text(folders[-1], skipped))
    return Discovered(skipped=skipped, broken=frozenset(broken))


def _look(folders: Sequence[Path]) -> dict[str, Any]:
    partial = [path.name for folder in folders for path in partial_folders(folder)]
    found = [
        [each.step, each.num_parts, each.save_id, sorted(each.folders)] for each in visible_readers(*folders)
    ]
    return {"partial": partial, "found": found}


def _check_any(folder: Path, complete: Sequence[Discovered], incomplete: set[int]) -> None:
    """One unfinished step may be the first save, which was interrupted; several are checkpoints out of sight.

    Raises:
        ValueError: there are checkpoints, and of none are all parts to be seen.
    """
    if not complete and len(incomplete) > 1:
        raise ValueError(
            f"steps {sorted(incomplete)} in {folder} were saved in parts, and of none all can be seen from"
            " here. Give a run folder that has all of them, or start again the hosts that saved them; to"
            " begin anew use another --run-dir"
        )


def _seers(looked: Sequence[dict[str, Any]]) -> list[tuple[tuple[int, int, str], dict[int, list[int]]]]:
    """((step, number of parts, save), part -> islands that see it), ascending by step, then by age."""
    seen: dict[tuple[int, int, str], dict[int, list[int]]] = {}
    for island, found in enumerate(looked):
        for step, num_parts, save_id, parts in found["found"]:
            for part in parts:
                seen.setdefault((step, num_parts, save_id), {}).setdefault(part, []).append(island)
    return sorted(seen.items(), key=lambda item: item[0][0])


def _verifying(
    folders: Sequence[Path], choice: Discovered, seers: dict[int, list[int]]
) -> Callable[[int], dict[str, Any]]:
    """Return a function that verifies the parts assigned to an island; each has one that sees it."""

    def verify(island: int) -> dict[str, Any]:
        mine = [part for part, seen_by in seers.items() if seen_by[part % len(seen_by)] == island]
        reader = choice.reader(folders)
        try:
            wrong = reader.broken(mine)
            extra = reader.extra if 0 in mine and not wrong else None
        except ValueError as error:
            # gathered, and raised by all: the others would wait for an island that raised here
            return {"broken": {}, "extra": None, "error": str(error)}
        return {"broken": wrong, "extra": extra, "error": ""}

    return verify


def all_broken_text(folder: Path, skipped: Sequence[str]) -> str:
    """Format the error for a folder in which no checkpoint is whole."""
    listed = "\n  ".join([f"every checkpoint in {folder} is broken:", *skipped])
    return f"{listed}\nBring back a copy of one, or use another run folder to start from the beginning."
