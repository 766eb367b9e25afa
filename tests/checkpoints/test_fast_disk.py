"""A disk that runs and people share: each run has a folder of its own there, and takes no other."""

import os
from pathlib import Path

import jax.numpy as jnp
import pytest

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.fast_disk import claim, name_fast_folder
from shardtrain.checkpoints.policy import CheckpointPolicy


def save(folder: Path, disk: Path, step: int) -> None:
    with Checkpoints(folder, CheckpointPolicy(fast=disk)) as checkpoints:
        checkpoints.save(step, {"w": jnp.full(3, step, jnp.float32)}, {})


def test_runs_whose_names_differ_in_a_slash_have_folders_of_their_own(tmp_path):
    disk = tmp_path / "fast"
    assert name_fast_folder(disk, Path("/r/a/b")) != name_fast_folder(disk, Path("/r/a-b"))
    save(tmp_path / "a" / "b", disk, 10)
    (tmp_path / "a-b").mkdir()
    with Checkpoints(tmp_path / "a-b", CheckpointPolicy(fast=disk)) as other:
        assert other.steps() == []
        assert other.restore({"w": jnp.zeros(3)}) is None
    (tmp_path / "link").symlink_to("a")
    with Checkpoints(tmp_path / "link" / "b", CheckpointPolicy(fast=disk)) as same:
        assert same.steps() == [10]
    (own,) = disk.iterdir()
    assert oct(own.stat().st_mode & 0o777) == "0o700"
    assert (own / "run.txt").read_text() == str(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda own: own.chmod(0o770), "others may use it: its mode is 770; chmod 700 it"),
        (lambda own: (own / "run.txt").write_text("/r/other"), "it belongs to the run of /r/other"),
        (lambda own: (own / "run.txt").unlink(), "it has no run.txt with its owner"),
        (lambda own: own.symlink_to(own.rename("x")), "it is a link, not a folder"),
    ],
)
def test_a_folder_that_is_not_our_own_is_refused(spoil, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fast = name_fast_folder(tmp_path, tmp_path / "run")
    claim(fast, tmp_path / "run")
    (fast / "step_00000001").mkdir()
    claim(fast, tmp_path / "run")
    spoil(fast)
    with pytest.raises(ValueError, match="checkpoints would go to") as error:
        Checkpoints(tmp_path / "run", CheckpointPolicy(fast=tmp_path))
    assert words in str(error.value)
    assert "Remove it, or give another --checkpoints.fast" in str(error.value)


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    fast = name_fast_folder(tmp_path, tmp_path / "run")
    claim(fast, tmp_path / "run")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match=r"it belongs to user \d+, and this is user 12345"):
        claim(fast, tmp_path / "run")
