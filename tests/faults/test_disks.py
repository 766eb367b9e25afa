"""Disks that are full, read-only or lost while a run goes on; mounts in a namespace of their own."""

import os
import re
import signal
import subprocess
import time
from itertools import repeat
from pathlib import Path

import pytest

from shardtrain.checkpoints.reader import find_readers
from shardtrain.report.sinks.json_lines import read_jsonl

NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
FULL = "No space left on device"


@pytest.fixture(scope="module")
def mounted(make_lives):
    """Lives that see a disk of 4 MB at `small`."""
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this kernel lets nobody mount a file system of his own: {tried.stderr.strip()}")
    with make_lives(*NAMESPACE) as lives:
        lives.shell("mkdir small && mount -t tmpfs -o size=4m none small")
        yield lives


@pytest.fixture
def small(mounted):
    """That disk, empty, as this process sees it."""
    mounted.shell("rm -rf small/* run fast; true")
    yield Path(f"/proc/{mounted.pid}/root{mounted.folder}/small")
    mounted.end()


def fill(folder):
    with (folder / "full").open("wb", buffering=0) as file:
        with pytest.raises(OSError, match=FULL):
            list(map(file.write, repeat(bytes(1 << 12), 1 << 12)))


def steps(folder):
    return [reader.step for reader in find_readers(folder)]


def train(*words):
    return ["train", "tiny.py", *map(str, words)]


def stopped(lives, pid):
    """Its exit code, once it has been asked to end."""
    os.kill(pid, signal.SIGTERM)
    return lives.ended()


def until_said(lives, text, seconds=300):
    deadline = time.monotonic() + seconds
    while text not in lives.printed():
        assert time.monotonic() < deadline, lives.printed()[-3000:]
        time.sleep(0.02)


def test_a_run_goes_on_while_the_disk_is_full_and_saves_again_when_it_is_not(mounted, small):
    pid = mounted.begin(words=train("--run-dir", "small/run"))
    mounted.until("saved")
    fill(small)
    # a line of metrics may still fit where a checkpoint does not
    last = 0
    while "metrics.jsonl cannot be written" not in mounted.printed():
        last = int(mounted.until("saving")[0])
    (kept,) = steps(small / "run/checkpoints")[-1:]
    assert kept < last
    (small / "full").unlink()
    saved = int(mounted.until("saved")[0])
    assert saved >= last
    assert stopped(mounted, pid) == 128 + signal.SIGTERM
    said = mounted.printed()
    assert re.search(rf"WARNING: step \d+ is not saved in \S+ \(step {kept} is untouched\): .*{FULL}", said)
    assert "WARNING: small/run/metrics.jsonl cannot be written: [Errno 28]" in said
    assert "small/run/metrics.jsonl is written again" in said
    written = [line["step"] for line in read_jsonl(small / "run/metrics.jsonl")]
    assert written == list(range(1, int(written[-1]) + 1))
    assert steps(small / "run/checkpoints")[-1] == written[-1] >= saved
    assert not list((small / "run/checkpoints").glob("*.partial"))


def test_a_last_save_that_fails_ends_with_code_1_and_why(mounted, small):
    code, said = mounted.run(*train("--run-dir", "small/run", "--steps", 2))
    assert code == 0, said
    fill(small)
    code, said = mounted.run(*train("--run-dir", "small/run", "--steps", 3))
    assert code == 1, said
    assert re.search(rf"shardtrain train: step 3 is not saved in \S+ \(step 2 is untouched\): .*{FULL}", said)
    assert "Free space, or use another folder." in said
    assert steps(small / "run/checkpoints") == [2]
    (small / "full").unlink()
    code, said = mounted.run(*train("--run-dir", "small/run", "--steps", 3))
    assert code == 0, said
    assert "resumed from step 2" in said
    assert steps(small / "run/checkpoints") == [2, 3]


def test_a_folder_that_becomes_read_only(mounted, small):
    pid = mounted.begin(words=train())
    mounted.until("saved")
    folder = "run/checkpoints"
    # busy while a save has a file open
    again = f"for i in $(seq 200); do mount -o remount,ro,bind {folder} && exit; sleep 0.02; done; exit 1"
    mounted.shell(f"mount --bind {folder} {folder} && ({again}) 2>/dev/null")
    until_said(mounted, "Read-only file system")
    mounted.shell(f"umount {folder}")
    failed = int(mounted.until("saving")[0])
    assert int(mounted.until("saved")[0]) >= failed
    assert stopped(mounted, pid) == 128 + signal.SIGTERM
    said = mounted.printed()
    assert re.search(r"WARNING: step \d+ is not saved in \S+ \(step \d+ is untouched\): .*Read-only", said)


@pytest.mark.full
def test_a_fast_disk_that_is_full_or_cannot_be_made_is_given_up(mounted, small):
    for fast, why in (("small/fast", FULL), ("text.txt/fast", "NotADirectoryError")):
        mounted.shell("rm -rf run; true")
        fill(small)
        code, said = mounted.run(*train("--checkpoints.fast", fast, "--steps", 5))
        assert code == 0, said
        (line,) = [line for line in said.splitlines() if "the fast disk" in line]
        assert line.startswith(f"WARNING: the fast disk {mounted.folder}/{fast}/")
        assert why in line
        assert line.endswith(f"From now on saves go straight to {mounted.folder}/run/checkpoints")
        assert steps(mounted.folder / "run/checkpoints") == [4, 5]


@pytest.mark.full
def test_a_shared_disk_that_is_full_while_the_fast_one_is_not(mounted, small):
    words = train("--run-dir", "small/run", "--checkpoints.fast", "fast", "--steps")
    code, said = mounted.run(*words, 2)
    assert code == 0, said
    fill(small)
    code, said = mounted.run(*words, 7)
    assert code == 1, said
    (fast,) = (mounted.folder / "fast").iterdir()
    shared = f"{mounted.folder}/small/run/checkpoints"
    text = rf"WARNING: step 7 is only on the fast disk \({fast}\); it could not be copied to {shared}: "
    assert re.search(rf"{text}.*{FULL}", said), said
    assert f"shardtrain train: step 7 is only on the fast disk ({fast}). Free space in {shared}, and" in said
    assert steps(small / "run/checkpoints") == [2]
    assert steps(fast) == [6, 7]

    # the newest is on the fast disk, and comes to the other as soon as that has room
    (small / "full").unlink()
    code, said = mounted.run(*words, 7)
    assert code == 0, said
    assert "resumed from step 7" in said
    assert steps(small / "run/checkpoints") == [2, 7]
