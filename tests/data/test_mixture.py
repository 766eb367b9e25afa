"""Mixtures: exact proportions, each sample of a source once before any comes again, any draw on its own."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardtrain.data import Batches, Corpus, Mixture
from shardtrain.data.balanced_draws import BLOCK, WORD, compute_borders, count_before, draw_block, floor_sum
from shardtrain.data.mixture import NUM_DRAWS, MixedSource
from shardtrain.data.samples import load_sample


class Numbers:
    """Samples that know their source and their number."""

    def __init__(self, name: int, num_samples: int):
        self.name, self.num_samples = name, num_samples
        self.fingerprint = f"{name} {num_samples}"

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return {"x": np.array([self.name, index])}


class Data:
    """Data of a run with one such source."""

    vocab = 7

    def __init__(self, name, num_samples, heldout=True):
        self.source, self.held = Numbers(name, num_samples), Numbers(-name, 2) if heldout else None

    def train(self, folder):
        return self.source

    def heldout(self, folder):
        return self.held


@given(st.integers(0, 50), st.integers(0, WORD), st.integers(-WORD, WORD))
def test_the_closed_form_is_the_sum(num, step, start):
    assert floor_sum(num, step, start) == sum((start + step * m) // WORD for m in range(num))


@pytest.mark.parametrize("weights", [(0.5, 0.3, 0.15, 0.049, 0.001), (1.0,), (2, 1), (0, 1, 0, 3), (1, 1e-9)])
def test_proportions_are_exact_over_a_million_draws(weights):
    parts, found = compute_borders(weights), np.zeros(len(weights), np.int64)
    for block in range(1_000_000 // BLOCK):
        sources, counts = draw_block(parts, 1234567, block)
        # the count of each draw is what really came before it
        for source in range(len(weights)):
            mine = sources == source
            np.testing.assert_array_equal(counts[mine], found[source] + np.arange(mine.sum()))
            found[source] += mine.sum()
    expected = found.sum() * np.array(weights) / sum(weights)
    # far below 0.1 %: a few draws, whatever their number
    assert np.abs(found - expected).max() < 6
    assert [count_before(parts, 1234567, i, int(found.sum())) for i in range(len(weights))] == found.tolist()


def test_stages_change_the_proportions_and_lose_no_sample():
    data = {"web": Data(1, 40), "code": Data(2, 30)}
    mixture = Mixture(parts=data, weights={"web": 3, "code": 1}, later="100: code 1; 120: web 1 code 1")
    mixed = mixture.train(None)  # type: ignore[arg-type]
    drawn = [mixed.draw(i)[:2] for i in range(400)]
    counts = [Counter(source for source, _ in drawn[a:b]) for a, b in ((0, 100), (100, 120), (120, 400))]
    assert abs(counts[0][0] - 75) <= 3
    assert counts[1] == {1: 20}
    assert abs(counts[2][0] - 140) <= 3
    for source, size in ((0, 40), (1, 30)):
        mine = [sample for each, sample in drawn if each == source]
        assert sorted(mine[:size]) == sorted(mine[size : 2 * size]) == list(range(size))
    with pytest.raises(IndexError):
        mixed.draw(NUM_DRAWS)


def test_after_kills_on_any_number_of_processes_no_sample_is_lost_or_repeated(tmp_path, pytestconfig):
    """20 kills of packed windows in a mixture; each start has other processes, rows, threads and workers.

    Workers, which take a second to start, in every start with `--full`, else in one.
    """
    parts = {}
    for name, size in (("web", 90), ("code", 40)):
        texts = [f"{name} {i} says {'more ' * (i % 5)}" for i in range(size)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        parts[name] = Corpus(paths=(tmp_path / f"{name}.jsonl",), seq=12, packing="separate")
    mixture = Mixture(parts=parts, weights={"web": 2, "code": 1}, later="333: web 1 code 1", seed=5)
    mixed = mixture.train(tmp_path / "run")
    random = np.random.default_rng(0)
    seen, position = [], {"epoch": 0, "index": 0}
    for life in range(20):
        batch, num_processes = int(random.integers(1, 9)), int(random.integers(1, 4))
        rows = np.array_split(np.arange(batch), min(num_processes, batch))
        workers = (life + 1) % 3 if life == 4 or pytestconfig.getoption("--full") else 0
        shards = [
            Batches(
                source=mixed, batch=batch, seed=9, rows=part, prefetch=int(random.integers(0, 3)),
                workers=0 if number else workers,
            )
            for number, part in enumerate(rows)
        ]  # fmt: skip
        steps = int(random.integers(1, 12))
        streams = [shard.iterate(position) for shard in shards]  # type: ignore[arg-type]
        for _ in range(steps):
            loaded = [next(stream) for stream in streams]
            for part, _ in loaded:
                seen += [dict(zip(part, row, strict=True)) for row in zip(*part.values(), strict=True)]
            position = loaded[0][1]
        for stream in streams:
            stream.close()
    assert len(seen) > 333
    assert position == {"epoch": 0, "index": len(seen)}
    for i, sample in enumerate(seen):
        expected = mixed[i]
        assert sample.keys() == expected.keys() == {"tokens", "segments", "weights"}
        for name in expected:
            np.testing.assert_array_equal(sample[name], expected[name])


def test_a_mixture_of_corpora_evaluates_each_by_its_name(tmp_path):
    for name in ("web", "code"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "some {name} and more"}}\n' * 9)
    parts = {name: Corpus(paths=(tmp_path / f"{name}.jsonl",), seq=8) for name in ("web", "code")}
    mixture = Mixture(parts=parts, weights={"web": 0.75, "code": 0.25})
    assert mixture.vocab == 256
    mixed, heldout = mixture.train(tmp_path / "run"), mixture.heldout(tmp_path / "run")
    assert heldout is not None
    assert sorted(heldout) == ["code", "web"]
    assert mixed[0]["tokens"].shape == heldout["web"][0]["tokens"].shape == (9,)
    lines = mixture.summary(tmp_path / "run").splitlines()
    assert [line.split(" corpus")[0] for line in lines] == ["75.0% web:", "25.0% code:"]
    other = Mixture(parts=parts, weights={"web": 0.5, "code": 0.5}).train(tmp_path / "run")
    assert other.fingerprint != mixed.fingerprint == mixture.train(tmp_path / "run").fingerprint


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weights": {"web": 1}}, "weights lacks code; give each part a weight"),
        (
            {"weights": {"web": 1, "code": 1, "wbe": 1}},
            "weights has 'wbe' (did you mean 'web'?); name a part",
        ),
        ({"weights": {"web": -1, "code": 1}}, "weights has -1 for web; use a number of 0 or more"),
        ({"weights": {"web": 0, "code": 0}}, "weights are all 0; give one of them more"),
        ({"parts": {}, "weights": {}}, "parts is empty; give a name and data for each source"),
        ({"seed": -1}, "seed is -1; use 0 or more"),
        ({"later": "5 web 1"}, "later has '5 web 1'; write the number of a sample, rising, and names with"),
        ({"later": "5: web 1; 4: web 1"}, "later has '4: web 1'; write the number of a sample, rising, and"),
        ({"later": "5: web"}, "later, from 5, has ' web'; write names and weights, as in 'web 0.7 code 0.3'"),
        ({"weights": "web"}, "weights has 'web'; write names and weights, as in 'web 0.7 code 0.3'"),
        ({"parts": {"a b": Data(1, 2)}}, "parts has 'a b'; use names of letters, digits, _, - and ."),
        ({"later": "5: wbe 1"}, "later, from 5, has 'wbe' (did you mean 'web'?); name a part"),
        (
            {"parts": {"web": 3, "code": Data(1, 2)}},
            "parts['web'] is int, without train; give data such as a",
        ),
    ],
)
def test_what_is_no_mixture_is_refused(changes, problem):
    given = {"parts": {"web": Data(1, 2), "code": Data(2, 2)}, "weights": {"web": 1, "code": 1}, **changes}
    with pytest.raises(ValueError) as error:
        Mixture(**given)
    assert problem in str(error.value)


def test_parts_of_other_vocabularies_are_refused():
    mixture = Mixture(parts={"a": Data(1, 2), "b": Corpus(vocab_size=9)}, weights="a 1 b 1")
    with pytest.raises(ValueError, match=r"vocabularies differ: a 7, b 9; give them tokens of one tokenizer"):
        mixture.vocab  # noqa: B018


def test_a_part_without_samples_is_refused():
    mixture = Mixture(parts={"a": Data(1, 0, heldout=False)}, weights={"a": 1})
    assert mixture.heldout(None) is None  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parts a of the mixture have no samples; leave them out"):
        mixture.train(None)  # type: ignore[arg-type]


class Changed(Numbers):
    """Samples that training reads with the epoch and a random number."""

    def augmented(self, index, epoch, random):
        return {"x": np.array([index, epoch, random.integers(1000)])}


def test_sources_that_change_their_samples_do_so_in_a_mixture():
    mixed = MixedSource(sources=(Changed(0, 3), Numbers(1, 3)), weights=((0, (1.0, 1.0)),), seed=0)
    first, again = ([load_sample(mixed, draw, seed=7)["x"].tolist() for draw in range(12)] for _ in range(2))
    assert first == again
    of_changed = [values for draw, values in enumerate(first) if mixed.draw(draw)[0] == 0]
    # each sample once in each epoch of its own source
    assert [epoch for _, epoch, _ in of_changed] == [number // 3 for number in range(len(of_changed))]
    assert {x for x, _, _ in of_changed[:3]} == {0, 1, 2}
    assert {len(values) for draw, values in enumerate(first) if mixed.draw(draw)[0] == 1} == {2}
