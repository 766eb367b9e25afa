"""What is written appears whole, and nothing that was there before is touched."""

import os
import stat

import pytest

from shardtrain.system.atomic_write import new_folder, open_own, replace_file


def test_a_folder_that_fails_leaves_nothing_behind(tmp_path):
    def fill():
        with new_folder(tmp_path / "out") as filled:
            (filled / "a").write_text("b")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_what_comes_in_between_stays(tmp_path):
    out = tmp_path / "out"

    def fill():
        with new_folder(out) as filled:
            (filled / "a").write_text("ours")
            out.mkdir()
            (out / "b").write_text("theirs")

    with pytest.raises(FileExistsError, match="holds something already"):
        fill()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "b"]


def test_an_empty_folder_or_a_link_to_one_is_filled(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with new_folder(tmp_path / "link") as filled:
        (filled / "a").write_text("b")
    assert (tmp_path / "real" / "a").read_text() == "b"
    assert (tmp_path / "link").is_symlink()
    umask = os.umask(0o022)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o777 & ~umask


def test_a_file_is_replaced_and_not_written_through_a_link(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / "run.txt").symlink_to(theirs)
    os.link(theirs, tmp_path / "hard")
    replace_file(tmp_path / "run.txt", b"ours")
    replace_file(tmp_path / "hard", b"ours", 0o600)
    assert theirs.read_text() == "theirs"
    assert (tmp_path / "run.txt").read_text() == (tmp_path / "hard").read_text() == "ours"
    assert stat.S_IMODE((tmp_path / "hard").stat().st_mode) == 0o600
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("append", [False, True])
def test_a_log_is_not_written_through_a_link(append, tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "log").symlink_to("theirs")
    with pytest.raises(OSError, match="log is a link, which is not followed; remove it"):
        open_own(tmp_path / "log", append=append)
    with open_own(tmp_path / "theirs", append=append) as file:
        file.write(b"!")
    assert (tmp_path / "theirs").read_text() == ("theirs!" if append else "!")
