"""Held-out data: one set, or several by name, on one device and across islands; with hooks on rank 0."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quiet_training import InMemory, random_tokens, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.evaluations import read_evaluations
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.config import Run
from shardtrain.trainer.sources import open_sources

PROGRAM = """
import json, sys
from pathlib import Path

from quiet_training import InMemory, random_tokens, train_quietly
from tiny_language_model import TinyConfig

from shardtrain import Across, CheckpointPolicy, Hook, Layout, Run, Strategy, join

FOLDER, AXIS = Path(sys.argv[1]), sys.argv[2]
ISLANDS = join()
DATA = InMemory(random_tokens(), {"a": random_tokens(13, 1), "b": random_tokens(5, 2)})
EVENTS = []


def saved(step, folder):
    parts = list(folder.parent.glob(f"step_{step:08d}*"))
    EVENTS.append(["save", step, len(parts), folder.name])


run = Run(
    model=TinyConfig(vocab=32, num_layers=2),
    data=DATA,
    strategy=Strategy(layout=Layout(mesh={"data": -1}), across=Across(axis=AXIS)),
    batch=8,
    steps=4,
    log_every=2,
    evaluate_every=2,
    checkpoints=CheckpointPolicy(best="heldout/a/loss"),
    run_dir=FOLDER,
    hooks=[
        Hook(on_step=lambda step: EVENTS.append(["step", step]), on_save=saved),
        Hook(on_evaluation=lambda step, metrics: EVENTS.append(["evaluation", step, sorted(metrics)])),
        Hook(on_end=lambda step, ending: EVENTS.append(["end", step, ending])),
    ],
)
train_quietly(run, islands=ISLANDS)
sys.stdout.write(json.dumps(EVENTS))
"""


SAMPLES, A, B = random_tokens(), random_tokens(13, 1), random_tokens(5, 2)
RUN = Run(
    model=TinyConfig(vocab=32, num_layers=2),
    data=InMemory(SAMPLES),
    batch=8,
    steps=4,
    log_every=2,
    evaluate_every=2,
)


def start(folder: Path, heldout: Any, **changes: Any) -> tuple[list[dict[str, float]], str]:
    """The held-out values of each line, and what was printed."""
    run = dataclasses.replace(RUN, data=InMemory(SAMPLES, heldout), run_dir=folder, **changes)
    _, printed, lines = train_quietly(run)
    return [{k: v for k, v in line.items() if k.startswith("heldout/")} for line in lines], printed


@pytest.fixture(scope="module")
def named(tmp_path_factory, on_one_device):
    folder = tmp_path_factory.mktemp("named")
    with on_one_device():
        return *start(folder, {"a": A, "b": B}), folder


def test_each_set_has_the_losses_that_it_has_as_the_only_one(named, tmp_path, one_device):
    lines, printed, folder = named
    assert [sorted(line) for line in lines] == [["heldout/a/loss", "heldout/b/loss"]] * 2
    alone, _ = start(tmp_path, A)
    assert [line["heldout/loss"] for line in alone] == [line["heldout/a/loss"] for line in lines]
    last = lines[-1]
    assert f"heldout a {last['heldout/a/loss']:.4f}  heldout b {last['heldout/b/loss']:.4f}" in printed
    assert (folder / "loss.png").stat().st_size > 0


def test_the_number_of_batches_is_that_of_each_set(named, tmp_path, one_device):
    lines, _, _ = named
    first, _ = start(tmp_path, {"a": A, "b": B}, evaluate_batches=1)
    # b has less than a batch, a has two
    assert [line["heldout/b/loss"] for line in first] == [line["heldout/b/loss"] for line in lines]
    assert first[0]["heldout/a/loss"] != lines[0]["heldout/a/loss"]


# test_islands_train.py has the held-out loss of replicas
@pytest.mark.full
@pytest.mark.parametrize("axis", ["data", "pipeline"])
def test_islands_evaluate_sets_as_a_mesh_does_and_rank_0_calls_the_hooks(axis, named, tmp_path, mpiexec):
    first, second = mpiexec(2, PROGRAM, tmp_path, axis)
    expected, _, _ = named
    got = [
        {k: v for k, v in line.items() if k.startswith("heldout/")}
        for line in read_jsonl(tmp_path / "metrics.jsonl")
    ]
    assert [line.keys() for line in got] == [line.keys() for line in expected]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(list(a.values()), list(b.values()), rtol=2e-5)
    events = json.loads(first)
    assert json.loads(second) == []
    assert [each[1] for each in events if each[0] == "step"] == [1, 2, 3, 4]
    names = ["heldout/a/loss", "heldout/b/loss"]
    assert [each for each in events if each[0] == "evaluation"] == [["evaluation", s, names] for s in (2, 4)]
    # step 2 was saved as the best so far; all parts were there when the hook was called
    num_parts, suffix = (1, "") if axis == "data" else (2, ".part-0-of-2")
    assert [each for each in events if each[0] == "save"] == [
        ["save", step, num_parts, f"step_{step:08d}{suffix}"] for step in (2, 4)
    ]
    assert events[-1] == ["end", 4, "finished"]
    found = read_evaluations(tmp_path / "checkpoints")
    assert found is not None
    assert {step: dict(values) for step, values in found.values.items()} == dict(
        zip((2, 4), got, strict=True)
    )


class Samples(Mapping[int, Any]):
    """A dict of samples by number is one set."""

    def __len__(self) -> int:
        return len(B)

    def __iter__(self) -> Any:
        return iter(range(len(B)))

    def __getitem__(self, index: int) -> Any:
        return B[index]


def test_a_dict_of_samples_is_one_set_and_no_sets_are_none(tmp_path):
    for heldout, names in ((Samples(), [""]), ({}, []), (None, []), ({"a": A}, ["a"])):
        _, sets = open_sources(dataclasses.replace(RUN, data=InMemory(SAMPLES, heldout)), tmp_path)
        assert list(sets) == names


def test_what_is_no_set_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError) as error:
        start(tmp_path, {"a": A, "b/": iter(B)})
    assert str(error.value).splitlines()[1:] == [
        "  - heldout(folder)['b/'] gave a list_iterator; give something with a length and samples by number"
        " (__len__ and __getitem__), such as the dataset of a loader; shardtrain makes batches of it",
        "  - heldout(folder) gave sets named 'a', 'b/'; each set's loss is logged as heldout/NAME/loss: give"
        " each a name, without / at its ends",
    ]
