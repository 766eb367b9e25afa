"""Compiled programs are kept by default, found at the next start, and limited in bytes."""

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax

from shardtrain.system import program_cache
from shardtrain.system.program_cache import (
    delete_oldest,
    drop_broken,
    find_other_writers,
    keep_programs,
    make_private,
)
from shardtrain.system.xla_flags import PRESETS

START = """
import os, jax
from shardtrain.system import program_cache
program_cache.LEAST_SECONDS = 0
program_cache.keep_programs(os.environ)
with program_cache.ProgramCounts() as counts:
    assert jax.jit(lambda x: x @ x.T)(jax.numpy.ones((3, 3))).sum() == 27
print(counts.loaded > 0, counts.kept > 0, jax.config.jax_compilation_cache_dir)
"""


def test_the_second_start_loads_what_the_first_compiled(tmp_path):
    """Both with every flag of the presets: XLA ends a process that has an unknown one."""
    flags = {f"--{flag.name}={flag.value}" for preset in PRESETS.values() for flag in preset}
    environ = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    environ |= {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": " ".join(sorted(flags)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", START]
    printed = [
        subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(2)
    ]
    folder = printed[0][2]
    assert folder.startswith(f"{tmp_path}/shardtrain/programs/cpu_")
    assert printed == [["False", "True", folder], ["True", "False", folder]]
    for path in (Path(folder), *Path(folder).parents[:2]):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    folder = tmp_path / "shardtrain" / "programs" / "cpu"
    make_private(folder)
    assert find_other_writers(folder) == ""
    folder.chmod(0o770)
    assert find_other_writers(folder) == f"others can write to {folder}"
    folder.chmod(0o700)
    folder.parent.chmod(0o777)
    assert find_other_writers(folder) == f"others can write to {folder.parent}"
    # as /tmp is
    folder.parent.chmod(0o1777)
    assert find_other_writers(folder) == ""


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "find_program_folder", lambda: None)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    before = jax.config.values["jax_compilation_cache_dir"]
    text = keep_programs({"XDG_CACHE_HOME": str(tmp_path)})
    assert f" belongs to another user (number {owner})" in text
    assert text.startswith("WARNING: compiled programs are not kept, as ")
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_a_program_that_was_cut_off_is_deleted_and_others_are_read_once(tmp_path, monkeypatch):
    whole = zlib.compress(b"program" * 100)
    for name, content in (("a-cache", whole), ("b-cache", whole[:-4]), ("c-cache", whole[:-4])):
        (tmp_path / name).write_bytes(content)
        os.utime(tmp_path / name, (1, 1))
    # another process may be writing it
    os.utime(tmp_path / "c-cache")
    drop_broken(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*-cache")) == ["a-cache", "c-cache"]
    os.utime(tmp_path / "c-cache", (time.time() - 50, time.time() - 50))
    read = []
    monkeypatch.setattr(program_cache, "WRITING_SECONDS", 10)
    monkeypatch.setattr(program_cache, "is_whole", lambda program: read.append(program) or False)
    drop_broken(tmp_path)
    assert read == [whole[:-4]]
    assert sorted(path.name for path in tmp_path.glob("*-cache")) == ["a-cache"]


def test_the_oldest_are_deleted_beyond_the_limit(tmp_path):
    names = ["a-cache", "b-cache", "c-cache"]
    for age, name in enumerate(names):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (age, age))
    # what jax keeps beside them on GPUs
    (tmp_path / "xla_gpu_per_fusion_autotune_cache_dir").mkdir()
    for _ in range(2):
        delete_oldest(tmp_path, 20)
        assert sorted(path.name for path in tmp_path.glob("*-cache")) == names[1:]


def test_without_a_home_directory_nothing_is_kept(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(program_cache, "find_program_folder", lambda: None)
    before = jax.config.values["jax_compilation_cache_dir"]
    keep_programs({})
    assert jax.config.values["jax_compilation_cache_dir"] == before


def test_what_is_no_program_neither_hangs_nor_ends_a_start(tmp_path):
    os.mkfifo(tmp_path / "b-cache")
    (tmp_path / "c-cache").mkdir()
    for name in ("b-cache", "c-cache"):
        os.utime(tmp_path / name, (1, 1))
    drop_broken(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c-cache", program_cache.CHECKED]
    assert program_cache.is_whole(zlib.compress(bytes(1 << 25)))


def test_a_relative_cache_folder_is_ignored():
    found = program_cache.cache_folder({"XDG_CACHE_HOME": "cache"}, "cpu")
    assert found == Path.home() / ".cache" / "shardtrain" / "programs" / "cpu"
