"""Pairs of token rows: masks of padding, the split, what cannot be used, and a run on them."""

from dataclasses import replace

import numpy as np
import pytest

from shardtrain import TokenPairs
from shardtrain.data import write_tokens

SOURCES = [[5, 6, 1, 0], [7, 1, 0, 0], [8, 0, 9, 1], [2, 3, 4, 1]] * 5
TARGETS = [[3, 1, 0], [2, 4, 1], [1, 0, 0], [6, 7, 1]] * 5


@pytest.fixture
def pairs(tmp_path):
    write_tokens(tmp_path / "a.npy", SOURCES)
    write_tokens(tmp_path / "b.npy", TARGETS)
    return TokenPairs(
        source=tmp_path / "a.npy", target=tmp_path / "b.npy", vocab=10, source_seq=4, target_seq=3
    )


def test_a_row_has_masks_of_its_padding_and_a_target_that_begins(pairs, tmp_path):
    rows = pairs.train(tmp_path)
    assert {name: x.tolist() for name, x in rows[0].items()} == {
        "source": [5, 6, 1, 0],
        "source_mask": [1, 1, 1, 0],
        "target": [0, 3, 1, 0],
        "weights": [1, 1, 0],
    }
    # padding stands at the end alone
    assert rows[2]["source_mask"].tolist() == [1, 1, 1, 1]
    assert rows[2]["source"].dtype == np.int32


def test_the_last_rows_are_held_out(pairs, tmp_path):
    pairs = replace(pairs, heldout_fraction=0.25)
    rows, heldout = pairs.train(tmp_path), pairs.heldout(tmp_path)
    assert (len(rows), len(heldout)) == (15, 5)
    assert [x["source"].tolist() for x in heldout] == SOURCES[15:]
    assert replace(pairs, heldout_fraction=0.0).heldout(tmp_path) is None
    assert rows.fingerprint != heldout.fingerprint
    assert rows.fingerprint == replace(pairs).train(tmp_path).fingerprint
    with pytest.raises(IndexError, match="sample 15 of 15"):
        rows[15]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"source_seq": 3}, "source has 80 tokens, and 80 % source_seq 3 = 2; fill its rows up to 3"),
        ({"target_seq": 6}, "source has 20 rows and target 10; write as many into both"),
        ({"padding": 10}, "padding is 10; use 0 to 9, a token below vocab"),
        ({"target_seq": 0}, "target_seq is 0; use 1 or more"),
        ({"vocab": 9}, "token 10, is 9, which is not below vocab 9; set vocab"),
    ],
)
def test_what_cannot_be_used_is_refused(changes, problem, pairs, tmp_path):
    with pytest.raises(ValueError, match=r"pairs|vocab") as error:
        list(replace(pairs, **changes).train(tmp_path))
    assert problem in str(error.value)
