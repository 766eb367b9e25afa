"""Text files as the data of a run."""

import errno
import fcntl
import json
import os
import re
import stat
from pathlib import Path

import numpy as np
import pytest

from shardtrain.data import Text, open_tokens


def make_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def packed_bytes(text: Text, folder: Path) -> bytes:
    return open_tokens(text.pack(folder).path).tobytes()


FILES = {
    "b.txt": b"second",
    "a.md": "f\u00fcnf \u20ac".encode(),
    "sub/c.py": b"third\n",
    "sub/binary.bin": b"has a \0 in it",
    "sub/latin.txt": "f\u00fcnf".encode("latin-1"),
    "cut.txt": "\u20ac".encode()[:2],
    "empty.txt": b"",
    ".hidden": b"not read",
    ".git/config": b"not read",
}


def test_packs_the_documents_of_a_folder_in_order(tmp_path):
    data = make_files(tmp_path / "data", FILES)
    packed = Text(paths=(data,)).pack(tmp_path / "run")
    found = open_tokens(packed.path)
    assert found.tobytes() == "f\u00fcnf \u20ac\0second\0third\n\0".encode()
    assert found.dtype == np.uint8
    assert packed.num_tokens == len(found)
    assert packed.num_documents == 3
    assert packed.skipped == tuple(str(data / n) for n in ("cut.txt", "sub/binary.bin", "sub/latin.txt"))
    assert Text(paths=(data,)).pack(tmp_path / "run") == packed


def test_large_files_are_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("shardtrain.data.text.CHUNK_BYTES", 3)
    content = "a\u20acb\u20acc".encode() * 5
    data = make_files(tmp_path / "data", {"a.txt": content, "b.txt": content[:-2] + b"\xff"})
    assert packed_bytes(Text(paths=(data,)), tmp_path) == content + b"\0"


def test_files_and_folders_in_the_order_given(tmp_path):
    data = make_files(tmp_path / "data", {"z.txt": b"z", "d/a.txt": b"a"})
    assert packed_bytes(Text(paths=(data / "z.txt", data / "d")), tmp_path) == b"z\0a\0"
    assert packed_bytes(Text(paths=(data / "d", data / "z.txt")), tmp_path) == b"a\0z\0"


def test_written_once_and_again_after_a_change(tmp_path):
    data = make_files(tmp_path / "data", {"a.txt": b"one", "b.txt": b"two"})
    run = tmp_path / "run"
    path = Text(paths=(data,)).pack(run).path
    before = path.stat().st_mtime_ns, path.stat().st_ino
    Text(paths=(data,), seq=3).pack(run)
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == before
    (data / "a.txt").write_bytes(b"ONE")
    os.utime(data / "a.txt", (1, 1))
    assert packed_bytes(Text(paths=(data,)), run) == b"ONE\0two\0"
    make_files(data, {"c.txt": b"three"})
    assert packed_bytes(Text(paths=(data,)), run) == b"ONE\0two\0three\0"


def test_what_a_run_writes_is_not_its_data(tmp_path):
    data = make_files(tmp_path, {"a.txt": b"one", "runs/x/log.txt": b"log"})
    first = Text(paths=(data,)).pack(tmp_path / "runs" / "x")
    assert open_tokens(first.path).tobytes() == b"one\0"
    assert Text(paths=(data,)).pack(tmp_path / "runs" / "x") == first


def test_a_text_that_changes_between_the_two_calls_is_split_as_it_was(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one " * 100)
    text = Text(paths=(file,), seq=8)
    train = text.train(tmp_path / "run")
    file.write_text("another one " * 50)
    heldout = text.heldout(Path(os.path.relpath(tmp_path / "run")))
    assert heldout is not None
    assert (heldout.path.resolve(), heldout.start) == (train.path, train.stop)


def test_default_is_the_standard_library(tmp_path):
    text = Text()
    packed = text.pack(tmp_path / "one")
    assert packed.num_tokens > 5e6
    assert packed.num_documents > 200
    found = packed.path.read_bytes()
    assert b"class OrderedDict" in found
    assert b"def urlopen(" in found
    assert b"test_support" not in {Path(s).stem.encode() for s in packed.skipped}
    assert len(text.train(tmp_path / "one")) > 20_000


def test_lists_every_value_and_every_path_that_is_wrong(tmp_path):
    with pytest.raises(ValueError, match="this text cannot be used") as error:
        Text(paths="a.txt", seq=0, heldout_fraction=-0.5)  # pyright: ignore[reportArgumentType]
    assert [line[4:] for line in str(error.value).splitlines()[1:]] == [
        "paths is 'a.txt'; give a list, each item a path: paths=('a.txt',)",
        "seq is 0; use 1 or more",
        "heldout_fraction is -0.5; use 0 (nothing held out) or more, below 1",
    ]
    make_files(tmp_path, {"empty/a.txt": b"", "e.txt": b""})
    names = ("missing", "empty", "e.txt")
    with pytest.raises(ValueError, match="this text cannot be read") as error:
        Text(paths=tuple(tmp_path / name for name in names)).pack(tmp_path / "run")
    change = "give a text file or a folder of them"
    assert [line[4:] for line in str(error.value).splitlines()[1:]] == [
        f"{tmp_path}/missing is not there, or empty; {change}",
        f"{tmp_path}/empty holds nothing to read outside {tmp_path}/run; {change}",
        f"{tmp_path}/e.txt is not there, or empty; {change}",
    ]


def test_refuses_what_holds_no_text_or_too_little(tmp_path):
    data = make_files(tmp_path, {"a.bin": b"\0", "b.txt": b"short"})
    message = f"none of 1 files is UTF-8 text without byte 0, such as {data}/a.bin; give text files"
    with pytest.raises(ValueError, match=re.escape(message)):
        Text(paths=(data / "a.bin",)).train(tmp_path)
    with pytest.raises(ValueError, match=r"has 6 tokens; 2 windows of seq 256 need .* or use seq 2 or less"):
        Text(paths=(data / "b.txt",)).train(tmp_path)


def test_a_text_changed_with_size_and_time_kept_is_packed_again(tmp_path):
    data = make_files(tmp_path / "data", {"a.txt": b"one"})
    os.utime(data / "a.txt", (1, 1))
    assert packed_bytes(Text(paths=(data,)), tmp_path / "run") == b"one\0"
    (data / "a.txt").write_bytes(b"ONE")
    os.utime(data / "a.txt", (1, 1))
    assert packed_bytes(Text(paths=(data,)), tmp_path / "run") == b"ONE\0"


def test_leftovers_of_a_killed_packing_go_and_one_under_way_stays(tmp_path):
    data = make_files(tmp_path / "data", {"a.txt": b"one"})
    run = tmp_path / "run"
    run.mkdir()
    left, busy, linked = (run / f".text-{c * 16}.npy.{c * 16}.part" for c in "012")
    left.write_bytes(b"half")
    (tmp_path / "theirs").write_text("theirs")
    linked.symlink_to(tmp_path / "theirs")
    with busy.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Text(paths=(data,)).pack(run)
        assert (left.exists(), busy.exists(), linked.is_symlink()) == (False, True, True)
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_only_the_owner_may_read_what_was_packed(tmp_path):
    data = make_files(tmp_path / "data", {"a.txt": b"secret"})
    (data / "a.txt").chmod(0o600)
    packed = Text(paths=(data,)).pack(tmp_path / "run")
    for path in (packed.path, packed.path.with_suffix(".json")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_folders_that_are_not_entered_are_told(tmp_path, monkeypatch):
    data = make_files(tmp_path / "data", {"a.txt": b"one", "closed/b.txt": b"two"})
    make_files(tmp_path / "elsewhere", {"c.txt": b"three"})
    (data / "link").symlink_to(tmp_path / "elsewhere")
    scan = os.scandir

    def scandir(path):
        if Path(path).name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr("os.scandir", scandir)
    text = Text(paths=(data,))
    assert packed_bytes(text, tmp_path / "run") == b"one\0"
    assert text.summary(tmp_path / "run") == (
        f"text: 1 files, 4 bytes; not entered 2 folders: {data}/link (a link; name {tmp_path}/elsewhere"
        f" itself), {data}/closed (Permission denied)"
    )
    with pytest.raises(ValueError, match=r"closed holds nothing .* \(not entered: .*Permission denied"):
        Text(paths=(data / "closed",)).pack(tmp_path / "run")


@pytest.mark.parametrize(
    "record", ["[]", "{}", '{"num_tokens": 1e9}', "[" * 9999, '{"num_tokens": -4}', "\xff"]
)
def test_a_record_that_cannot_be_trusted_is_written_again(record, tmp_path):
    text = Text(paths=(make_files(tmp_path / "data", {"a.txt": b"one"}),))
    path = text.pack(tmp_path / "run").path.with_suffix(".json")
    path.write_text(record)
    assert text.pack(tmp_path / "run").num_tokens == 4
    assert json.loads(path.read_text())["num_tokens"] == 4
