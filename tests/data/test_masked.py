"""Masked windows: what is hidden, what stays, and that a sample is always the same."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardtrain.data import MaskedTokens, Text, Tokens, write_tokens

MASK, NEVER = 9, 3


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "tokens.npy"
    write_tokens(path, [np.random.default_rng(0).integers(0, 9, 20_001)])
    return MaskedTokens(data=Tokens(path=path, vocab=10, seq=100), mask_token=MASK, never=(NEVER,))


def stacked(source, name):
    return np.stack([source[i][name] for i in range(len(source))])


def test_shares_of_what_is_chosen(data, tmp_path):
    source = data.train(tmp_path)
    tokens, targets, chosen = (stacked(source, name) for name in ("tokens", "targets", "chosen"))
    plain = data.data.train(tmp_path)
    np.testing.assert_array_equal(targets, np.stack([plain[i]["tokens"][:-1] for i in range(len(plain))]))
    assert not chosen[targets == NEVER].any()
    assert chosen[targets != NEVER].mean() == pytest.approx(0.15, abs=0.01)
    np.testing.assert_array_equal(tokens[chosen == 0], targets[chosen == 0])
    hidden = tokens[chosen == 1] == MASK
    assert hidden.mean() == pytest.approx(0.81, abs=0.02)  # one in ten random ones is the mask token too
    same = (tokens == targets)[chosen == 1]
    assert same.mean() == pytest.approx(0.11, abs=0.02)


def test_a_sample_is_always_the_same_and_like_no_other(data, tmp_path):
    first, again = data.train(tmp_path), data.train(tmp_path)
    np.testing.assert_array_equal(first[7]["tokens"], again[7]["tokens"])
    assert first.fingerprint == again.fingerprint
    other = replace(data, seed=1).train(tmp_path)
    assert not np.array_equal(first[7]["chosen"], other[7]["chosen"])
    assert not np.array_equal(first[7]["chosen"], first[8]["chosen"])
    assert other.fingerprint != first.fingerprint


def test_text_tells_what_it_read(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 100)
    data = MaskedTokens(data=Text(paths=(tmp_path / "a.txt",), seq=16), mask_token=255)
    assert data.summary(tmp_path) == "text: 1 files, 601 bytes; 15% of its tokens are predicted"
    heldout = data.heldout(tmp_path)
    assert heldout is not None
    assert heldout[0]["tokens"].shape == (16,)


def test_every_wrong_number_is_told():
    with pytest.raises(ValueError, match="cannot be masked") as error:
        MaskedTokens(data=Tokens(path=Path("a.npy"), vocab=10), mask_token=10, rate=0.0, seed=-1)
    for problem in ("mask_token is 10; use 0 to 9", "rate is 0.0; use a number", "seed is -1; use 0 or more"):
        assert problem in str(error.value)
