"""A run folder whose files and folders are links: nothing behind them changes, and a link is named."""

import random
import shutil

import pytest

from shardtrain import cli

RUN = """
from pathlib import Path

from shardtrain.data import Text
from shardtrain.trainer.config import Run
from tiny_language_model import TinyConfig

HERE = Path(__file__).parent


def run() -> Run:
    return Run(
        model=TinyConfig(),
        data=Text(paths=(HERE / "text.txt",), seq=8),
        run_dir="run",
        log_every=1,
        batch=8,
        steps=4,
        evaluate_every=2,
    )
"""
TRAIN = ("train", "tiny.py", "--checkpoints.every-steps", "2", "--checkpoints.best", "heldout/loss")
COMMANDS = {
    "resume": TRAIN,
    "train on": (*TRAIN, "--steps", "6", "--checkpoints.keep", "1"),
    "prune": ("checkpoint", "prune", "run", "--keep", "1"),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text("".join(random.Random(0).choices("abcdefgh \n", k=3000)))
    (folder / "tiny.py").write_text(RUN)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(list(TRAIN)) == 0
    return folder


def files(folder):
    """Content and time of everything in a folder."""
    return {
        path: (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def link_files(outside, run):
    for path in outside.rglob("*"):
        if path.is_file() and path.name != ".lock":
            (run / path.relative_to(outside)).parent.mkdir(parents=True, exist_ok=True)
            (run / path.relative_to(outside)).symlink_to(path)


def link_all(outside, run):
    for path in outside.iterdir():
        (run / path.name).symlink_to(path)


def link_folders(outside, run):
    for path in outside.iterdir():
        if path.name != ".lock":
            (run / path.name).symlink_to(path)


def link_tensorboard(outside, run):
    (run / "tensorboard").symlink_to(outside / "tensorboard")


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("link", [link_files, link_all, link_folders, link_tensorboard])
def test_nothing_behind_links_changes_and_a_link_is_named(
    link, name, finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(shutil.copytree(finished, tmp_path / "here"))
    outside = (tmp_path / "here/run").rename(tmp_path / "outside")
    (tmp_path / "here/run").mkdir()
    link(outside, tmp_path / "here/run")
    before = files(outside)
    code = cli.main(list(COMMANDS[name]))
    printed = "".join(capsys.readouterr())
    assert files(outside) == before
    assert "Traceback" not in printed
    if link is not link_tensorboard or name != "prune":
        assert " is a link" in printed
        assert code == cli.USER_ERROR or link is link_files
