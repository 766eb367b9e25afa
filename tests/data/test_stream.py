"""Streams: samples in their order, whatever loads them, after any resume, with and without an end."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data import Batches, Mixture, Stream, Text


def finite(length, begun):
    def samples():
        begun.append(0)
        return ({"x": np.array(i)} for i in range(length))

    return samples


def seeking(length, begun):
    def samples(first):
        begun.append(first)
        return ({"x": np.array(i)} for i in range(first, length))

    return samples


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([finite, seeking]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
)
def test_any_sample_is_found_in_a_stream_that_begins_again_at_its_end(make, length, keep, indices):
    source = Stream(samples=make(length, []), keep=keep).train(None)  # type: ignore[arg-type]
    assert [int(source[i]["x"]) for i in indices] == [i % length for i in indices]


def test_it_is_read_once_by_all_threads_and_begins_where_it_can():
    for make, expected in ((finite, [0]), (seeking, [40])):
        begun = []
        source = Stream(samples=make(1000, begun), keep=64).train(None)  # type: ignore[arg-type]
        stream = Batches(source=source, batch=8, prefetch=4).iterate({"epoch": 0, "index": 40})
        found = np.concatenate([next(stream)[0]["x"] for _ in range(50)])
        stream.close()
        np.testing.assert_array_equal(found, np.arange(40, 440))
        # threads may ask for a later batch first
        assert begun[0] == expected[0] or begun[0] in range(40, 80)
        assert len(begun) <= 2


TEXTS = np.random.default_rng(0).integers(0, 99, (200, 9)).astype(np.int32)


def texts(first):
    return ({"tokens": tokens} for tokens in TEXTS[first:])


def all_texts():
    return texts(0)


def test_an_error_of_the_stream_is_not_its_end():
    begun = []

    def samples(first):
        begun.append(first)
        yield from ({"x": np.array(i)} for i in range(first, 7))
        if len(begun) < 3:
            raise OSError("the network is gone")

    source = Stream(samples=samples).train(None)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(OSError, match="the network is gone"):
            [source[i] for i in range(9)]
    assert [int(source[i]["x"]) for i in range(9)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_what_is_no_stream_is_refused():
    with pytest.raises(ValueError, match="samples takes several arguments; let it take the number"):
        Stream(samples=lambda a, b: [])
    with pytest.raises(ValueError, match="keep is 0; use 1 or more"):
        Stream(samples=all_texts, keep=0)
    with pytest.raises(ValueError, match="the stream has no samples"):
        Stream(samples=lambda: []).train(None)[3]  # type: ignore[arg-type]
    source = Stream(samples=all_texts).train(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"workers is 2, and the samples are of a stream, .*workers 0"):
        Batches(source=source, batch=2, workers=2)
    mixed = Mixture(parts={"a": Stream(samples=all_texts)}, weights="a 1").train(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"workers is 1, and the samples are of a stream"):
        Batches(source=mixed, batch=2, workers=1)


@pytest.mark.parametrize("samples", [texts, all_texts])
def test_a_stream_in_a_mixture_is_read_in_its_own_order_from_any_position(samples, tmp_path):
    """Beside a source that is shuffled, which is as it would be beside another one."""
    (tmp_path / "a.txt").write_text("some text that is cut into windows " * 9)
    parts = {"stream": Stream(samples=samples, held_out=[{"tokens": TEXTS[0]}])}
    parts |= {"text": Text(paths=(tmp_path / "a.txt",), seq=8)}  # type: ignore[dict-item]
    mixture = Mixture(parts=parts, weights="stream 2 text 1", later="90: stream 1 text 2", seed=3)
    mixed = mixture.train(tmp_path)
    drawn = [mixed.draw(i)[:2] for i in range(400)]
    of_stream = [sample for source, sample in drawn if source == 0]
    assert of_stream == list(range(len(of_stream)))
    assert abs(sum(source == 0 for source, _ in drawn[:90]) - 60) <= 3
    assert sorted(sample for source, sample in drawn if source == 1)[:2] == [0, 0]
    whole = [next_batch["tokens"] for next_batch, _ in first(mixed, 12, {"epoch": 0, "index": 0})]
    assert any((row == TEXTS[7]).all() for batch in whole for row in batch)
    # as after a kill: nothing of the stream was read yet
    later = [batch["tokens"] for batch, _ in first(mixture.train(tmp_path), 5, {"epoch": 0, "index": 7 * 8})]
    np.testing.assert_array_equal(later, whole[7:])
    assert sorted(mixture.heldout(tmp_path) or {}) == ["stream", "text"]


def first(source, number, position):
    stream = Batches(source=source, batch=8).iterate(position)
    found = [next(stream) for _ in range(number)]
    stream.close()
    return found
