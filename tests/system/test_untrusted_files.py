"""Files of strangers: what is refused, and that nothing blocks, overflows or leads out of its folder."""

import os
import re
import socket

import pytest

from shardtrain.system.untrusted_files import (
    MOST_DEPTH,
    name_problem,
    num_bytes_in,
    open_inside,
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    special_files,
    stat_inside,
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": NaN}', "NaN is no number in JSON"),
        ("[-Infinity]", "-Infinity is no number in JSON"),
        ("1e999", "the number 1e999 is too large"),
        ("-" + "9" * 309, "the number -9999999999999999999 is too large"),
        ("[" + "9" * 4000 + "]", "the number 99999999999999999999... has 4,000 digits; at most 309 are read"),
        ("[" + "9" * 5000 + "]", "the number 99999999999999999999... has 5,000 digits"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice in one object"),
        ("[" * 100_000, "it is nested deeper than 64 levels"),
        ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), "it is nested deeper than 64 levels"),
        ('{"a": "\\ud800"}', "surrogates not allowed"),
        ('{"\\udfff": 1}', "surrogates not allowed"),
        ("{'a': 1}", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_json_that_is_refused(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_json(text)


def test_json_within_the_bounds_is_read():
    deep = "[" * MOST_DEPTH + "]" * MOST_DEPTH
    assert str(parse_json(deep)) == deep
    assert parse_json('{"a": [1, -2.5, 18446744073709551615, "\\ud83d\\ude00", null, true]}') == {
        "a": [1, -2.5, 18446744073709551615, "\U0001f600", None, True]
    }
    # what transformers writes for a limit that a tokenizer does not have, and what a float can hold at most
    for number in (int(1e30), int(1e20), -int(1e30), int(1.7e308), 1e30):
        assert parse_json(f'{{"model_max_length": {number!r}}}') == {"model_max_length": number}
    assert parse_json('[Infinity, "\\udcff"]', ours=True) == [float("inf"), "\udcff"]


def make_special(kind, path):
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["a FIFO", "a socket", "a folder", "a device"])
def test_what_is_no_regular_file_is_not_opened(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_special(kind, tmp_path / "it")
    with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
        open_regular(tmp_path / "it")
    with pytest.raises(ValueError, match=f"is no JSON that can be read: .*it is {kind}"):
        read_json(tmp_path / "it")


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(ValueError, match="has 1,099,511,627,776 bytes; at most 134,217,728 are read"):
        read_bytes(tmp_path / "a")


@pytest.mark.parametrize(
    "name", ["", "/a", "..", "a/../../b", "a//b", "./a", "a\nb", "a\x1b[2J", "a\0b", 3, "a" * 5000]
)
def test_names_that_lead_elsewhere(name, tmp_path):
    assert name_problem(name)
    if isinstance(name, str):
        with pytest.raises(OSError, match="the name"):
            stat_inside(tmp_path, name)


def test_no_link_is_followed_below_a_folder(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("1")
    inside = tmp_path / "inside"
    (inside / "own").mkdir(parents=True)
    (inside / "own" / "file").write_text("22")
    (inside / "folder").symlink_to(tmp_path / "outside")
    (inside / "file").symlink_to(tmp_path / "outside" / "secret")
    os.mkfifo(inside / "own" / "fifo")
    for name in ("folder/secret", "file"):
        with pytest.raises(OSError, match="is a link, not a"):
            open_inside(inside, name)
    with open_inside(inside, "own/file") as file:
        assert file.read() == b"22"
    assert special_files(inside) == ["file is a link", "folder is a link", "own/fifo is a FIFO"]
    assert num_bytes_in(inside / "own") == 2
