"""Saving, resuming on another mesh, and every kind of damage: named, skipped, never loaded."""

import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.checkpoints import manifest as manifests
from shardtrain.checkpoints import paths
from shardtrain.checkpoints import restore as restoring
from shardtrain.checkpoints.checkpointer import Checkpoints, RestoredCheckpoint
from shardtrain.checkpoints.differences import Allow
from shardtrain.checkpoints.flatten import flatten
from shardtrain.checkpoints.policy import CheckpointPolicy, is_due, select_steps_to_delete
from shardtrain.checkpoints.save import SaveFailed

KEEP_ALL = CheckpointPolicy(keep=1000)
MESHES = {
    "fsdp=8": ((8,), ("fsdp",), ("fsdp", None)),
    "data=4,tensor=2": ((4, 2), ("data", "tensor"), (None, "tensor")),
    "one device": ((1,), ("data",), (None, None)),
}


class Counters(NamedTuple):
    step: jax.Array
    empty: dict[str, jax.Array]
    flags: tuple[jax.Array, ...]


def sharding(mesh_name: str, ndim: int) -> NamedSharding:
    shape, axes, spec = MESHES[mesh_name]
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: np.prod(shape)])
    return NamedSharding(mesh, PartitionSpec(*spec) if ndim == 2 else PartitionSpec())


def place(tree, mesh_name: str):
    return jax.tree.map(lambda x: jax.device_put(x, sharding(mesh_name, x.ndim)), tree)


def abstract(tree, mesh_name: str):
    def leaf(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(mesh_name, x.ndim))

    return jax.tree.map(leaf, tree)


def example_state(offset: float = 0.0):
    params = {
        "dense": {
            "kernel": jnp.arange(256, dtype=jnp.float32).reshape(16, 16) / 7 + offset,
            "a.b": jnp.ones(3),
        },
        "embed": (jnp.arange(128).reshape(8, 16) / 3 + offset).astype(jnp.bfloat16),
        "a/b": {0: jnp.full((2,), jnp.nan, jnp.float32)},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    counters = Counters(jnp.int32(7), {}, (jnp.array([True, False]), jnp.uint32(2**32 - 1)))
    return {"params": params, "optimizer": optimizer.init(params), "counters": counters}


def small_state(offset: float = 0.0):
    return {"w": jnp.arange(64.0) + offset, "b": jnp.float32(offset)}


def assert_same(restored, expected):
    assert jax.tree.structure(restored) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def saved_run(folder: Path, steps=(10, 20, 30), policy=KEEP_ALL) -> Path:
    with Checkpoints(folder, policy) as checkpoints:
        for step in steps:
            checkpoints.save(step, small_state(step), {"step": step})
    return folder


def resume(folder: Path, state=None):
    """What a new process finds: the restored run, and what it said."""
    said: list[str] = []
    with Checkpoints(folder, KEEP_ALL, report=said.append) as checkpoints:
        return checkpoints.restore(small_state() if state is None else state), said


def resumed_saying(folder: Path, state=None) -> tuple[RestoredCheckpoint, list[str]]:
    restored, said = resume(folder, state)
    assert restored is not None
    return restored, said


def resumed(folder: Path, state=None) -> RestoredCheckpoint:
    return resumed_saying(folder, state)[0]


def step_files(step_folder: Path) -> list[Path]:
    return sorted(path for path in step_folder.rglob("*") if path.is_file())


# Round trip


@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp=8", "data=4,tensor=2"), ("data=4,tensor=2", "one device"), ("one device", "fsdp=8")],
)
def test_state_comes_back_bitwise_on_any_mesh(tmp_path, source, target):
    state = place(example_state(), source)
    extra = {"data": {"epoch": 1, "index": 2**40}, "loss": [0.1, float("inf")], "name": "é", "none": None}
    with Checkpoints(tmp_path / "run" / "checkpoints", KEEP_ALL) as checkpoints:
        checkpoints.save(3, state, extra)
    wanted = abstract(state, target)
    with Checkpoints(tmp_path / "run" / "checkpoints", KEEP_ALL) as checkpoints:
        assert checkpoints.latest() == 3
        restored = checkpoints.restore(wanted)
    assert restored is not None
    assert (restored.step, restored.extra, restored.skipped) == (3, extra, ())
    assert_same(restored.state, state)
    for got, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding


@pytest.mark.parametrize("mesh_name", MESHES)
def test_donation_right_after_save_changes_nothing_that_is_saved(tmp_path, mesh_name):
    state = place({"w": jnp.arange(2.0**20).reshape(1024, 1024), "v": jnp.arange(2.0**20)}, mesh_name)
    expected = jax.tree.map(lambda x: np.array(x, copy=True), state)
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.5 + 1, tree), donate_argnums=0)
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, state, {})
        assert checkpoints.latest() is None, "the save is not in the background"
        for _ in range(4):
            state = step(state)
        jax.block_until_ready(state)
        checkpoints.wait()
        assert checkpoints.latest() == 1
        restored = checkpoints.restore(abstract(state, mesh_name))
    assert restored is not None
    assert_same(restored.state, expected)


def test_a_save_of_small_arrays_compiles_nothing(tmp_path):
    """A slice for each replica to write would be a program for every shape and place."""
    state = place({"w": jnp.ones((24, 40)), "v": jnp.ones(56)}, "data=4,tensor=2")
    compiled = []

    def heard(event, duration_secs, **about):
        if event.endswith("backend_compile_duration"):
            compiled.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
            checkpoints.save(1, state, {})
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    # Orbax's own record of the arrays is written as by default
    assert list(tmp_path.glob("*/**/array_metadatas/*"))
    assert compiled == []
    assert_same(resumed(tmp_path, abstract(state, "fsdp=8")).state, state)


def test_extra_is_that_of_the_moment_of_saving(tmp_path):
    extra = {"position": {"index": [1]}}
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, small_state(), extra)
        extra["position"]["index"].append(2)
    assert resumed(tmp_path).extra == {"position": {"index": [1]}}


def test_an_empty_or_absent_folder_is_a_new_run(tmp_path):
    assert resume(tmp_path / "absent") == (None, [])
    assert resume(tmp_path) == (None, [])


# What cannot be saved or restored


def test_all_that_cannot_be_saved_is_listed(tmp_path):
    state = {
        "a": np.ones(2),
        "b": 1.0,
        "key": jax.random.key(0),
        "none": jnp.zeros((0, 3)),
        "ok": jnp.ones(2),
        "weak": jnp.asarray(0.5),
    }
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        with pytest.raises(ValueError, match="cannot be saved") as error:
            checkpoints.save(1, state, {})
        assert str(error.value) == (
            "these leaves of the state cannot be saved; change them where the state is made:\n"
            "  - a: ndarray; use jnp.asarray\n"
            "  - b: float; use jnp.asarray\n"
            "  - key: typed key; use jax.random.key_data\n"
            "  - none: no elements, shape (0, 3); leave it out\n"
            "  - weak: weakly typed; use .astype('float32')"
        )
        with pytest.raises(ValueError, match="extra/rng: ndarray\n  - extra/when/0: set"):
            checkpoints.save(1, small_state(), {"rng": np.ones(2), "when": [{1}]})
        with pytest.raises(ValueError, match="several leaves; rename the keys of one:\n  - a/b"):
            checkpoints.save(1, {"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, {})
        with pytest.raises(ValueError, match="no arrays"):
            checkpoints.save(1, {}, {})
        with pytest.raises(ValueError, match="steps count from 0"):
            checkpoints.save(-1, small_state(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_not_new_is_refused(tmp_path):
    saved_run(tmp_path, [20])
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        for step in (20, 5):
            with pytest.raises(ValueError, match=f"step {step} cannot be saved.*holds step 20.*from step 21"):
                checkpoints.save(step, small_state(), {})
    assert_same(resumed(tmp_path).state, small_state(20))


def test_a_state_of_another_model_is_an_error_that_lists_every_difference(tmp_path):
    state = {"a": jnp.ones(2), "b": jnp.ones(3), "c": {"d": jnp.ones(4)}, "e": jnp.ones(1)}
    other = {
        "b": jnp.ones((3, 1)),
        "c": {"d": jnp.ones(4, jnp.bfloat16), "x": jnp.int32(0)},
        "e": jnp.ones(1),
    }
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        with pytest.raises(ValueError, match="another state") as error:
            checkpoints.restore(other)
    assert str(error.value).startswith(
        f"{tmp_path}/step_00000001 holds another state than this run has; use the model and optimizer"
    )
    assert str(error.value).endswith(
        " only the checkpoint has:\n"
        "  - a: saved float32 (2,), not asked for\n"
        "  - b: saved float32 (3,), asked for float32 (3, 1)\n"
        "  - c/d: saved float32 (4,), asked for bfloat16 (4,)\n"
        "  - c/x: asked for int32 (), not saved"
    )


def test_optimizer_state_of_bfloat16_is_read_as_float32(tmp_path):
    """As earlier versions saved it; parameters stay what they are."""

    def adam(dtype):
        moment = {"w": jnp.linspace(-1, 1, 32, dtype=jnp.bfloat16).reshape(8, 4).astype(dtype)}
        return {"0": {"count": jnp.int32(7), "mu": moment, "nu": moment}}

    weights = {"w": jnp.ones((8, 4), jnp.bfloat16)}
    wanted = place({"opt_state": adam(jnp.float32), "params": weights}, "fsdp=8")
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, place({"opt_state": adam(jnp.bfloat16), "params": weights}, "one device"), {})
        checkpoints.wait()
        found = checkpoints.restore(abstract(wanted, "fsdp=8"))
        assert found is not None
        assert_same(found.state, wanted)
        with pytest.raises(ValueError, match=r"params/w: saved bfloat16 \(8, 4\), asked for float32"):
            checkpoints.restore({**wanted, "params": {"w": jnp.ones((8, 4))}})
        # a count is not kept beside moments that begin anew
        moved = {"0": {**wanted["opt_state"]["0"], "mu": {"w": jnp.ones((4, 8))}}}
        allow = Allow(missing=("opt_state/*",))
        found = checkpoints.restore({**wanted, "opt_state": moved}, allow=allow)
        assert found is not None
        assert list(flatten(found.state)) == ["params/w"]


def test_leaves_without_a_place_are_listed(tmp_path):
    wanted = {"w": jax.ShapeDtypeStruct((64,), jnp.float32), "b": small_state()["b"]}
    with (
        Checkpoints(tmp_path, KEEP_ALL) as checkpoints,
        pytest.raises(ValueError, match=r"no sharding.*\n  - w"),
    ):
        checkpoints.restore(wanted)


# Policy


def test_due_by_steps_and_by_time():
    by_steps = CheckpointPolicy(every_steps=3)
    assert [step for step in range(1, 10) if is_due(by_steps, step, 1e9)] == [3, 6, 9]
    by_time = CheckpointPolicy(every_minutes=0.5)
    assert [is_due(by_time, 3, seconds) for seconds in (0.0, 29.9, 30.0, 31.0)] == [False, False, True, True]
    either = CheckpointPolicy(every_steps=3, every_minutes=1)
    assert [is_due(either, step, 60.0 * (step == 2)) for step in (1, 2, 3)] == [False, True, True]
    assert not is_due(CheckpointPolicy(), 1, 1e9)


def test_a_wrong_policy_names_every_wrong_number():
    with pytest.raises(ValueError, match="checkpoints cannot be saved") as error:
        CheckpointPolicy(every_steps=0, every_minutes=-1.0, keep=0, keep_every=-2)
    assert str(error.value) == (
        "checkpoints cannot be saved like this:"
        "\n  - every_steps is 0; use 1 or more"
        "\n  - keep is 0; use 1 or more"
        "\n  - keep_every is -2; use 1 or more"
        "\n  - every_minutes is -1.0; use None, or more than 0"
    )


@given(st.sets(st.integers(0, 500)), st.integers(1, 6), st.one_of(st.none(), st.integers(1, 50)))
def test_keeping_keeps_the_newest_and_the_multiples(steps, keep, keep_every):
    deleted = select_steps_to_delete(CheckpointPolicy(keep=keep, keep_every=keep_every), steps)
    newest = set(sorted(steps)[-keep:])
    multiples = {step for step in steps if keep_every and step % keep_every == 0}
    assert deleted == sorted(steps - newest - multiples)


def test_old_checkpoints_are_deleted_as_the_policy_says(tmp_path):
    saved_run(tmp_path, [10, 20, 30, 40, 50, 60], CheckpointPolicy(keep=2, keep_every=20))
    assert list(paths.find_finished_steps(tmp_path)) == [20, 40, 50, 60]
    assert paths.partial_folders(tmp_path) == []


def test_broken_checkpoints_count_for_nothing_when_old_ones_are_deleted(tmp_path):
    """With keep=1, a broken newer step must not push out the good one, nor what is saved after it."""
    saved_run(tmp_path, [10, 20, 30])
    for step in (20, 30):
        damage_bit(step_files(paths.step_folder(tmp_path, step))[0])
    with Checkpoints(tmp_path, CheckpointPolicy(keep=1), report=lambda _: None) as checkpoints:
        restored = checkpoints.restore(small_state())
        assert restored is not None
        assert restored.step == checkpoints.latest() == 10
        checkpoints.save(12, small_state(12), {})
        checkpoints.wait()
        assert list(paths.find_finished_steps(tmp_path)) == [12, 20, 30]
    restored, said = resumed_saying(tmp_path)
    assert (restored.step, len(said)) == (12, 2)
    assert_same(restored.state, small_state(12))
    with Checkpoints(tmp_path, CheckpointPolicy(keep=1), report=lambda _: None) as checkpoints:
        checkpoints.restore(small_state())
        checkpoints.save(20, small_state(21), {})
        checkpoints.wait()
        assert list(paths.find_finished_steps(tmp_path)) == [20, 30]
        checkpoints.save(31, small_state(31), {})
    assert list(paths.find_finished_steps(tmp_path)) == [31]
    assert_same(resumed(tmp_path).state, small_state(31))


def test_a_broken_checkpoint_takes_no_place_of_a_whole_one(tmp_path):
    saved_run(tmp_path, [10, 20])
    damage_bit(step_files(paths.step_folder(tmp_path, 20))[0])
    with Checkpoints(tmp_path, CheckpointPolicy(keep=2), report=lambda _: None) as checkpoints:
        checkpoints.restore(small_state())
        checkpoints.save(30, small_state(), {})
    assert list(paths.find_finished_steps(tmp_path)) == [10, 30]


# Damage


def damage_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0b1000
    path.write_bytes(content)


def damage_length(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_all(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_bit, damage_length, damage_all, Path.unlink])
def test_damage_to_any_file_is_named_and_skipped(tmp_path, damage):
    saved_run(tmp_path / "run", [10, 20])
    newest = paths.step_folder(tmp_path / "run", 20)
    files = step_files(newest)
    assert len(files) > 5
    shutil.copytree(newest, tmp_path / "whole")
    for path in files:
        damage(path)
        restored, said = resumed_saying(tmp_path / "run")
        assert restored.step == 10, path
        assert_same(restored.state, small_state(10))
        relative = path.relative_to(newest).as_posix()
        (line,) = said
        assert "step_00000020: broken: " in line
        assert relative in line
        assert [f"checkpoint skipped: {line}" for line in restored.skipped] == said
        shutil.copyfile(tmp_path / "whole" / relative, path)
    assert resumed(tmp_path / "run").step == 20


def test_every_damaged_file_of_a_checkpoint_is_named_with_its_reason(tmp_path):
    step = paths.step_folder(saved_run(tmp_path, [20]), 20)
    assert manifests.problems(step) == []
    flipped, shorter, missing = step_files(step)[:3]
    num_bytes = [path.stat().st_size for path in (flipped, shorter, missing)]
    damage_bit(flipped)
    damage_length(shorter)
    missing.unlink()
    assert manifests.problems(step) == [
        f"{flipped.relative_to(step)} has other contents than were saved ({num_bytes[0]} bytes)",
        f"{shorter.relative_to(step)} has {num_bytes[1] - 1} bytes, {num_bytes[1]} were saved",
        f"{missing.relative_to(step)} is missing, {num_bytes[2]} bytes were saved",
    ]


def test_any_single_bit_of_the_manifest_is_noticed(tmp_path):
    step = paths.step_folder(saved_run(tmp_path, [20]), 20)
    path = step / "manifest.json"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        for bit in (0, 5):
            changed = bytearray(whole)
            changed[position] ^= 1 << bit
            path.write_bytes(changed)
            assert manifests.read_manifest(step)[0] is None, (position, bit)


def test_a_checkpoint_under_the_name_of_another_is_broken(tmp_path):
    saved_run(tmp_path, [10])
    shutil.copytree(paths.step_folder(tmp_path, 10), paths.step_folder(tmp_path, 20))
    restored, said = resumed_saying(tmp_path)
    assert restored.step == 10
    assert said[0].endswith("step_00000020: broken: its manifest is that of step 10")


def test_all_broken_is_an_error_never_a_new_start(tmp_path):
    saved_run(tmp_path, [10, 20])
    (paths.step_folder(tmp_path, 10) / "manifest.json").unlink()
    damage_length(step_files(paths.step_folder(tmp_path, 20))[0])
    with pytest.raises(ValueError, match="every checkpoint") as error:
        resume(tmp_path)
    text = str(error.value)
    assert text.startswith(f"every checkpoint in {tmp_path} is broken; restore a copy of one, or use another")
    assert "\n  - step_00000020: broken: arrays/" in text
    assert text.endswith("\n  - step_00000010: broken: no manifest.json")


def test_a_later_schema_is_an_error_and_not_a_broken_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(manifests, "SCHEMA", 4)
        saved_run(tmp_path, [10])
    with pytest.raises(ValueError, match="written in schema 4; this shardtrain reads schema 3"):
        resume(tmp_path)


def test_an_unfinished_save_is_named_and_is_no_checkpoint(tmp_path):
    saved_run(tmp_path, [10, 20])
    paths.step_folder(tmp_path, 20).rename(tmp_path / "step_00000020.partial")
    restored, said = resumed_saying(tmp_path)
    assert restored.step == 10
    assert said == [
        "checkpoint skipped: step_00000020.partial: "
        "unfinished, left by a save or a deletion that was interrupted"
    ]
    shutil.rmtree(paths.step_folder(tmp_path, 10))
    restored, said = resume(tmp_path)
    assert (restored, len(said)) == (None, 1), "nothing was ever saved: a new run, and it says so"
    saved_run(tmp_path, [5])
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def child(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


SAVING = """
    import sys, jax, jax.numpy as jnp
    from pathlib import Path
    from shardtrain.checkpoints.checkpointer import Checkpoints
    from shardtrain.checkpoints.policy import CheckpointPolicy
    with Checkpoints(Path(sys.argv[1]), CheckpointPolicy(keep=2)) as checkpoints:
        restored = checkpoints.restore({"w": jnp.zeros(2**20)})
        first = restored.step + 1 if restored else 1
        for step in range(first, 10**6):
            checkpoints.save(step, {"w": jnp.full(2**20, step, jnp.float32)}, {"step": step})
            print(checkpoints.latest())
"""


def test_killed_while_saving_the_newest_finished_step_is_restored(tmp_path):
    promised = 0
    for kill_after in (5, 6):
        process = child(SAVING, tmp_path)
        assert process.stdout is not None
        for _ in range(kill_after):
            line = process.stdout.readline().strip()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        promised = int(line)
        restored, said = resumed_saying(tmp_path, {"w": jnp.zeros(2**20)})
        assert not any("broken" in line for line in said), "what has its final name is whole"
        assert promised <= restored.step <= promised + 2
        assert restored.extra == {"step": restored.step}
        assert np.all(np.asarray(restored.state["w"]) == restored.step)
    assert promised > 6, "later processes went on from the first"


# Saves that fail


def test_a_failed_background_save_is_raised_and_older_checkpoints_are_untouched(tmp_path):
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    random = {"w": jax.random.bits(jax.random.key(0), (2**16,))}
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, random, {})
        checkpoints.wait()
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
            checkpoints.save(2, random, {})
            with pytest.raises(
                SaveFailed, match=r"step 2 is not saved in .* \(step 1 is untouched\): .*large"
            ) as error:
                checkpoints.wait()
            assert error.value.step == 2
            assert str(error.value).endswith(". Make it writable, or use another folder.")
            checkpoints.wait()
            checkpoints.save(3, random, {})
            with pytest.raises(SaveFailed, match="step 3 is not saved"):
                checkpoints.save(4, random, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, old_handler)
        assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
        checkpoints.save(4, random, {})
    assert resumed(tmp_path, random).step == 4


def no_space(*_, **__):
    raise OSError(28, "No space left on device")


def save_and_leave(folder: Path, *, report=pytest.fail, leave_by: BaseException | None = None) -> None:
    with Checkpoints(folder, KEEP_ALL, report=report) as checkpoints:
        checkpoints.save(1, small_state(1), {})
        if leave_by:
            raise leave_by


def test_a_failure_after_the_arrays_is_raised_on_leaving(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "write_manifest", no_space)
    with pytest.raises(
        SaveFailed, match=r"step 1 is not saved.*there is no older checkpoint.*No space left"
    ) as error:
        save_and_leave(tmp_path)
    assert re.search(r"The state has \d+ bytes, the disk has [\d,]+ free\. Free space, or", str(error.value))
    assert resume(tmp_path) == (None, [])


def test_a_failure_does_not_hide_the_error_that_ended_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(manifests, "write_manifest", no_space)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        save_and_leave(tmp_path, report=said.append, leave_by=KeyboardInterrupt())
    (line,) = said
    assert "No space left" in line


def test_an_interrupted_run_finishes_its_running_save(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        save_and_leave(tmp_path, leave_by=KeyboardInterrupt())
    assert resumed(tmp_path).step == 1


def test_a_folder_that_cannot_be_made_fails_at_once_and_the_run_can_go_on(tmp_path):
    (tmp_path / "file").touch()
    with Checkpoints(tmp_path / "file" / "run", KEEP_ALL) as checkpoints:
        for step in (1, 2):
            with pytest.raises(SaveFailed, match=f"step {step} is not saved.*NotADirectoryError"):
                checkpoints.save(step, small_state(), {})
        (tmp_path / "file").unlink()
        checkpoints.save(3, small_state(3), {})
    assert resumed(tmp_path / "file" / "run").step == 3


def test_an_old_checkpoint_that_cannot_be_deleted_is_reported_and_the_save_counts(tmp_path, monkeypatch):
    said: list[str] = []

    def stuck(path):
        if path.name == "step_00000001":
            raise PermissionError(13, "Permission denied")

    with Checkpoints(tmp_path, CheckpointPolicy(keep=1), report=said.append) as checkpoints:
        checkpoints.save(1, small_state(1), {})
        checkpoints.wait()
        monkeypatch.setattr(paths, "delete", stuck)
        checkpoints.save(2, small_state(2), {})
    (line,) = said
    assert "step_00000001 could not be deleted: [Errno 13]" in line
    assert resumed(tmp_path).step == 2


# Several processes


TWO_PROCESSES = """
    import sys, jax, jax.numpy as jnp, numpy as np
    folder, port, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, index)
    from pathlib import Path
    from jax.sharding import NamedSharding, PartitionSpec
    from shardtrain.checkpoints import manifest
    from shardtrain.checkpoints.checkpointer import Checkpoints
    from shardtrain.checkpoints.save import SaveFailed
    from shardtrain.checkpoints.policy import CheckpointPolicy
    place = NamedSharding(jax.make_mesh((2,), ("data",)), PartitionSpec("data"))
    def state(step):
        w = np.arange(4.0, dtype="float32") + step
        return {"w": jax.make_array_from_callback((4,), place, lambda index: w[index])}
    with Checkpoints(Path(folder), CheckpointPolicy(keep=2)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {"step": step})
        checkpoints.wait()
        write = manifest.write_manifest
        manifest.write_manifest = None
        checkpoints.save(4, state(4), {})
        try:
            checkpoints.wait()
        except SaveFailed as failure:
            print("failed", failure.step)
        manifest.write_manifest = write
        if index == 0:
            (Path(folder) / "step_00000003" / "manifest.json").unlink()
        restored = checkpoints.restore(state(0))
        print(restored.step, restored.extra["step"], restored.state["w"].addressable_shards[0].data)
"""


def test_two_processes_save_fail_and_restore_as_one(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [child(TWO_PROCESSES, tmp_path, port, index) for index in range(2)]
    said = [process.communicate(timeout=300)[0].splitlines()[-2:] for process in processes]
    assert said == [["failed 4", "2 2 [2. 3.]"], ["failed 4", "2 2 [4. 5.]"]]


def test_a_state_that_could_never_be_saved_is_refused_before_the_first_step(tmp_path):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = {
        "key": jax.ShapeDtypeStruct((), key.dtype, sharding=here),
        "nothing": jax.ShapeDtypeStruct((0, 3), jnp.float32, sharding=here),
    }
    with Checkpoints(tmp_path, CheckpointPolicy()) as checkpoints, pytest.raises(ValueError) as error:
        checkpoints.restore(state)
    assert str(error.value) == (
        "these leaves of the state cannot be saved; change them where the state is made:\n"
        "  - key: typed key; use jax.random.key_data\n"
        "  - nothing: no elements, shape (0, 3); leave it out"
    )


def test_arrays_keep_their_names_when_not_all_are_read_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(restoring, "IN_FLIGHT_BYTES", 100)
    state = place({name: jnp.full((8, 4), i, jnp.float32) for i, name in enumerate("abcd")}, "fsdp=8")
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, state, {})
        restored = checkpoints.restore(abstract(state, "one device"))
    assert restored is not None
    for name in "abcd":
        np.testing.assert_array_equal(restored.state[name], state[name])


def test_chunks_are_small_and_large_rows_have_chunks_of_their_own(tmp_path):
    shapes = {"blocks": (4, 512, 1024), "table": (3000, 1024), "large": (2, 2048, 2048), "small": (8, 4)}
    state = {name: jnp.ones(shape) for name, shape in shapes.items()}
    with Checkpoints(tmp_path, KEEP_ALL) as checkpoints:
        checkpoints.save(1, state, {})
    folder = paths.step_folder(tmp_path, 1) / paths.ARRAYS
    chunks = {}
    for name in state:
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
        chunks[name] = array.chunk_layout.read_chunk.shape
    assert chunks["blocks"] == (1, 512, 1024)
    assert chunks["table"][0] > 1000
    assert chunks["large"][0] == 1
    assert chunks["small"] == (8, 4)
    assert all(4 * np.prod(shape) <= 1 << 23 for shape in chunks.values())
