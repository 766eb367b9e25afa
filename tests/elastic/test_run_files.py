"""Files of an elastic run: one winner of an epoch, late files, keys, signs of life, checkpoints."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardtrain.elastic.history import list_members
from shardtrain.elastic.run_files import RunFiles

PROPOSALS = Path(__file__).parents[1] / "programs" / "elastic_proposals.py"
NUM_PROCESSES, NUM_THREADS, NUM_EPOCHS = 4, 4, 10


def test_one_of_many_proposals_wins(tmp_path):
    numbers = [str(NUM_THREADS), str(NUM_EPOCHS)]
    words = [sys.executable, str(PROPOSALS), str(tmp_path)]
    processes = [
        subprocess.Popen([*words, str(i), *numbers], stdout=subprocess.PIPE, text=True)
        for i in range(NUM_PROCESSES)
    ]
    outputs = [each.communicate(timeout=180)[0] for each in processes]
    assert [each.returncode for each in processes] == [0] * NUM_PROCESSES
    found = [tuple(text.encode() for text in each) for output in outputs for each in json.loads(output)]
    files = RunFiles(tmp_path)
    assert len(found) == NUM_PROCESSES * NUM_THREADS
    assert set(found) == {tuple(files.read(number) for number in range(1, NUM_EPOCHS + 1))}
    assert files.newest() == NUM_EPOCHS
    assert files.read(NUM_EPOCHS + 1) is None
    assert len(os.listdir(tmp_path / "epochs")) == NUM_EPOCHS  # no temporary file
    assert all(path.stat().st_nlink == 1 for path in (tmp_path / "epochs").iterdir())


def test_a_file_that_exists_is_waited_for(tmp_path, monkeypatch):
    files = RunFiles(tmp_path, late_seconds=5.0)
    files.propose(1, b"first")
    read, num_reads = RunFiles.read, []

    def read_late(self, number):
        num_reads.append(number)
        return read(self, number) if len(num_reads) > 3 else None

    monkeypatch.setattr(RunFiles, "read", read_late)
    assert files.propose(1, b"second") == b"first"
    monkeypatch.setattr(RunFiles, "read", lambda self, number: None)
    with pytest.raises(TimeoutError, match=r"1\.json exists, but cannot be read within 0\.1 s"):
        RunFiles(tmp_path, late_seconds=0.1).propose(1, b"second")


def test_the_newest_epoch_is_found_though_the_listing_is_old(tmp_path, monkeypatch):
    files = RunFiles(tmp_path)
    assert files.newest() == 0
    for number in (1, 2, 3):
        files.propose(number, b"x")
    (tmp_path / "epochs" / "note.json").write_text("no epoch")
    assert files.newest() == 3
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "1.json"]))
    assert files.newest() == 3


def test_a_folder_of_keys_that_others_can_use_is_refused(tmp_path):
    RunFiles(tmp_path)
    keys = tmp_path / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    for mode in (0o750, 0o702):
        keys.chmod(mode)
        with pytest.raises(PermissionError, match=f"has mode {mode:o} .*: chmod 700 {keys}"):
            RunFiles(tmp_path)
    keys.chmod(0o700)


def test_certificates_are_listed_once(tmp_path):
    files, others = RunFiles(tmp_path), RunFiles(tmp_path)
    assert others.read_certificate("a") is None
    files.write_certificate("a", b"that of a")
    assert others.read_certificate("a") == "that of a"
    assert stat.S_IMODE((tmp_path / "keys" / "a.pem").stat().st_mode) == 0o600
    with pytest.raises(FileExistsError, match="needs a new name"):
        files.write_certificate("a", b"another")
    for name in ("", ".a", "a/b", "../a", "a\n"):
        with pytest.raises(ValueError, match="use letters, digits and dashes"):
            files.write_certificate(name, b"")
        with pytest.raises(ValueError, match="use letters, digits and dashes"):
            others.read_certificate(name)


def test_the_last_sign_of_life_counts(tmp_path):
    files = RunFiles(tmp_path)
    assert files.idle_seconds() == float("inf")
    files.touch_alive("a")
    files.touch_alive("b")
    assert files.idle_seconds() < 60
    past = time.time() - 1000
    os.utime(tmp_path / "alive" / "a", (past, past))
    assert files.idle_seconds() < 60
    os.utime(tmp_path / "alive" / "b", (past - 1000, past - 1000))
    assert 990 < files.idle_seconds() < 1100  # clocks of file systems are coarse
    files.touch_alive("b")
    assert files.idle_seconds() < 60


def test_a_checkpoint_of_an_older_epoch_is_not_committed(tmp_path):
    files = RunFiles(tmp_path)
    files.propose(1, b"first")
    for step in (20, 10):
        with files.new_checkpoint("a") as folder:
            (folder / "arrays").mkdir()
            (folder / "arrays" / "0").write_bytes(b"x")
            assert len(files.list_checkpoints()) == (step == 10)  # this one is not there yet
            assert files.commit_checkpoint(1, step, folder)
    files.propose(2, b"second")
    with files.new_checkpoint("a") as folder:
        assert not files.commit_checkpoint(1, 30, folder)
    with pytest.raises(RuntimeError), files.new_checkpoint("a") as folder:
        raise RuntimeError
    found = files.list_checkpoints()
    assert [(each.step, each.epoch) for each in found] == [(10, 1), (20, 1)]
    assert (found[0].folder / "arrays" / "0").read_bytes() == b"x"
    assert len(os.listdir(tmp_path / "checkpoints")) == 2


def test_a_checkpoint_that_another_chief_revokes_cannot_be_committed(tmp_path):
    """Also by one that has looked at the epochs already."""
    files = RunFiles(tmp_path)
    files.propose(1, b"first")
    with files.new_checkpoint("a") as folder, files.new_checkpoint("b") as own, files.new_checkpoint("c"):
        (folder / "0").write_bytes(b"x")
        files.revoke_checkpoints("b", lambda names: names - {"c"})
        assert own.exists()
        # a later chief is not revoked
        assert sorted(os.listdir(tmp_path / "checkpoints")) == [".new.b", ".new.c"]
        with pytest.raises(FileNotFoundError):
            files.commit_checkpoint(1, 10, folder)
        assert files.commit_checkpoint(1, 10, own)
    assert os.listdir(tmp_path / "checkpoints") == ["step-10-epoch-1"]


def test_what_an_island_is_can_be_read_and_is_written_once(tmp_path):
    files = RunFiles(tmp_path)
    files.describe_member("a", {"host": "one", "mesh": {"data": 2}})
    files.describe_member("a", {"host": "another"})
    assert list_members(tmp_path) == {"a": {"host": "one", "mesh": {"data": 2}}}
    with pytest.raises(ValueError, match="use letters, digits and dashes"):
        files.describe_member("../a", {})
    (tmp_path / "members" / "b.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"b\.json is no JSON object"):
        list_members(tmp_path)
