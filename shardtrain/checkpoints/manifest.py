"""Write, read and verify the manifest of a checkpoint: checksums of files, shapes of arrays. No jax.

Its entries are in `manifest_entries.py`, the names of folders in `paths.py`. Next: `reader.py`.
"""

import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from shardtrain.checkpoints import paths
from shardtrain.checkpoints.manifest_entries import File, Manifest, parse_manifest
from shardtrain.checkpoints.paths import MANIFEST
from shardtrain.system.atomic_write import sync
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import crc32_of, open_inside, parse_json, special_files, stat_inside

SCHEMA = 3

READABLE = (2, SCHEMA)
"""Schema 2 calls the origin of an array `lie`."""

_MOST_BYTES = 1 << 28


def write_manifest(step_folder: Path, manifest: Manifest) -> None:
    """Checksum all files in a step's folder, add the manifest, and force everything to the disk.

    Each file is read once, from memory after a save, so that CRC-32 sets the speed (about 4 GB/s).

    Args:
        step_folder: the folder with the written arrays.
        manifest: the manifest without files; `extra` has JSON values, see `find_extra_problems`.

    Raises:
        OSError: the folder cannot be read or written.
    """
    written = sorted(path for path in step_folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(_file, written))
    by_name = {
        path.relative_to(step_folder).as_posix(): file for path, file in zip(written, files, strict=True)
    }
    manifest = replace(manifest, files=by_name)
    (step_folder / MANIFEST).write_text(_text({"schema": SCHEMA, **asdict(manifest)}))
    for path in (*step_folder.rglob("*"), step_folder):
        sync(path)


def _file(path: Path) -> File:
    with path.open("rb") as file:
        return File(num_bytes=path.stat().st_size, crc32=crc32_of(file))


def read_manifest(step_folder: Path) -> tuple[Manifest | None, str]:
    """Read a step's manifest; return None and the reason if it is damaged.

    Raises:
        ValueError: it is from a later version of shardtrain.
    """
    if step_folder.is_symlink():
        return None, "it is a link; put the folder itself in its place"
    try:
        text = _manifest_text(step_folder)
    except FileNotFoundError:
        return None, f"no {MANIFEST}"
    except (OSError, ValueError) as error:
        return None, f"{MANIFEST} cannot be read: {error}"
    try:
        # trust only the canonical text of its content with the right checksum
        body = parse_json(text, ours=True)["body"]
        if _text(body) != text:
            return None, f"{MANIFEST} does not agree with its own checksum"
        schema = body["schema"]
    except (ValueError, KeyError, TypeError):
        return None, f"{MANIFEST} is damaged"
    # a newer schema is no damage: the run must not skip the checkpoint
    if type(schema) is int and schema > SCHEMA:
        raise ValueError(
            f"{step_folder} was written in schema {schema}; this shardtrain reads schema {SCHEMA}."
            " Use the shardtrain that wrote it, or another run folder."
        )
    try:
        # every field is checked, as the file is untrusted
        if schema not in READABLE:
            raise ValueError(f"schema is {short(schema)}")
        return parse_manifest(body), ""
    except ValueError as error:
        return None, f"{MANIFEST} is not of the form that shardtrain writes: {error}"


def _manifest_text(step_folder: Path) -> str:
    num_bytes = stat_inside(step_folder, MANIFEST).st_size
    if num_bytes > _MOST_BYTES:
        raise ValueError(f"it has {num_bytes:,} bytes; at most {_MOST_BYTES:,} are read")
    with open_inside(step_folder, MANIFEST) as file:
        return file.read(num_bytes).decode()


def problems(step_folder: Path) -> list[str]:
    """Return all differences between a step's folder and its manifest; empty for an undamaged checkpoint.

    Each file of the right size is read once, several at a time (CRC-32 runs at about 4 GB/s a thread, so the
    disk is the limit; the files stay in memory for the load that follows).

    Raises:
        ValueError: the manifest is from a later version of shardtrain.
    """
    manifest, reason = read_manifest(step_folder)
    if manifest is None:
        return [reason]
    if step_folder.name != paths.step_folder(step_folder.parent, manifest.step, manifest.part).name:
        return [f"its manifest is that of step {manifest.step}{manifest.part}"]
    if special := special_files(step_folder):
        return special
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda item: _find_file_problem(step_folder, *item), manifest.files.items())
        return [f"{path} {problem}" for path, problem in zip(manifest.files, found, strict=True) if problem]


def _text(body: dict[str, Any]) -> str:
    """Return the canonical text of a manifest; any other text, even by a space, is not trusted."""
    crc32 = zlib.crc32(json.dumps(body).encode())
    return json.dumps({"crc32": crc32, "body": body}, indent=1) + "\n"


def measure_file(step_folder: Path, name: str) -> int:
    """Return the size of a file that a manifest names; -1 if the folder has no such regular file."""
    try:
        return stat_inside(step_folder, name).st_size
    except OSError:
        return -1


def _find_file_problem(step_folder: Path, name: str, file: File) -> str:
    try:
        num_bytes = stat_inside(step_folder, name).st_size
        if num_bytes != file.num_bytes:
            return f"has {num_bytes} bytes, {file.num_bytes} were saved"
        with open_inside(step_folder, name) as opened:
            same = crc32_of(opened) == file.crc32
        return "" if same else f"has other contents than were saved ({num_bytes} bytes)"
    except FileNotFoundError:
        return f"is missing, {file.num_bytes} bytes were saved"
    except OSError as error:
        return f"cannot be read: {error}"
