"""A file that is added to on a disk that is full for a while."""

import os

import pytest

from shardtrain.system import log_file
from shardtrain.system.log_file import LogFile


class Disk:
    """Takes so many bytes, through the file it stands for."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(28, os.strerror(28))
        taken = self.file.write(data[: self.room])
        self.room -= taken
        return taken

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.fixture
def make(tmp_path):
    def make(room, said):
        file = LogFile(tmp_path / "log", append=False, report=said.append)
        file._file = Disk(file._file, room)  # type: ignore[assignment]
        return file, file._file

    return make


def test_what_a_full_disk_did_not_take_comes_later_and_in_order(make):
    said: list[str] = []
    file, disk = make(7, said)
    for line in (b"one\n", b"two\n", b"three\n"):
        file.write(line)
    assert file.path.read_bytes() == b"one\ntwo"
    assert len(said) == 1
    assert said[0].startswith(f"WARNING: {file.path} cannot be written: [Errno 28]")
    disk.room = 100
    file.write(b"four\n")
    assert file.path.read_bytes() == b"one\ntwo\nthree\nfour\n"
    assert said[1:] == [f"{file.path} is written again, from where it stopped"]
    file.close()
    file.close()
    assert len(said) == 2


def test_what_is_lost_at_the_end_is_told(make, monkeypatch):
    monkeypatch.setattr(log_file, "MOST_WAITING_BYTES", 8)
    said: list[str] = []
    file, _ = make(0, said)
    for line in (b"12345\n", b"too long for it\n"):
        file.write(line)
    file.close()
    assert said[1:] == [f"WARNING: 22 bytes of {file.path} could not be written, and are lost"]


def test_a_file_that_is_deleted_is_made_anew_with_its_folder(tmp_path):
    said: list[str] = []
    path = tmp_path / "run" / "log"
    path.parent.mkdir()
    file = LogFile(path, append=False, report=said.append)
    file.write(b"one\n")
    path.unlink()
    path.parent.rmdir()
    file.write(b"two\n")
    file.write(b"three\n")
    file.close()
    assert path.read_bytes() == b"two\nthree\n"
    assert said == [f"WARNING: {path} was deleted; it is created again, with the lines from now on"]


def test_a_file_that_cannot_be_made_anew_yet_comes_later_and_whole(tmp_path):
    said: list[str] = []
    path = tmp_path / "run" / "log"
    path.parent.mkdir()
    file = LogFile(path, append=False, report=said.append)
    path.unlink()
    path.parent.rmdir()
    (tmp_path / "run").touch()  # in the way of the folder
    file.write(b"one\n")
    file.write(b"two\n")
    (tmp_path / "run").unlink()
    file.write(b"three\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"
    assert "cannot be written" in said[0]
    assert "was deleted" in said[1]
    assert "is written again" in said[2]
