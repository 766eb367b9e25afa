"""Token files and the windows over them."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data import Batches, Tokens, open_tokens, write_tokens
from shardtrain.data.windows import describe_too_short, split_tokens


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_documents_come_back_as_they_were(tmp_path, dtype):
    top = np.iinfo(dtype).max
    documents = [[top, 1], [], np.array([2], np.int64)]
    path = tmp_path / "made" / "tokens.npy"
    assert write_tokens(path, iter(documents), dtype=dtype, separator=0) == 6
    tokens = open_tokens(path)
    assert tokens.tolist() == [top, 1, 0, 0, 2, 0]
    assert tokens.dtype == dtype
    assert isinstance(tokens, np.memmap)
    np.testing.assert_array_equal(np.load(path), tokens)
    assert [file.name for file in path.parent.iterdir()] == ["tokens.npy"]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "tokens.npy"
    write_tokens(path, [[1, 2]])
    with pytest.raises(
        ValueError, match=r"token 70000 does not fit in uint16 \(0 to 65535\); use dtype uint32"
    ):
        write_tokens(path, [[3], [70000]])
    assert open_tokens(path).tolist() == [1, 2]
    assert [file.name for file in tmp_path.iterdir()] == ["tokens.npy"]


@pytest.mark.parametrize(
    ("documents", "options", "message"),
    [
        ([[-1, 5]], {}, r"token -1 does not fit in uint16 .*; use tokens from 0 to 2\*\*32 - 1"),
        ([[1]], {"separator": 300, "dtype": "uint8"}, "token 300 does not fit in uint8 .*; use dtype uint16"),
        ([[1.5]], {}, r"a document is float64 of shape \(1,\); use a 1D array of integers"),
        ([[[1]]], {}, r"a document is int64 of shape \(1, 1\); use a 1D array of integers"),
        ([[1]], {"dtype": "int64"}, "a token file of int64 was asked for; use one of uint8, uint16, uint32"),
    ],
)
def test_refuses_to_write(tmp_path, documents, options, message):
    with pytest.raises(ValueError, match=message):
        write_tokens(tmp_path / "tokens.npy", documents, **options)
    assert list(tmp_path.iterdir()) == []


def test_refuses_to_open(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"there is no token file .*missing\.npy; make it with write_tokens"
    ):
        open_tokens(tmp_path / "missing.npy")
    (tmp_path / "text.npy").write_text("no tokens at all")
    with pytest.raises(ValueError, match="cannot be read as a token file"):
        open_tokens(tmp_path / "text.npy")
    np.save(tmp_path / "square.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"holds float64 of shape \(2, 2\); a token file is 1D, of integers"):
        open_tokens(tmp_path / "square.npy")
    write_tokens(tmp_path / "cut.npy", [range(1000)])
    with (tmp_path / "cut.npy").open("r+b") as file:
        file.truncate(500)
    with pytest.raises(ValueError, match="cannot be read as a token file"):
        open_tokens(tmp_path / "cut.npy")


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """Makes token files that hold 0, 1, 2, ..."""
    folder = tmp_path_factory.mktemp("counting")

    def make(num_tokens):
        path = folder / f"{num_tokens}.npy"
        if not path.exists():
            write_tokens(path, [range(num_tokens)])
        return path

    return make


@settings(deadline=None, max_examples=40)
@given(num_tokens=st.integers(2, 300), seq=st.integers(1, 40), heldout=st.sampled_from([0, 0.01, 0.3, 0.99]))
def test_windows_cover_the_file_and_none_is_in_both_parts(counting, num_tokens, seq, heldout):
    path = counting(num_tokens)
    if num_tokens < (seq + 1) * (2 if heldout else 1):
        with pytest.raises(ValueError, match=f"has {num_tokens} tokens"):
            split_tokens(path, seq, heldout, num_tokens)
        return
    train, kept = split_tokens(path, seq, heldout, num_tokens)
    parts = [train] if kept is None else [train, kept]
    assert (kept is None) == (heldout == 0)
    seen = []
    for part in parts:
        windows = [window["tokens"] for window in part]
        assert len(windows) == len(part) >= 1
        for index, window in enumerate(windows):
            begin = part.start + index * seq
            np.testing.assert_array_equal(window, np.arange(begin, begin + seq + 1))
            assert window.dtype == np.int32
        seen.append({int(token) for window in windows for token in window})
    assert len(set.union(*seen)) == sum(map(len, seen)), "no token is in both parts"
    assert num_tokens - len(set.union(*seen)) < seq, "less than a window is left over"
    if heldout == 0.3 and num_tokens > 10 * seq + 10:
        assert abs(len(parts[1]) - 0.3 * num_tokens / seq) <= 1.5


def test_too_short_says_what_is_needed():
    assert describe_too_short(Path("a.npy"), 100, 64, 2) == (
        "a.npy has 100 tokens; 2 windows of seq 64 need 2 * (64 + 1) = 130. Give more, or use seq 49 or less."
    )
    assert (
        describe_too_short(Path("a.npy"), 1, 8, 1)
        == "a.npy has 1 tokens; 1 window of seq 8 need 1 * (8 + 1) = 9. Give more."
    )


def test_own_tokens(tmp_path):
    np.save(tmp_path / "own.npy", np.arange(50, dtype=np.int64))
    data = Tokens(path=tmp_path / "own.npy", vocab=45, seq=4, heldout_fraction=0.2)
    train, heldout = data.train(tmp_path), data.heldout(tmp_path)
    assert heldout is not None
    assert [len(train), len(heldout)] == [10, 2]
    assert train[0]["tokens"].tolist() == [0, 1, 2, 3, 4]
    assert Tokens(path=tmp_path / "own.npy", vocab=50, heldout_fraction=0, seq=4).heldout(tmp_path) is None
    with pytest.raises(
        ValueError, match=r"token 45, is 45, which is not below vocab 45; set vocab .* to 46 or more"
    ):
        heldout[0]
    np.save(tmp_path / "own.npy", np.arange(-1, 49, dtype=np.int64))
    with pytest.raises(ValueError, match=r"token 0, is -1, and tokens are numbers from 0 to 44; write the"):
        data.train(tmp_path)[0]
    with pytest.raises(IndexError):
        train[len(train)]
    with pytest.raises(ValueError, match="cannot be used") as error:
        Tokens(path=tmp_path, vocab=0, seq=0, heldout_fraction=1.0)
    assert [line[4:] for line in str(error.value).splitlines()[1:]] == [
        "seq is 0; use 1 or more",
        "heldout_fraction is 1.0; use 0 (nothing held out) or more, below 1",
        "vocab is 0; use 1 to 2**31",
    ]


def test_a_lost_or_replaced_file_is_told(tmp_path):
    path = tmp_path / "tokens.npy"
    write_tokens(path, [range(100)])
    train = Tokens(path=path, vocab=100, seq=4).train(tmp_path)
    iterator = Batches(source=train, batch=2).iterate()
    next(iterator)
    path.unlink()
    next(iterator)  # a file that was opened stays readable
    iterator.close()
    copy = pickle.dumps(train)
    with pytest.raises(OSError, match=r"tokens\.npy cannot be read: No such file .*; bring it back"):
        pickle.loads(copy)[0]
    write_tokens(path, [range(50)])
    with pytest.raises(OSError, match="was cut off while it was read: it ends after 50 of 100 tokens"):
        pickle.loads(copy)[len(train) - 1]
