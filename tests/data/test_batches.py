"""The order of batches: each sample once an epoch, whatever the batch size, threads or rows."""

import itertools
import json
import math
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data import Batches, Position
from shardtrain.data.order import epoch_order
from shardtrain.errors.user_code import UserCodeFailed


class Numbers:
    """A source whose sample i is {"x": i}."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return {"x": np.array([index])}


def real(batch):
    return batch["x"][batch["weights"] > 0, 0].tolist()


def read(batches, position=None):
    """The samples in their order, those that fill up left out."""
    return [sample for batch, _ in batches.iterate(position) for sample in real(batch)]


@settings(deadline=None, max_examples=15)
@given(num_samples=st.integers(1, 40), batch=st.integers(1, 45), seed=st.integers(0, 2**32 - 1))
def test_each_sample_once_an_epoch_and_all_rows_are_samples(num_samples, batch, seed):
    batches = Batches(source=Numbers(num_samples), batch=batch, seed=seed, epochs=2)
    epochs = [[], []]
    for (loaded, _), number in zip(batches.iterate(), itertools.count(), strict=False):
        assert loaded["x"].shape == (batch, 1)
        assert loaded["weights"].shape == (batch,)
        assert loaded["weights"].dtype == np.float32
        assert set(loaded["x"][:, 0].tolist()) == set(real(loaded)), "rows that fill up are copies"
        epochs[number // -(-num_samples // batch)] += real(loaded)
    assert [sorted(epoch) for epoch in epochs] == [list(range(num_samples))] * 2


@pytest.mark.parametrize("num_samples", [9000, 2**16 + 1])
def test_order_is_a_permutation(num_samples):
    order = epoch_order(num_samples, seed=3, epoch=1)
    found = np.array([order(position) for position in range(num_samples)])
    np.testing.assert_array_equal(np.sort(found), np.arange(num_samples))


def test_order_does_not_depend_on_batch_size_threads_or_rows():
    batches = Batches(source=Numbers(53), batch=7, epochs=2, prefetch=0)
    order = read(batches)
    for change in ({"batch": 1}, {"batch": 53}, {"batch": 60}, {"prefetch": 1}, {"prefetch": 5}):
        assert read(replace(batches, **change)) == order
    shares = [list(replace(batches, rows=rows).iterate()) for rows in (range(3), [3], np.array([4, 5, 6]))]
    for parts, (whole, position) in zip(zip(*shares, strict=True), batches.iterate(), strict=True):
        for name in ("x", "weights"):
            np.testing.assert_array_equal(np.concatenate([part[name] for part, _ in parts]), whole[name])
        assert all(after == position for _, after in parts)


def test_epochs_and_seeds_have_orders_of_their_own():
    one_epoch = Batches(source=Numbers(30), batch=30)
    orders = [
        tuple(real(replace(one_epoch, seed=seed).load({"epoch": epoch, "index": 0})))
        for seed, epoch in itertools.product(range(3), range(3))
    ]
    assert len(set(orders)) == 9
    assert tuple(range(30)) not in orders


@settings(deadline=None, max_examples=12)
@given(num_batches=st.integers(0, 10), batch=st.integers(1, 25))
def test_resumes_with_any_batch_size(num_batches, batch):
    batches = Batches(source=Numbers(23), batch=5, epochs=2, prefetch=0)
    whole = read(batches)
    done, position = [], None
    for loaded, after in itertools.islice(batches.iterate(), num_batches):
        done, position = done + real(loaded), json.loads(json.dumps(after))
    assert done + read(replace(batches, batch=batch), position) == whole


def test_positions_are_where_the_batches_are_read():
    batches = Batches(source=Numbers(11), batch=4, epochs=3)
    position = Position(epoch=0, index=3)
    for number, (loaded, after) in enumerate(batches.iterate(position)):
        here = batches.advance(position, number)
        np.testing.assert_array_equal(batches.load(here)["x"], loaded["x"])
        assert after == batches.advance(here)
    assert number + 1 == batches.num_batches(position) == 2 + 3 + 3
    assert after == {"epoch": 3, "index": 0}
    assert read(batches, after) == []
    assert read(batches, {"epoch": 0, "index": 11}) == read(batches, {"epoch": 1, "index": 0})


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("shardtrain-loader")]


@pytest.mark.parametrize("ending", ["close", "end", "error"])
def test_threads_end(ending):
    class Failing(Numbers):
        def __getitem__(self, index):
            if ending == "error" and index == 9:
                raise OSError("disk 7 is gone")
            return super().__getitem__(index)

    before = set(prefetch_threads())
    iterator = Batches(source=Failing(20), batch=2, epochs=1, shuffle=False, prefetch=3).iterate()
    next(iterator)
    threads = set(prefetch_threads()) - before
    assert threads, "batches are loaded on threads"
    if ending == "close":
        iterator.close()
    elif ending == "end":
        assert len(list(iterator)) == 9
    else:
        with pytest.raises(UserCodeFailed, match="sample 9 of Failing raised OSError: disk 7 is gone"):
            list(iterator)
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert next(iterator, None) is None


@pytest.mark.parametrize("quick_seconds", [math.inf, 1e-12])
def test_only_what_takes_long_is_loaded_on_threads(quick_seconds, monkeypatch):
    class Traced(Numbers):
        def __getitem__(self, index):
            threads.append(threading.current_thread().name)
            return super().__getitem__(index)

    monkeypatch.setattr("shardtrain.data.batches.QUICK_SECONDS", quick_seconds)
    threads = []
    batches = Batches(source=Traced(20), batch=2, epochs=1)
    assert read(batches) == read(replace(batches, prefetch=0))
    on_threads = [name.startswith("shardtrain-loader") for name in threads]
    assert on_threads == [quick_seconds < 1] * 20 + [False] * 20


def test_quick_batches_are_loaded_several_at_once_and_fail_when_they_are_asked_for(monkeypatch):
    class Failing(Numbers):
        def __getitem__(self, index):
            loaded.append(index)
            if index == 4:
                raise OSError("disk 7 is gone")
            return super().__getitem__(index)

    monkeypatch.setattr("shardtrain.data.batches.QUICK_SECONDS", math.inf)
    loaded = []
    iterator = Batches(source=Failing(20), batch=2, epochs=1, shuffle=False, prefetch=2).iterate()
    assert [next(iterator)[0]["x"].ravel().tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    assert loaded == [0, 1, 2, 3, 4]
    with pytest.raises(UserCodeFailed, match="disk 7 is gone"):
        next(iterator)


def test_a_source_may_stack_its_samples_itself():
    class Stacked(Numbers):
        def stacked_samples(self, indices):
            return {"x": np.array(indices)[:, None] + 100}

    class Augmented(Stacked):
        def augmented(self, index, epoch, random):
            return self[index]

    plain = Batches(source=Numbers(5), batch=4, epochs=1, rows=[0, 1, 3])
    for source, more in ((Stacked(5), 100), (Augmented(5), 0)):
        for (batch, _), (expected, _) in zip(
            replace(plain, source=source).iterate(), plain.iterate(), strict=True
        ):
            np.testing.assert_array_equal(batch["x"], expected["x"] + more)
            np.testing.assert_array_equal(batch["weights"], expected["weights"])


@pytest.mark.parametrize(
    ("stacked", "problem"),
    [
        ([1, 2], "it is a list; give a dict that names each array"),
        ({"x": np.zeros((3, 2))}, r"'x' has shape \(3, 2\); give an array of 2 rows, one for each index"),
        ({"x": np.zeros(2), "weights": np.ones(1)}, r"'weights' has shape \(1,\)"),
        ({"x": np.float32(1)}, "'x' is a float32; use np.stack"),
        ({"x": np.array(["a", "b"])}, "'x' is text .*, not numbers"),
    ],
)
def test_says_what_is_wrong_with_rows_that_a_source_stacked(stacked, problem):
    class Wrong(Numbers):
        def stacked_samples(self, indices):
            return stacked

    batches = Batches(source=Wrong(12), batch=2, shuffle=False)
    with pytest.raises(ValueError, match=rf"stacked_samples\(\[0, 1\]\) of Wrong[^:]*:\n  - {problem}"):
        batches.load({"epoch": 0, "index": 0})


def test_a_subclass_that_reads_its_samples_itself_is_not_read_by_the_stack_of_its_base():
    class Stacked(Numbers):
        def stacked_samples(self, indices):
            return {"x": np.zeros((len(indices), 1))}

    class Masked(Stacked):
        def __getitem__(self, index):
            return {"x": np.array([7.0])}

    batch = Batches(source=Masked(4), batch=2).load({"epoch": 0, "index": 0})
    np.testing.assert_array_equal(batch["x"], [[7], [7]])


def test_names_the_samples_that_a_source_could_not_stack():
    class Failing(Numbers):
        def stacked_samples(self, indices):
            raise KeyError("shelf")

    batches = Batches(source=Failing(4), batch=2, shuffle=False)
    with pytest.raises(UserCodeFailed, match=r"stacked_samples\(\[0, 1\]\) of Failing raised KeyError"):
        batches.load({"epoch": 0, "index": 0})


def test_lists_everything_that_is_wrong():
    with pytest.raises(ValueError, match="cannot be made") as error:
        Batches(source=[], batch=0, seed=-1, epochs=0, prefetch=-2)
    assert str(error.value).splitlines()[1:] == [
        "  - batch is 0; use 1 or more",
        "  - seed is -1; use 0 or more",
        "  - epochs is 0; use 1 or more",
        "  - prefetch is -2; use 0 or more",
        "  - source has no samples; give one with 1 or more",
    ]
    with pytest.raises(ValueError, match=r"rows has \[4, -1\]; use rows from 0 to 3"):
        Batches(source=Numbers(9), batch=4, rows=[0, 4, -1])
    with pytest.raises(ValueError, match="rows has nothing; use rows from 0 to 3"):
        Batches(source=Numbers(9), batch=4, rows=[])


@pytest.mark.parametrize("position", [{"epoch": 0, "index": 10}, {"epoch": -1, "index": 0}])
def test_refuses_a_position_of_other_data(position):
    with pytest.raises(ValueError, match="is not in a source of 9 samples: index goes from 0 to 9"):
        Batches(source=Numbers(9), batch=4).iterate(position)


def test_refuses_samples_that_differ():
    source = [{"x": np.zeros(2)}, {"x": np.zeros(3)}]
    with pytest.raises(ValueError, match=r"samples of one batch differ: \{'x': \(2,\)\} and \{'x': \(3,\)\}"):
        Batches(source=source, batch=2).load({"epoch": 0, "index": 0})
