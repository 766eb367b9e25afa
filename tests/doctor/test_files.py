"""Files: real probes of a real folder, and what is made of those that fail, are slow, full or not shared."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from shardtrain.doctor.check import RankContext, SingleProcess
from shardtrain.doctor.files import (
    evaluate,
    find_mount,
    find_nearest_folder,
    is_locked,
    probe_lock,
    run_probes,
)
from shardtrain.doctor.runner import CHECKS, collect_in_thread
from shardtrain.islands.rank_environment import find_rank_environment

GIB = 2**30
PROBES = {
    "rename": {"replaces": True, "moves_folders": True},
    "fsync": {"file_seconds": 0.001, "folder_seconds": 0.002},
    "lock": {"seen": True},
    "small files": {"create_seconds": 1e-5, "stat_seconds": 1e-6},
    "write": {"bytes_per_second": 1e9},
}


def rank(probes=None, **changes):
    return {
        "path": "runs",
        "base": "/data/runs",
        "there": True,
        "error": None,
        "space": {"free_bytes": 100 * GIB, "size_bytes": 200 * GIB, "free_inodes": 10**6},
        "mount": {"type": "ext4", "source": "/dev/sda"},
        "probes": {**PROBES, **(probes or {})},
        **changes,
    }


def here(folder, quick=True):
    alone = SingleProcess("a")
    return RankContext(
        environment=find_rank_environment({}), hosts=("a",), control=alone, comm=None, environ={},
        run_dir=folder, quick=quick, given_cores=(),
    )  # fmt: skip


def test_a_real_folder_is_well_and_nothing_is_left_in_it(told, by_what, tmp_path):
    answer = collect_in_thread(CHECKS["files"], here(tmp_path / "not" / "there", quick=False))
    assert answer["failed"] is None
    assert list(tmp_path.iterdir()) == []
    rows = by_what(evaluate(told([answer["facts"]], "a")))
    assert rows.keys() == {"run folder", "space", "rename", "fsync", "lock", "small files", "write"}
    assert [what for what, row in rows.items() if row.status == "wrong"] == []
    assert rows["run folder"].finding.startswith(f"{tmp_path} (")
    assert "does not exist yet) on " in rows["run folder"].finding


def test_quick_writes_no_large_file(told, by_what, tmp_path):
    answer = collect_in_thread(CHECKS["files"], here(tmp_path))
    assert "write" not in by_what(evaluate(told([answer["facts"]], "a")))


def test_a_file_in_the_place_of_the_folder_is_wrong(told, by_what, tmp_path):
    (tmp_path / "file").touch()
    answer = collect_in_thread(CHECKS["files"], here(tmp_path / "file"))
    row = by_what(evaluate(told([answer["facts"]], "a")))["run folder"]
    assert row.status == "wrong"
    assert row.fix.startswith("a file is in its place")


def test_what_a_probe_cannot_do_is_in_its_answer(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", full)
    found = run_probes(tmp_path, with_large=False)
    assert found["fsync"] == {"error": "EDQUOT: Disk quota exceeded"}
    assert found["rename"] == {"replaces": True, "moves_folders": True}


def test_locks_are_seen_by_another_process(tmp_path):
    assert probe_lock(tmp_path) == {"seen": True}
    assert is_locked(tmp_path / "lock") == {"locked": False}
    holder = (
        "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path / "lock")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert is_locked(tmp_path / "lock") == {"locked": True}
    child.communicate()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, told, by_what):
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
    row = by_what(evaluate(told([rank({"lock": probe_lock(tmp_path)})], "a")))["lock"]
    assert (row.status, row.finding) == ("warning", "a lock is not seen by another process")


@pytest.mark.parametrize(
    ("error", "do"),
    [
        ("EROFS: Read-only file system", "it is mounted read-only"),
        ("EACCES: Permission denied", "you may not write there"),
        ("ENOSPC: No space left on device", "it is full"),
        ("EDQUOT: Disk quota exceeded", "your quota is used up"),
        ("EIO: Input/output error", "the disk or the file server fails"),
        ("EXDEV: Invalid cross-device link", "give --run-dir a folder on another file system"),
    ],
)
def test_what_to_do_depends_on_the_error(told, by_what, error, do):
    closed = rank(error=error)
    del closed["probes"]
    row = by_what(evaluate(told([closed], "a")))["run folder"]
    assert (row.status, row.finding) == ("wrong", f"/data/runs cannot be written: {error}")
    assert row.fix.startswith(do)
    row = by_what(evaluate(told([rank({"small files": {"error": error}})], "a")))["small files"]
    assert (row.status, row.finding) == ("wrong", f"fails: {error}")
    assert row.fix.startswith(do)


@pytest.mark.parametrize(
    ("probes", "what", "verdict", "do"),
    [
        ({"rename": {"replaces": False, "moves_folders": True}}, "rename", "wrong", "finished by a rename"),
        ({"fsync": {"file_seconds": 0.5, "folder_seconds": 0.0}}, "fsync", "warning", "save less often"),
        (
            {"small files": {"create_seconds": 0.2, "stat_seconds": 0.1}},
            "small files",
            "warning",
            "slow with many",
        ),
        ({"write": {"bytes_per_second": 10e6}}, "write", "warning", "10 GB takes 17 minutes"),
    ],
)
def test_slow_and_odd_file_systems(told, by_what, probes, what, verdict, do):
    row = by_what(evaluate(told([rank(probes)], "a")))[what]
    assert row.status == verdict
    assert do in row.fix


@pytest.mark.parametrize("space", [{"free_bytes": 24 * 10**8 // 10}, {"free_inodes": 12}])
def test_little_space_says_how_much_it_holds(told, by_what, space):
    room = {"free_bytes": 100 * GIB, "size_bytes": 200 * GIB, "free_inodes": None, **space}
    row = by_what(evaluate(told([rank(space=room)], "a")))["space"]
    assert row.status == "warning"
    assert f"hold two of {room['free_bytes'] // 24:,} parameters" in row.fix


def test_a_file_system_that_does_not_last_is_a_note(told, by_what):
    memory = {"type": "tmpfs", "source": "tmpfs"}
    row = by_what(evaluate(told([rank(mount=memory)], "a")))["run folder"]
    assert row.status == "note"
    assert "lost when the machine" in row.fix


def shared(told, unseen, *others):
    facts = [rank(unseen=unseen), *(rank(sees_seconds=seconds, sees_lock=lock) for seconds, lock in others)]
    return evaluate(told(facts, "abc"[: len(facts)]))


def test_a_folder_that_is_not_the_same_on_all_hosts_is_wrong(told, by_what):
    row = by_what(shared(told, [1], (None, False), (0.1, True)))["shared"]
    assert (row.status, row.finding) == (
        "wrong",
        "rank 1 and rank 0 do not see each other's files within 10 s",
    )
    assert "a path on a shared file system" in row.fix
    # seen one way only
    assert by_what(shared(told, [2], (0.1, True), (0.1, True)))["shared"].finding.startswith(
        "rank 2 and rank 0"
    )


def test_a_shared_folder_is_well_and_its_lock_is_looked_at(told, by_what):
    row = by_what(shared(told, [], (0.002, True), (1.5, True)))["shared"]
    assert (row.status, row.finding) == (
        "ok", "all 3 ranks see the same folder, a new file within 1.5 s, and its lock"
    )  # fmt: skip
    row = by_what(shared(told, [], (0.002, True), (1.5, False)))["shared"]
    assert row.status == "warning"
    assert row.finding.endswith("the lock of rank 0 is not seen by rank 2")


def test_mounts_and_folders_are_found(tmp_path):
    mounts = "a / ext4 rw 0 0\nb /da tmpfs rw 0 0\nc /data\\040x nfs4 ro 0 0\nd / overlay rw 0 0\n"
    assert find_mount(find_nearest_folder(tmp_path) / "x", mounts)["type"] == "overlay"
    assert find_mount(type(tmp_path)("/data x/y"), mounts) == {
        "type": "nfs4",
        "source": "c",
    }
    assert find_nearest_folder(tmp_path / "a" / "b") == tmp_path.resolve()
