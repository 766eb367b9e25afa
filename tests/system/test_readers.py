"""Every reader of the package goes through the bounded ones, but those that are listed here with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SYSTEM = "/proc, /sys or another file of the operating system"
OWN = "JSON that this process made a moment ago"
RANKS = "ranks, launcher and logs of one job trust each other"
TEMPORARY = "a file that this process wrote a moment ago"
BOUNDED = "the bounded reader itself"
MEMORY = "no file of the file system by its path: bytes that were read before"

ALLOWED = {
    ("shardtrain/checkpoints/array_files.py", "open"): "TensorStore's, whose manifest was checked",
    ("shardtrain/checkpoints/manifest.py", "open"): TEMPORARY,
    ("shardtrain/checkpoints/processes.py", "json.loads"): RANKS,
    ("shardtrain/cli/train.py", "read_text"): SYSTEM,
    ("shardtrain/data/image_decoding.py", "open"): MEMORY,
    ("shardtrain/data/sources/columns.py", "memory_map"): "the size is compared before each column is copied",
    ("shardtrain/data/sources/tar.py", "tarfile.open"): "through `_Headers`, which bounds what it reads",
    ("shardtrain/data/tokens.py", "np.memmap"): "behind a header that was checked; `TokenFile` reads instead",
    ("shardtrain/data/workers.py", "pickle.loads"): "batches of this process, sent to its workers",
    ("shardtrain/doctor/binding.py", "read_text"): SYSTEM,
    ("shardtrain/doctor/child.py", "json.loads"): "what a program of our own printed",
    ("shardtrain/doctor/file_system.py", "read_text"): TEMPORARY,
    ("shardtrain/doctor/files.py", "read_text"): SYSTEM,
    ("shardtrain/doctor/names.py", "read_text"): SYSTEM,
    ("shardtrain/doctor/runner.py", "json.loads"): OWN,
    ("shardtrain/islands/binding.py", "read_text"): SYSTEM,
    ("shardtrain/islands/bridge.py", "json.loads"): RANKS,
    ("shardtrain/islands/membership.py", "read_text"): SYSTEM,
    ("shardtrain/islands/rank_facts.py", "json.loads"): OWN,
    ("shardtrain/islands/watchdog/diagnosis.py", "json.loads"): RANKS,
    ("shardtrain/islands/watchdog/peer.py", "read_text"): SYSTEM,
    ("shardtrain/islands/watchdog/step_file.py", "mmap.mmap"): "a file that this rank makes and writes",
    ("shardtrain/islands/watchdog/step_file.py", "read_bytes"): RANKS,
    ("shardtrain/launch/rank.py", "open"): RANKS,
    ("shardtrain/launch/rank.py", "read_text"): RANKS,
    ("shardtrain/launch/rank_end.py", "json.loads"): RANKS,
    ("shardtrain/launch/rank_end.py", "open"): RANKS,
    ("shardtrain/launch/rank_end.py", "read_text"): RANKS,
    ("shardtrain/launch/supervise.py", "json.loads"): RANKS,
    ("shardtrain/launch/supervise.py", "read_bytes"): SYSTEM,
    ("shardtrain/launch/supervise.py", "read_text"): RANKS,
    ("shardtrain/system/cgroup.py", "read_text"): SYSTEM,
    ("shardtrain/system/host.py", "read_bytes"): SYSTEM,
    ("shardtrain/system/host.py", "read_text"): SYSTEM,
    ("shardtrain/system/plain_text.py", "read_bytes"): "a file or a pipe that the command line names",
    ("shardtrain/system/untrusted_data.py", "json.loads"): BOUNDED,
    ("shardtrain/system/untrusted_data.py", "tomllib.loads"): BOUNDED,
    ("shardtrain/system/untrusted_files.py", "json.loads"): BOUNDED,
    ("shardtrain/trainer/changed_options.py", "json.loads"): OWN,
    ("shardtrain/trainer/environment.py", "open"): "the last byte of a file that was opened to append to it",
    ("shardtrain/trainer/fingerprints.py", "read_text"): SYSTEM,
    ("shardtrain/trainer/run_checkpoints.py", "json.loads"): OWN,
    ("shardtrain/trainer/run_facts.py", "json.loads"): OWN,
}
"""(File, call) -> why what it reads is no file of a stranger, or is bounded."""

MODULES = ("json", "tomllib", "pickle", "marshal", "tarfile", "zipfile", "gzip", "bz2", "lzma", "mmap", "csv")
READS = ("load", "loads", "open", "mmap", "memmap", "open_memmap", "memory_map", "read_text", "read_bytes")


def unbounded_calls(source: str) -> Iterator[tuple[str, int]]:
    """Yield (call, line) of each call that reads a file, or parses one, without bounds."""
    tree = ast.parse(source)
    # a method of this name may be our own function, which is called by its bare name
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for name in node.names:
                if name.name in READS:
                    yield f"{node.module}.{name.name}", node.lineno
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id == "open" and _reads(node, 1):
            yield "open", node.lineno
        if isinstance(called, ast.Attribute) and called.attr in READS:
            owner = called.value.id if isinstance(called.value, ast.Name) else ""
            qualified = f"{owner}.{called.attr}" if owner in (*MODULES, "np", "numpy") else called.attr
            if called.attr == "open" and owner not in MODULES and (owner == "os" or not _reads(node, 0)):
                continue
            if called.attr in ("load", "loads") and owner not in (*MODULES, "np", "numpy"):
                continue
            yield qualified, node.lineno


def _reads(call: ast.Call, position: int) -> bool:
    given = call.args[position : position + 1] + [each.value for each in call.keywords if each.arg == "mode"]
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else "r"
    return not isinstance(mode, str) or not set(mode) <= set("waxbt+") or "r" in mode


def test_every_reader_is_bounded_or_listed_with_its_reason():
    found: dict[tuple[str, str], list[int]] = {}
    for folder in ("shardtrain", "models", "meshes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.resolve().relative_to(ROOT).as_posix()
            for call, line in unbounded_calls(path.read_text()):
                found.setdefault((name, call), []).append(line)
    new = {key: lines for key, lines in found.items() if key not in ALLOWED}
    assert not new, "read files by system/untrusted_files.py, untrusted_data.py or array_file.py"
    assert not ALLOWED.keys() - found.keys(), "these read nothing any more: take them from the list"


@pytest.mark.parametrize(
    ("source", "calls"),
    [
        ("json.loads(a)", ["json.loads"]),
        ("from json import loads", ["json.loads"]),
        ("path.read_text()", ["read_text"]),
        ("open(path)", ["open"]),
        ("path.open('rb')", ["open"]),
        ("path.open(mode='r')", ["open"]),
        ("np.load(path)", ["np.load"]),
        ("gzip.open(path, 'rt')", ["gzip.open"]),
        ("tarfile.open(path)", ["tarfile.open"]),
        ("pickle.loads(b)", ["pickle.loads"]),
        ("path.open('wb'); open(path, 'a'); read_text(path); os.open(path, 0); yaml.dump(a)", []),
    ],
)
def test_a_reader_that_goes_round_is_seen(source, calls):
    assert [call for call, _ in unbounded_calls(source)] == calls
