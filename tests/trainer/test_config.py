"""A run as flat data: short, whatever its fields hold, and different where they differ; its public types."""

import dataclasses
import typing
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import shardtrain
import shardtrain.combine
from shardtrain.checkpoints.differences import compare_descriptions
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.trainer.config import MOST_CHARACTERS, Run, describe, run_text
from shardtrain.trainer.strategy import Strategy


@dataclass(frozen=True)
class Data:
    """Samples as the field of a run's data."""

    samples: Any


@pytest.mark.parametrize(
    "samples",
    [
        [{"x": i} for i in range(5000)],
        {f"story {i}": i for i in range(5000)},
        "a long story " * 5000,
        [f"story {i} " * 20 for i in range(50)],
        [np.arange(i) for i in range(5000)],
        np.zeros((5000, 3), np.float32),
    ],
    ids=["dicts", "mapping", "text", "texts", "arrays", "array"],
)
def test_a_description_is_short_whatever_the_samples_are(samples):
    text = run_text(describe(Data(samples)))
    assert text.count("\n") == 1
    assert len(text) < MOST_CHARACTERS
    assert "0x" not in text


def test_long_lists_that_differ_have_different_descriptions():
    ones, others = (describe(Data([*range(100), last])) for last in (1, 2))
    assert ones["samples"].startswith("101 items, sha256 ")
    assert len(compare_descriptions(ones, others)) == 1
    assert describe(Data([*range(100), 1])) == ones


def test_short_ones_stand_as_they_are():
    assert describe(Data([1, "a", None]))["samples"] == [1, "a", None]
    assert describe(Data({"a": {"b": 1}})) == {"samples.a.b": 1}
    assert describe(Data(np.zeros((2, 3), np.float32)))["samples"] == "given in Python (float32 (2, 3))"


def test_every_type_that_a_field_of_a_run_takes_is_public():
    """So that a run file needs `shardtrain` alone, and for a combiner of its own `shardtrain.combine`."""
    missing: set[str] = set()
    seen: set[Any] = set()
    queue: list[Any] = [Run]
    while queue:
        owner = queue.pop()
        for hint in typing.get_type_hints(owner).values():
            for kind in named_types(hint):
                if kind.__module__.startswith("shardtrain.") and kind not in seen:
                    seen.add(kind)
                    if kind not in (getattr(package, kind.__name__, None) for package in PUBLIC):
                        missing.add(f"{owner.__name__} takes {kind.__module__}.{kind.__name__}")
                    queue += [kind] if dataclasses.is_dataclass(kind) else []
    assert not missing
    assert {Strategy, Synchronisation} <= seen


PUBLIC = (shardtrain, shardtrain.combine)


def named_types(hint):
    """The classes in a type hint, such as those of a union."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return [hint]
    return [found for inner in typing.get_args(hint) for found in named_types(inner)]
