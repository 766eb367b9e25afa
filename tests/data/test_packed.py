"""Windows with the segments of their documents."""

import numpy as np
import pytest
from written_formats import DOCUMENTS, write_files

from shardtrain.data import Corpus, write_tokens

TEXTS = [each for each in DOCUMENTS if each]


@pytest.mark.parametrize("name", ["jsonl", "megatron"])
@pytest.mark.parametrize("seq", [5, 16, 100])
def test_every_token_counts_once_but_the_first_of_each_document(name, seq, tmp_path):
    folder = write_files(name, tmp_path / "data", DOCUMENTS)
    corpus = Corpus(paths=(folder,), seq=seq, heldout_fraction=0.2, packing="separate")
    expected = b"".join(text.encode() + b"\0" for text in TEXTS)
    owners = np.repeat(np.arange(len(TEXTS)), [len(text.encode()) + 1 for text in TEXTS])
    train, heldout = corpus.train(tmp_path / "run"), corpus.heldout(tmp_path / "run")
    assert heldout is not None
    border = len(expected) - len(heldout) * seq - 1
    for source, start in ((train, 0), (heldout, border)):
        for index in range(len(source)):
            sample, first = source[index], start + index * seq
            mine = owners[first : first + seq + 1]
            assert bytes(sample["tokens"].astype(np.uint8)) == expected[first : first + seq + 1]
            # segments are documents, numbered from 0; a target of the next document does not count
            np.testing.assert_array_equal(sample["segments"], mine[:-1] - mine[0])
            np.testing.assert_array_equal(sample["weights"], mine[:-1] == mine[1:])
            assert [x.dtype.name for x in sample.values()] == ["int32", "int32", "float32"]
    joined = Corpus(paths=(folder,), seq=seq, heldout_fraction=0.2).train(tmp_path / "run")
    assert train.fingerprint == f"{joined.fingerprint} separate"


def test_files_that_do_not_say_where_documents_end_are_refused(tmp_path):
    write_tokens(tmp_path / "a.npy", [range(99)])
    corpus = Corpus(paths=(tmp_path / "a.npy",), seq=8, packing="separate")
    with pytest.raises(
        ValueError, match=r"packing is 'separate', and .*a\.npy does not say where documents end"
    ):
        corpus.train(tmp_path)
    with pytest.raises(ValueError, match="packing is 'best'; allowed: joined, separate"):
        Corpus(packing="best")  # type: ignore[arg-type]
