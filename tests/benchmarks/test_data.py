"""The benchmarks of data, at tiny sizes: every side runs, and figures that are no times are right."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # the benchmark sets it
        yield importlib.import_module("data"), importlib.import_module("tokenizing")


@pytest.mark.full
def test_steps_are_fed_from_memory_tokens_and_images(modules, tmp_path, capsys):
    data, _ = modules
    options = data.Options(size="tiny", steps=3, rounds=2)
    for name, part in (("tokens", data.tokens_part), ("images", data.images_part)):
        found = part(tmp_path / name, options)
        sides = ["Parquet", "ready tokens"] if name == "tokens" else ["JPEG folder"]
        text = data.report(name, found)
        assert all(text.count(side) == 2 for side in sides), text
        assert "from memory again" in text


def test_tokens_windows_and_indices(modules, tmp_path):
    _, tokenizing = modules
    options = tokenizing.Options(megabytes=0.1, workers=(1,), rounds=1, documents=500, shards=5, windows=100)
    found = tokenizing.tokenize_part(tmp_path / "text", options)
    assert set(found["tokens_per_second"]) == {"shardtrain, 1", "library, 1"}
    filled = [each["filled"] for each in tokenizing.packing_part(tmp_path, options).values()]
    assert len(filled) == 3
    assert min(filled) >= 0.98
    (tmp_path / "index").mkdir()
    assert tokenizing.index_part(tmp_path / "index", options)["windows"] == 99
