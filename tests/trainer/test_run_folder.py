"""The files in a run folder that describe the run."""

from pathlib import Path

import pytest
from rich.console import Console

from shardtrain.system.atomic_write import _create_part
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.run_folder import check_folder, check_place, write_run_files


def test_temporary_files_of_killed_processes_are_deleted_and_those_of_living_ones_stay(tmp_path):
    abandoned = tmp_path / f".strategy.toml.{'0' * 16}.part"
    abandoned.write_text("every = ")
    living, handle = _create_part(tmp_path / "metrics.jsonl", 0o644)
    with handle:
        write_run_files(
            tmp_path, {"run.txt": "batch = 8\n", "strategy.toml": "every = 2\n"}, RunConsole(Console(), None)
        )
        assert {path.name for path in tmp_path.iterdir()} == {"run.txt", "strategy.toml", living.name}
    assert (tmp_path / "strategy.toml").read_text() == "every = 2\n"


def test_a_folder_that_is_a_link_to_nowhere_is_refused(tmp_path):
    run, target = tmp_path / "run", tmp_path / "disk"
    run.symlink_to(target)
    with pytest.raises(ValueError, match=f"{run} is a link to {target}, which is not there; make"):
        check_folder(run)
    target.mkdir()
    check_folder(run)
    (target / "checkpoints").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"run/checkpoints is a link to .*/other, which is not there"):
        check_folder(run)


def test_a_place_that_takes_no_folder_is_refused(tmp_path):
    for folder, why in (
        ("/proc/x", "no folders can be made there"),
        ("/dev/null/x/y", "Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(ValueError, match=f"run_dir {folder} cannot be made: {why}; use a folder on a"):
            check_place(Path(folder))
    check_place(tmp_path / "a" / "b")
    check_place(tmp_path)
    assert not list(tmp_path.iterdir())
