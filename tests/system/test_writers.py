"""Every writer of the package makes a new file, or is listed with a reason; no link is written through."""

import ast
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from shardtrain.islands.watchdog.step_file import StepFile
from shardtrain.launch.rank import LOST
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.table_file import write_table
from shardtrain.report.plots.figure import new_figure, save_figure
from shardtrain.system.atomic_write import new_file, open_own, replace_file

ROOT = Path(__file__).parents[2]

FILLED = "in a folder that it makes, see `new_folder`"
PARTIAL = "in the folder of a step, which it makes"
TEMPORARY = "in a temporary folder of its own"

ALLOWED = {
    ("shardtrain/checkpoints/manifest.py", "write_text"): PARTIAL,
    ("shardtrain/checkpoints/retention.py", "shutil.copytree"): PARTIAL,
    ("shardtrain/cli/checkpoint_files.py", "write_bytes"): FILLED,
    ("shardtrain/cli/checkpoint_files.py", "write_text"): FILLED,
    ("shardtrain/doctor/file_system.py", "open"): TEMPORARY,
    ("shardtrain/doctor/file_system.py", "write_bytes"): TEMPORARY,
    ("shardtrain/doctor/file_system.py", "write_text"): TEMPORARY,
    ("shardtrain/doctor/files.py", "open"): TEMPORARY,
    ("shardtrain/islands/watchdog/step_file.py", "os.open"): "with O_NOFOLLOW, and mapped into memory",
    ("shardtrain/launch/log_folder.py", "open"): "in mode x: a file that is there stays",
    ("shardtrain/report/plots/figure.py", "savefig"): "into an open file",
    ("shardtrain/system/atomic_write.py", "os.open"): "the writer itself",
    ("shardtrain/system/run_lock.py", "os.open"): "the lock, in which nothing is written; with O_NOFOLLOW",
    ("models/huggingface/files.py", "write_bytes"): FILLED,
    ("models/huggingface/files.py", "write_text"): FILLED,
}
"""(File, call) -> why it writes over nothing."""

WRITES = ("write_text", "write_bytes", "savefig", "save", "savez", "tofile", "copyfile", "copy2", "copytree")


def writes(source: str) -> Iterator[tuple[str, int]]:
    """Yield (call, line) of each call that writes to a path."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called, text = node.func, ast.unparse(node)
        if isinstance(called, ast.Name) and called.id == "open" and _has_mode(node, 1):
            yield "open", node.lineno
        elif isinstance(called, ast.Attribute):
            owner = ast.unparse(called.value)
            if called.attr == "open" and owner == "os" and "O_CREAT" in text + source:
                yield "os.open", node.lineno
            elif (called.attr == "open" and _has_mode(node, 0)) or called.attr in WRITES[:3]:
                yield called.attr, node.lineno
            elif called.attr in WRITES and owner in ("np", "numpy", "shutil"):
                yield f"{owner}.{called.attr}", node.lineno


def _has_mode(call: ast.Call, position: int) -> bool:
    given = call.args[position : position + 1] + [each.value for each in call.keywords if each.arg == "mode"]
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else ""
    return isinstance(mode, str) and bool(set(mode) & set("wax+")) and set(mode) <= set("wax+rbt")


def test_every_writer_makes_a_new_file_or_is_listed_with_its_reason():
    found = set()
    for folder in ("shardtrain", "models", "meshes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.resolve().relative_to(ROOT).as_posix()
            found |= {(name, call) for call, _ in writes(path.read_text())}
    assert not found - ALLOWED.keys(), "write by new_file, replace_file, new_folder or open_own"
    assert not ALLOWED.keys() - found, "these write nothing any more: take them from the list"


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("path.write_text(a)", ["write_text"]),
        ("open(path, 'w')", ["open"]),
        ("path.open('ab')", ["open"]),
        ("path.open(mode='r+')", ["open"]),
        ("figure.savefig(path)", ["savefig"]),
        ("np.save(path, a)", ["np.save"]),
        ("os.open(path, os.O_CREAT)", ["os.open"]),
        ("shutil.copy2(a, b)", ["shutil.copy2"]),
        ("path.open('rb'); open(path); checkpoints.save(1); replace_file(path, a); os.open(path, 0)", []),
    ],
)
def test_a_writer_that_goes_round_is_seen(source, calls):
    assert [call for call, _ in writes(source)] == calls


def write_new(path: Path) -> None:
    with new_file(path) as file:
        file.write(b"ours")


WRITERS = {
    "new_file": write_new,
    "replace_file": lambda path: replace_file(path, b"ours"),
    "picture": lambda path: save_figure(new_figure("a picture", (1, 1)), path.with_suffix(".png")),
    "table": lambda path: write_table(make_table("gpipe", 2, 2), path),
    "log": lambda path: open_own(path, append=True).write(b"ours"),
    "step file": StepFile,
    "lost": lambda path: replace_file(path.with_suffix(LOST), b"1"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_link_leads_to_stays(name, tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    for suffix in ("", ".png", LOST):
        os.symlink(theirs, tmp_path / f"ours{suffix}")
    with suppress(OSError):  # a link is refused, or replaced
        WRITERS[name](tmp_path / "ours")
    assert theirs.read_text() == "theirs"
