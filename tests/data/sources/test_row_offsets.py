"""Indices of rows are deleted without anything that stands beside them."""

from shardtrain.data.sources.row_offsets import remove_indices


def test_only_indices_are_deleted(tmp_path):
    folder, other = tmp_path / ".index", tmp_path / "other"
    for each in (folder, other):
        each.mkdir()
        (each / "rows-0.npy").touch()
    (folder / "mine.txt").touch()
    remove_indices(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    remove_indices(folder)
    assert not folder.exists()
    folder.symlink_to(other)
    remove_indices(folder)
    assert (other / "rows-0.npy").exists()
