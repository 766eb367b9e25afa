"""What is deleted of a step that several save, and what is copied from a fast disk."""

import threading
from pathlib import Path

import jax.numpy as jnp
import pytest

from shardtrain.checkpoints import manifest as manifests
from shardtrain.checkpoints import paths
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.discover import discover
from shardtrain.checkpoints.manifest_entries import WHOLE, Manifest, WriterPart
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.retention import Mirror, delete_old


def write(folder: Path, step: int, part: WriterPart = WHOLE, seconds: float = 1.0, save_id: str = "") -> None:
    path = paths.step_folder(folder, step, part)
    (path / "arrays").mkdir(parents=True)
    (path / "arrays" / "data").write_text(f"{step}{part}")
    extra = {"saved": f"{step}{part}"}
    manifest = Manifest(
        step=step,
        orbax_version="",
        files={},
        leaves={},
        extra=extra,
        part=part,
        saved_seconds=seconds,
        save_id=save_id,
    )
    manifests.write_manifest(path, manifest)


def names(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("step_000000") for path in folder.glob("step_*"))


def of_one(name, look):
    return [look(0)]


def test_a_writer_deletes_its_own_parts_and_only_what_all_have_left_behind(tmp_path):
    for step in (10, 20, 30):
        for index in (0, 1):
            if (step, index) != (30, 1):  # it is still being written
                write(tmp_path, step, WriterPart(index, 2))
    assert delete_old(tmp_path, CheckpointPolicy(keep=1), WriterPart(0, 2), newest=20) == []
    assert names(tmp_path) == ["10.part-1-of-2", "20.part-0-of-2", "20.part-1-of-2", "30.part-0-of-2"]
    delete_old(tmp_path, CheckpointPolicy(keep=1), WriterPart(1, 2), newest=20)
    assert names(tmp_path) == ["20.part-0-of-2", "20.part-1-of-2", "30.part-0-of-2"]
    # the newest of which all parts are there
    assert discover([tmp_path], None, of_one).step == 20


def test_what_another_number_of_writers_left_goes_by_the_same_policy(tmp_path):
    for index in range(3):
        write(tmp_path, 10, WriterPart(index, 3))
        write(tmp_path, 20, WriterPart(index, 3))
    write(tmp_path, 30)
    delete_old(tmp_path, CheckpointPolicy(keep=2), WriterPart(0, 1), newest=30)
    assert names(tmp_path) == ["20.part-0-of-3", "20.part-1-of-3", "20.part-2-of-3", "30"]
    # the same step again, saved by one: the newer one is taken, and the other goes
    write(tmp_path, 20, seconds=2.0)
    chosen = discover([tmp_path], 20, of_one)
    assert (chosen.step, chosen.num_parts) == (20, 1)
    delete_old(tmp_path, CheckpointPolicy(keep=2), WriterPart(0, 1), newest=30)
    assert names(tmp_path) == ["20", "30"]


def test_a_step_with_a_lost_part_is_skipped(tmp_path):
    for index in (0, 2):
        write(tmp_path, 20, WriterPart(index, 3))
    write(tmp_path, 10)
    chosen = discover([tmp_path], None, of_one)
    assert chosen.step == 10
    assert chosen.skipped == ["step 20: unfinished: no island sees parts [1] of 3"]
    assert chosen.broken == {20}


def test_steps_of_which_no_host_has_all_parts_are_never_taken_for_a_new_run(tmp_path):
    for step in (10, 20):
        write(tmp_path, step, WriterPart(0, 2))
    with pytest.raises(ValueError, match=r"steps \[10, 20\] in .* were saved in parts.*another --run-dir"):
        discover([tmp_path], None, of_one)


def test_parts_of_two_saves_of_a_step_are_no_whole_one(tmp_path):
    """The run went back and saves step 20 anew; one of two was killed before it did."""
    for index in (0, 1):
        write(tmp_path, 10, WriterPart(index, 2), save_id="before")
        write(tmp_path, 20, WriterPart(index, 2), save_id="after" if index == 0 else "before")
    assert discover([tmp_path], None, of_one).step == 10


def test_islands_with_disks_of_their_own_choose_what_all_parts_of_which_somebody_sees(tmp_path):
    """Three islands, two disks: the second part of step 30 is broken, and only the last island sees it."""
    one, two = tmp_path / "one", tmp_path / "two"
    for step in (20, 30):
        write(one, step, WriterPart(0, 2))
        write(two, step, WriterPart(1, 2))
    write(one, 40, WriterPart(0, 2))
    (paths.step_folder(two, 30, WriterPart(1, 2)) / "arrays" / "data").write_text("other")
    disks = [one, one, two]
    calls: list[list] = []

    def run(island: int) -> None:
        """Each island calls `choose` itself; what they share is put together by a barrier."""

        def share(name, look):
            shared[name][island] = look(island)
            barrier.wait()
            return list(shared[name])

        calls.append([island, discover([disks[island]], None, share)])

    shared: dict[str, list] = {
        name: [None] * 3 for name in ("checkpoints", "verify step 30", "verify step 20")
    }
    barrier = threading.Barrier(3, timeout=300)
    threads = [threading.Thread(target=run, args=(island,)) for island in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [chosen for _, chosen in sorted(calls, key=lambda call: call[0])]
    assert found[0] == found[1] == found[2]
    assert found[0].step == 20
    assert found[0].extra == {"saved": "20.part-0-of-2"}
    assert found[0].broken == {30, 40}
    assert any("step_00000030.part-1-of-2: broken" in line for line in found[0].skipped)


def test_parts_are_deleted_when_all_have_the_newer_ones(tmp_path):
    state = {"w": jnp.zeros(3)}
    with Checkpoints(tmp_path, CheckpointPolicy(keep=1), WriterPart(1, 2)) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, state, {})
            checkpoints.wait()
        # the other one may have step 10 alone
        assert names(tmp_path) == ["10.part-1-of-2", "20.part-1-of-2"]
        checkpoints.confirm(20)
    assert names(tmp_path) == ["20.part-1-of-2"]


def test_a_fast_disk_is_copied_to_the_run_folder_and_read_first(tmp_path):
    fast, shared = tmp_path / "fast", tmp_path / "run" / "checkpoints"
    policy = CheckpointPolicy(keep=5, fast=fast)
    with Checkpoints(shared, policy) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, {"w": jnp.full(3, step, jnp.float32)}, {})
            checkpoints.wait()
    (own,) = fast.iterdir()
    assert names(own) == ["20", "30"]
    assert "30" in names(shared)
    assert not any("partial" in name for name in names(shared))
    # whole where it is: the copy is as good as the first
    for folders in ([own, shared], [shared]):
        assert discover(folders, None, of_one).step == 30
    # another host has another fast disk
    with Checkpoints(shared, CheckpointPolicy(fast=tmp_path / "other")) as checkpoints:
        restored = checkpoints.restore({"w": jnp.zeros(3)})
    assert restored is not None
    assert restored.state["w"][0] == 30


def test_a_copy_that_fails_is_told_and_the_fast_one_is_taken(tmp_path):
    fast, shared = tmp_path / "fast", tmp_path / "run"
    shared.write_text("a file is in its place")
    write(fast, 10)
    mirror = Mirror(fast, shared, CheckpointPolicy(), WHOLE)
    mirror.copy(10)
    (note,) = mirror.close()
    assert note.startswith("WARNING: step 10 is only on the fast disk")
    assert str(shared) in note
    assert discover([fast, shared], None, of_one).step == 10


def test_a_wrong_name_is_no_step(tmp_path):
    for name in ("step_1", "step_00000010.part-1", "step_new", "step_00000010.part-1-of-2.partial"):
        (tmp_path / name).mkdir()
    assert paths.find_finished_steps(tmp_path) == {}
    write(tmp_path, 5)
    (paths.step_folder(tmp_path, 5) / "arrays" / "data").unlink()
    with pytest.raises(ValueError, match="every checkpoint"):
        discover([tmp_path], None, of_one)
