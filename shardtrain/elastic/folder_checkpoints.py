"""Checkpoints of a loop of one's own, in the folder of an elastic run. `train` has its own."""

import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from shardtrain.elastic.epoch_files import find_chiefs, list_epochs
from shardtrain.elastic.ledger import is_valid_checkpoint
from shardtrain.elastic.member import Member
from shardtrain.elastic.run_files import RunFiles, SavedCheckpoint

KEPT_CHECKPOINTS = 2


@runtime_checkable
class SavedProgram(Protocol):
    """A program that saves its state."""

    def save(self, folder: Path) -> None:
        """Save the state into a new folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Set the state that `save` wrote."""
        ...


class FolderCheckpoints:
    """Checkpoints in `RUN/elastic/checkpoints`; see `island.IslandCheckpoints`.

    Args:
      files: the run folder.
      program: whose state is saved.
      member: the island, which knows whether it is the chief.
    """

    def __init__(self, files: RunFiles, program: SavedProgram, member: Member) -> None:
        self._files, self._program, self._member = files, program, member
        self._found: SavedCheckpoint | None = None

    def check_others(self) -> None:
        """Do nothing: what a loop of one's own trains is its own matter."""

    def find(self) -> int:
        """Return the step of the newest valid checkpoint; 0 if there is none."""
        self._found = next(reversed(self._list_valid()), None)
        return self._found.step if self._found else 0

    def revoke(self, number: int) -> None:
        """Take over from earlier chiefs, see `island.IslandCheckpoints`."""
        self._files.revoke_checkpoints(
            self._member.me.name, lambda names: find_chiefs(self._files, names, number)
        )

    def restore(self) -> bool:
        """Set the program's state to the checkpoint that was found; return False if there was none."""
        for void in set(self._files.list_checkpoints()) - set(self._list_valid()):
            shutil.rmtree(void.folder, ignore_errors=True)
        if self._found is not None:
            self._program.restore(self._found.folder)
        return self._found is not None

    def save(self, step: int, *, is_last: bool) -> bool:
        """Save the program's state after a step; return False if members changed meanwhile."""
        with self._files.new_checkpoint(self._member.me.name) as folder:
            try:
                number = self._member.fence
                self._program.save(folder)
                # a chief that was left behind meanwhile commits nothing
                if number is None or number != self._member.fence:
                    return False
                if not self._files.commit_checkpoint(number, step, folder):
                    return False
            except FileNotFoundError:
                if folder.exists():
                    raise
                return False  # revoked
        for old in self._list_valid()[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old.folder, ignore_errors=True)
        return True

    def _list_valid(self) -> list[SavedCheckpoint]:
        """List the checkpoints, by step, of chiefs that were not left behind."""
        epochs = list_epochs(self._files)
        found = [each for each in self._files.list_checkpoints() if each.epoch <= len(epochs)]
        return [each for each in found if is_valid_checkpoint(epochs, each.step, each.epoch)]
