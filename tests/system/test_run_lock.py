"""The lock of a folder, where its file is another user's."""

import errno
import fcntl
import os

import pytest

from shardtrain.system.run_lock import LOCK, LockHeld, hold_lock


@pytest.fixture(params=[errno.EACCES, errno.EPERM, errno.EROFS])
def readable_only(request, monkeypatch):
    """No file can be opened for writing (root, who may run the tests, can open any)."""
    given = os.open

    def refuse(path, flags, mode=0o777):
        if flags & os.O_RDWR:
            raise OSError(request.param, os.strerror(request.param))
        return given(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("on_nfs", [False, True])
def test_a_lock_that_can_only_be_read_holds(on_nfs, readable_only, tmp_path, monkeypatch):
    lock = fcntl.flock

    def nfs(file, operation):
        if operation & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, "")
        lock(file, operation)

    with (tmp_path / LOCK).open("w") as file:
        lock(file, fcntl.LOCK_EX)
        if on_nfs:
            monkeypatch.setattr(fcntl, "flock", nfs)
        with pytest.raises(LockHeld), hold_lock(tmp_path):
            pass
        lock(file, fcntl.LOCK_UN)
        with hold_lock(tmp_path):
            pass


def test_without_a_lock_that_can_be_read_there_is_none(readable_only, tmp_path):
    with hold_lock(tmp_path):
        assert list(tmp_path.iterdir()) == []
