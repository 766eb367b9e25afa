"""A log folder for each launch: two in one second, or with one --logs, share nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardtrain.launch.log_folder import claim


def test_launches_at_once_have_each_their_own(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(claim, [tmp_path / "logs"] * 16))
    assert len(set(folders)) == 16
    assert tmp_path / "logs" in folders


def test_what_another_launch_left_stays(tmp_path):
    """Of a launch by hand, or by an earlier version, which made no file of its own."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rank-0.json").write_text("{}")
    assert claim(tmp_path / "logs") == tmp_path / "logs-2"
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["rank-0.json"]


def test_a_folder_that_somebody_made_for_it_is_taken(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/notes").touch()
    assert claim(tmp_path / "logs") == tmp_path / "logs"
    monkeypatch.chdir(tmp_path / "logs")
    assert claim(Path()) == tmp_path / "logs-2"
