"""Records, TOML and arrays of strangers are read within bounds."""

import json
import os

import numpy as np
import pytest

from shardtrain.system import json_size
from shardtrain.system.array_file import read_array, read_header
from shardtrain.system.untrusted_data import parse_record, read_toml
from shardtrain.system.untrusted_files import parse_json, read_bytes


@pytest.mark.parametrize("depth", [65, 900, 100_000])
@pytest.mark.parametrize("pair", ["[]", '{"a":1}'])
def test_records_that_are_nested_deeply_are_refused(depth, pair):
    begin, end = (pair[0], pair[1]) if pair == "[]" else ('{"a":', "1}")
    text = begin * depth + ("" if pair == "[]" else "1") + end[-1] * depth
    for each in (text, text.encode()):
        with pytest.raises(ValueError, match="nested deeper than 64 levels"):
            parse_record(each)
    assert parse_record("[" * 64 + "]" * 64)
    assert len(parse_record("[[]" + ", []" * 99 + "]")) == 100


@pytest.mark.parametrize("value", ["[]", "{}", '{"a":0}', "9", '"a"', "[[0]]"])
def test_json_of_too_many_values_is_refused_before_it_is_parsed(value, monkeypatch):
    text = "[" + f"{value}," * 500 + "0]"
    assert len(parse_json(text)) == len(parse_record(text.encode())) == 501
    monkeypatch.setattr(json_size, "MOST_VALUES", 400)
    monkeypatch.setattr(json, "loads", None)
    for parse in (parse_json, parse_record):
        with pytest.raises(ValueError, match="it has more than 400 values"):
            parse(text)


def test_brackets_in_texts_are_no_values(monkeypatch):
    monkeypatch.setattr(json_size, "MOST_VALUES", 4)
    assert parse_record('["[{,\\"[[{,\\\\", "[["]') == ['[{,"[[{,\\', "[["]


def test_a_key_that_occurs_twice_is_found_among_many():
    keys = ", ".join(f'"{i}": 0' for i in range(100_000))
    with pytest.raises(ValueError, match="the key '99999' occurs twice"):
        parse_json(f'{{{keys}, "99999": 1}}')


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]\nb = [1, " + "9" * 4000 + "]", r"a\.b\.1 is an integer of about 4,0\d\d digits"),
        ("a = " + "9" * 5000, "digits"),
        ("a = " + "[" * 100 + "]" * 100, "nested deeper than 64"),
        ("a = " + "[" * 9000 + "]" * 9000, "nested deeper than 64"),
    ],
)
def test_toml_that_is_refused(text, words, tmp_path):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ValueError, match=words):
        read_toml(tmp_path / "a.toml", 1 << 16)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ("(4611686018427387904,)", "<u2", "has 20 bytes of data; its shape .* needs 9223372036854775808"),
        ("(11,)", "<u2", "it is cut off, or damaged"),
        ("(-1,)", "<u2", r"has the shape \(-1,\); sizes are 0 or more"),
        ("(1,)", "|O", "array of object in an unsupported order or kind"),
        ("(2**62,)", "<u2", "is no .npy file"),
        ("(" * 200 + ")" * 200, "<u2", "is no .npy file"),
        ("(10,", "<u2", "is no .npy file"),
    ],
)
def test_arrays_that_are_refused(shape, dtype, words, tmp_path):
    path = tmp_path / "a.npy"
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(501).encode() + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + bytes(20))
    with pytest.raises(ValueError, match=words):
        read_header(path)
    np.save(path, np.arange(6).reshape(2, 3))
    assert read_array(path).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_error_of_the_file_system_names_the_file(tmp_path, monkeypatch):
    class Failing:
        fileno = staticmethod(lambda: os.open(tmp_path, os.O_RDONLY))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def read(self, _):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr("shardtrain.system.untrusted_files.open_regular", lambda path: Failing())
    with pytest.raises(OSError, match=r"Input/output error: '.*/a'"):
        read_bytes(tmp_path / "a")
