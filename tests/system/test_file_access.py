"""Files are read within bounds, written as new files and deleted by their owner, or a reason is listed.

No link is written through.
"""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from package_source import file_accesses, package_files

from shardtrain.islands.watchdog.step_file import StepFile
from shardtrain.launch.rank import LOST
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.table_file import write_table
from shardtrain.report.plots.figure import make_figure, save_figure
from shardtrain.system.atomic_write import new_file, open_own, replace_file

SYSTEM = "/proc, /sys or another file of the operating system"
OWN = "JSON that this process made a moment ago"
RANKS = "ranks, launcher and logs of one job trust each other"
MINE = "a file that this process wrote a moment ago"
BOUNDED = "the bounded reader itself"
OPENED = "of a file that was opened, or bytes that were read, within bounds"
STREAM = "decompressed line by line, or some first bytes"
FILLED = "in a folder that it makes, see `new_folder`"
PARTIAL = "in the folder of a step, which it makes"
TEMPORARY = "in a temporary folder of its own"
WRITER = "the writer itself"
STEPS = "folders of steps, by the names that saves give them"
CACHED = "files of the cache, by the names that it gives them"
LAUNCHED = "records of an earlier start of the launch, by the names that it gives them"

ALLOWED = {
    "models/huggingface/files.py": {".write_bytes": FILLED, ".write_text": FILLED},
    "shardtrain/checkpoints/evaluations.py": {".rename": MINE, ".unlink": MINE},
    "shardtrain/checkpoints/folders.py": {".rename": STEPS},
    "shardtrain/checkpoints/manifest.py": {".open(rb)": MINE, ".write_text": PARTIAL},
    "shardtrain/checkpoints/paths.py": {
        ".rename": STEPS, ".unlink": STEPS, "shutil.rmtree": STEPS,
    },
    "shardtrain/checkpoints/processes.py": {"json.loads": RANKS},
    "shardtrain/checkpoints/retention.py": {
        ".rename": STEPS, "shutil.copytree": PARTIAL, "shutil.rmtree": STEPS
    },
    "shardtrain/checkpoints/save.py": {"shutil.rmtree": PARTIAL},
    "shardtrain/cli/checkpoint_files.py": {".write_bytes": FILLED, ".write_text": FILLED},
    "shardtrain/cli/train.py": {".read_text": SYSTEM},
    "shardtrain/data/image_decoding.py": {".open(?)": OPENED},
    "shardtrain/data/inspection.py": {"numpy.fromfile": OPENED},
    "shardtrain/data/sources/columns.py": {
        ".ParquetFile": "what it decodes to is found from the headers of its pages",
        ".memory_map": "the size is compared before each column is copied",
    },
    "shardtrain/data/sources/json_lines.py": {"gzip.GzipFile": STREAM},
    "shardtrain/data/sources/megatron.py": {"numpy.fromfile": OPENED},
    "shardtrain/data/sources/numpy_tokens.py": {"numpy.fromfile": OPENED},
    "shardtrain/data/sources/row_offsets.py": {
        "numpy.fromfile": OPENED, ".rmdir": "an empty folder", ".unlink": "indices, by their own names",
    },
    "shardtrain/data/sources/tar.py": {"tarfile.open": "through `_Headers`, which bounds what it reads"},
    "shardtrain/data/sources/unread_files.py": dict.fromkeys(
        ("bz2.BZ2File", "gzip.GzipFile", "lzma.LZMAFile"), STREAM
    ),
    "shardtrain/data/tokens.py": {
        "numpy.memmap": "behind a header that was checked; `TokenShards` reads", "os.open": "read-only",
    },
    "shardtrain/data/workers.py": {"pickle.loads": "batches of this process, sent to its workers"},
    "shardtrain/doctor/binding.py": {".read_text": SYSTEM},
    "shardtrain/doctor/files.py": {
        **dict.fromkeys((".open(r+)", ".open(w)", ".open(wb)", ".rename", ".touch"), TEMPORARY),
        **dict.fromkeys((".read_text", ".write_bytes", ".write_text", "os.open", "shutil.rmtree"), TEMPORARY),
    },
    "shardtrain/doctor/hosts.py": {".read_text": SYSTEM},
    "shardtrain/doctor/runner.py": {"json.loads": OWN},
    "shardtrain/doctor/start.py": {"json.loads": "what a program of our own printed"},
    "shardtrain/elastic/folder_checkpoints.py": {"shutil.rmtree": STEPS},
    "shardtrain/elastic/run_files.py": {
        ".rename": STEPS, ".touch": "an empty file that shows that a member lives",
        "open(rb)": "for its time alone", "shutil.rmtree": PARTIAL,
    },
    "shardtrain/islands/binding.py": {".read_text": SYSTEM},
    "shardtrain/islands/bridge.py": {"json.loads": RANKS},
    "shardtrain/islands/membership.py": {".read_text": SYSTEM, ".unlink": "shared memory that this job made"},
    "shardtrain/islands/agreement.py": {"json.loads": OWN},
    "shardtrain/islands/watchdog/diagnosis.py": {".read_text": SYSTEM, "json.loads": RANKS},
    "shardtrain/islands/watchdog/step_file.py": {
        ".read_bytes": RANKS, "mmap.mmap": "a file that this rank makes", "os.open": "with O_NOFOLLOW",
    },
    "shardtrain/launch/log_folder.py": {".open(x)": "a file that is there stays"},
    "shardtrain/launch/rank.py": {".open(rb)": RANKS, ".read_text": RANKS, ".unlink": LAUNCHED},
    "shardtrain/launch/rank_end.py": {".open(rb)": RANKS, ".read_text": RANKS, "json.loads": RANKS},
    "shardtrain/launch/supervise.py": {
        ".read_bytes": SYSTEM, ".read_text": RANKS, ".unlink": LAUNCHED, "json.loads": RANKS,
    },
    "shardtrain/report/plots/figure.py": {".savefig": "into an open file"},
    "shardtrain/report/trace.py": {"gzip.GzipFile": "a trace that this run wrote"},
    "shardtrain/system/array_file.py": {"numpy.fromfile": BOUNDED},
    "shardtrain/system/atomic_write.py": dict.fromkeys(
        (".rename", ".unlink", "os.fdopen", "os.link", "os.open", "shutil.rmtree"), WRITER
    ),
    "shardtrain/system/cgroup.py": {".read_text": SYSTEM},
    "shardtrain/system/host.py": {".read_bytes": SYSTEM, ".read_text": SYSTEM},
    "shardtrain/system/plain_text.py": {
        ".read_bytes": "a file or a pipe that the command line names", "csv.reader": OPENED,
    },
    "shardtrain/system/program_cache.py": {".read_text": SYSTEM, ".touch": CACHED, ".unlink": CACHED},
    "shardtrain/system/run_lock.py": {"os.open": "the lock, in which nothing is written; with O_NOFOLLOW"},
    "shardtrain/system/standard_streams.py": {"os.fdopen": "a standard stream", "os.open": "/dev/null"},
    "shardtrain/system/untrusted_data.py": {"json.loads": BOUNDED, "tomllib.loads": BOUNDED},
    "shardtrain/system/untrusted_files.py": {"json.loads": BOUNDED, "os.fdopen": BOUNDED, "os.open": BOUNDED},
    "shardtrain/trainer/resume.py": {"json.loads": OWN},
    "shardtrain/trainer/run_folder.py": {
        ".open(rb)": "the last byte of a file that it appends to",
        ".rmdir": "an empty folder",
        ".unlink": "the mark that it made",
    },
    "shardtrain/trainer/run_checkpoints.py": {"json.loads": OWN},
    "shardtrain/trainer/prepared_run.py": {"json.loads": OWN},
}  # fmt: skip
"""File -> how it reads, writes or deletes -> why that is no file of a stranger, or is bounded."""


def test_every_file_is_accessed_by_our_readers_and_writers_or_a_reason_is_listed():
    found = {(path, access) for path, source in package_files() for access in file_accesses(source)}
    listed = {(path, access) for path, accesses in ALLOWED.items() for access in accesses}
    assert not found - listed, (
        "use system/untrusted_files.py, untrusted_data.py, array_file.py, atomic_write.py"
    )
    assert not listed - found, "these are not used any more: take them from the list"


@pytest.mark.parametrize(
    ("source", "accesses"),
    [
        ("import json\njson.loads(a)", ["json.loads"]),
        ("import json as j\nmap(j.loads, lines)", ["json.loads"]),
        ("from json import loads as parse\nparse(a)", ["json.loads"]),
        ("import numpy as np\nnp.load(path)", ["numpy.load"]),
        ("import os\nos.replace(a, b)", ["os.replace"]),
        ("from shutil import copy2\ncopy2(a, b)", ["shutil.copy2"]),
        ("path.read_text()", [".read_text"]),
        ("remove = path.unlink", [".unlink"]),
        ("open(path)", ["open(r)"]),
        ("open(path, 'w')", ["open(w)"]),
        ("path.open(mode='r+')", [".open(r+)"]),
        ("path.open(mode)", [".open(?)"]),
        ("figure.savefig(path)", [".savefig"]),
        ("import os, shutil\nos.path.exists(a); shutil.which(a); read_text(path); replace_file(path, a)", []),
    ],
)
def test_an_access_that_goes_round_is_seen(source, accesses):
    assert list(file_accesses(source)) == accesses


def write_new(path: Path) -> None:
    with new_file(path) as file:
        file.write(b"ours")


WRITERS = {
    "new_file": write_new,
    "replace_file": lambda path: replace_file(path, b"ours"),
    "picture": lambda path: save_figure(make_figure("a picture", (1, 1)), path.with_suffix(".png")),
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
