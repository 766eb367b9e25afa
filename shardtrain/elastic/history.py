"""What an elastic run left in its folder, read without changing it. No sockets, no jax.

Next: `ledger.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.elastic.epoch import Epoch
from shardtrain.elastic.epoch_files import parse_epoch
from shardtrain.elastic.run_files import (
    ALIVE,
    EPOCHS,
    MEMBERS,
    MOST_EPOCH_BYTES,
    list_checkpoints,
    list_plain,
)
from shardtrain.system.untrusted_files import read_bytes, read_json

ELASTIC = "elastic"
"""The folder of an elastic run's files in the run folder."""

MOST_MEMBER_BYTES, MOST_PROCESSES = 1 << 16, 1 << 20


@dataclass(frozen=True, kw_only=True)
class History:
    """The past of an elastic run; times are those of the file system, in seconds since 1970.

    Args:
      epochs: all epochs, in order.
      made: the time of each epoch.
      alive: member -> the last time at which it showed that it is alive, about once a second.
      members: island -> its own description: host, mesh, device and others; nothing of it is checked.
      saved: the last step of a checkpoint in `RUN/elastic/checkpoints`; 0 without one.
      plain: number of an epoch -> the step from which the run was continued without `--elastic`.
    """

    epochs: tuple[Epoch, ...]
    made: tuple[float, ...]
    alive: Mapping[str, float]
    members: Mapping[str, Mapping[str, Any]]
    saved: int
    plain: Mapping[int, int]

    @property
    def ended(self) -> float:
        """The last time at which a member was alive."""
        return max([*self.made, *self.alive.values()])

    def find_mesh(self, name: str) -> dict[str, int]:
        """Return the mesh of an island, axis -> size; empty if it is not known."""
        mesh = self.members.get(name, {}).get("mesh")
        if not isinstance(mesh, dict) or any(type(size) is not int or size < 1 for size in mesh.values()):
            return {}
        return mesh

    def find_count(self, name: str, what: str) -> int:
        """Return a number of processes or stages of an island; 1 if it is not known."""
        return get_count(self.members.get(name, {}), what)


def get_count(facts: Mapping[str, Any], what: str) -> int:
    """Return a number of the description of an island; 1 if it is not there, or of another form."""
    found = facts.get(what, 1)
    return found if type(found) is int and 1 <= found <= MOST_PROCESSES else 1


def read_history(run: Path) -> History:
    """Read the history of a run.

    Args:
      run: the folder of the run.

    Raises:
      FileNotFoundError: the run is not elastic.
      ValueError: a file has another form.
    """
    folder = run / ELASTIC
    epochs, made = [], []
    while (path := folder / EPOCHS / f"{len(epochs) + 1}.json").exists():
        epochs.append(parse_epoch(read_bytes(path, MOST_EPOCH_BYTES)))
        made.append(path.stat().st_mtime)
    if not epochs:
        raise FileNotFoundError(
            f"{run} is no elastic run: it has no {folder / EPOCHS / '1.json'}; give the folder of a run that"
            " was trained by several islands that come and go"
        )
    return History(
        epochs=tuple(epochs),
        made=tuple(made),
        alive={path.name: path.stat().st_mtime for path in (folder / ALIVE).glob("[!.]*")},
        members=list_members(folder),
        saved=max([each.step for each in list_checkpoints(folder)], default=0),
        plain=list_plain(folder / EPOCHS),
    )


def list_members(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the descriptions of islands that `RunFiles.describe_member` wrote.

    Args:
      folder: the folder of `RunFiles`.

    Raises:
      ValueError: a file is no JSON object, or too large.
    """
    found = {}
    for path in sorted((folder / MEMBERS).glob("[!.]*.json")):
        facts = read_json(path, MOST_MEMBER_BYTES)
        if not isinstance(facts, dict):
            raise ValueError(f"{path} is no JSON object; delete it, and the island has no description")
        found[path.stem] = facts
    return found
