"""Manifests of strangers: a wrong one is named as broken, and is neither followed nor counted up to."""

import json
import os

import jax.numpy as jnp
import pytest

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.manifest import _text, problems
from shardtrain.checkpoints.paths import (
    delete,
    find_finished_steps,
    partial_folder,
    partial_folders,
    read_name,
    revoke_unfinished,
    step_folder,
)
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.reader import find_readers, visible_readers
from shardtrain.trainer.resume import _parse_position


@pytest.fixture
def folder(tmp_path):
    """Two steps; the second is there to be spoilt."""
    with Checkpoints(tmp_path, CheckpointPolicy()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.full((4, 4), step, jnp.float32)}, {"run": {"seed": 0}})
    return tmp_path


def edit(folder, change):
    """Change the manifest of step 2, with a checksum that is right."""
    path = folder / "step_00000002" / "manifest.json"
    body = json.loads(path.read_text())["body"]
    path.write_text(_text(change(body) or body))


FILE = {"num_bytes": 1, "crc32": 0}
LEAF = {"shape": [4, 4], "dtype": "float32"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b["files"].update({"/dev/zero": FILE}), "'/dev/zero' leads out of its folder"),
        (lambda b: b["files"].update({"../step_00000001/manifest.json": FILE}), "leads out of its folder"),
        (lambda b: b["files"].update({"a\x1b[31m\n": FILE}), "has control characters"),
        (lambda b: b["files"].update({"a": [1]}), "a is [1]; it is dict"),
        (lambda b: b["files"].update({"a": {"num_bytes": -1, "crc32": 0}}), "num_bytes of a is -1"),
        (lambda b: b["files"].update({"a": {"num_bytes": True, "crc32": 0}}), "num_bytes of a is True"),
        (lambda b: b.update(files=[]), "files is []; it is dict"),
        (lambda b: b.update(leaves=None), "leaves is None; it is dict"),
        (lambda b: b.update(step="2"), "step is '2'; it is a whole number"),
        (lambda b: b.update(part=[0, 10**9]), "the number of parts is 1000000000"),
        (lambda b: b.update(part=[2, 2]), "the index of the part is 2"),
        (lambda b: b.update(part=7), "part is 7; it is an index and a count"),
        (lambda b: b.update(extra=[]), "extra is []; it is dict"),
        (lambda b: b.update(extra={"run": [1]}), "extra/run is [1]; it is dict"),
        (lambda b: b.update(saved_seconds=1e300), "saved_seconds is 1e+300; it is a number from 0 to"),
        (lambda b: b.pop("orbax_version") and None, "it has no orbax_version"),
        (lambda b: b.update(schema="2"), "schema is '2'"),
        (lambda b: b["leaves"].update(w={**LEAF, "dtype": "O"}), "the dtype of w is 'O'"),
        (lambda b: b["leaves"].update(w={**LEAF, "dtype": "V8"}), "the dtype of w is 'V8'"),
        (lambda b: b["leaves"].update(w={**LEAF, "dtype": ["float32"]}), "the dtype of w is ['float32']"),
        (lambda b: b["leaves"].update(w={**LEAF, "shape": [0, 4]}), "a size of w is 0"),
        (lambda b: b["leaves"].update(w={**LEAF, "shape": [-4, 4]}), "a size of w is -4"),
        (lambda b: b["leaves"].update(w={**LEAF, "shape": [1] * 99}), "w has 99 dims; at most 32 are read"),
        (
            lambda b: b["leaves"].update(w={**LEAF, "shape": [10**11]}),
            "its arrays declare 400,000,000,000 bytes",
        ),
        (
            lambda b: b["leaves"].update(w={**LEAF, "lie": {"num_rows": 10**12}}),
            "num_rows of w is 1000000000000",
        ),
        (
            lambda b: b["leaves"].update(w={**LEAF, "lie": {"rows": [0], "num_rows": 9}}),
            "do not fit its shape",
        ),
        (
            lambda b: b["leaves"].update(w={**LEAF, "lie": {"rows": [9] * 4, "num_rows": 9}}),
            "a row of w is 9",
        ),
        (lambda b: b["leaves"].update(w={**LEAF, "origin": {"place": 1}}), "has unknown keys ['place']"),
        (
            lambda b: b["leaves"].update(w={**LEAF, "lie": {"replica": 3, "num_replicas": 2}}),
            "replica 3 of 2",
        ),
        (
            lambda b: b["leaves"].update(w={**LEAF, "lie": {"num_replicas": 2}}),
            "counts 2 replicas and has shape",
        ),
    ],
)
def test_a_manifest_of_the_wrong_form_is_skipped(change, words, folder):
    edit(folder, change)
    (problem,) = problems(folder / "step_00000002")
    assert problem.startswith("manifest.json is not of the form that shardtrain writes: ")
    assert words in problem
    said = []
    with Checkpoints(folder, CheckpointPolicy(), report=said.append) as checkpoints:
        restored = checkpoints.restore({"w": jnp.zeros((4, 4))})
    assert restored is not None
    assert restored.step == 1
    assert any(words in line for line in said)


@pytest.mark.parametrize(
    "text", ["[" * 99_999, "{}", "[]", "null", '{"body": 1}', "\ud800", '{"body": NaN}', "9" * 9999]
)
def test_a_text_that_is_no_manifest_is_skipped(text, folder):
    (folder / "step_00000002" / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    (problem,) = problems(folder / "step_00000002")
    assert "manifest.json" in problem


def test_links_and_what_blocks_are_named(folder, tmp_path):
    step = folder / "step_00000002"
    largest = max(step.rglob("d/*"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.unlink()
    (folder / "elsewhere").write_bytes(content)
    largest.symlink_to(folder / "elsewhere")
    name = largest.relative_to(step)
    assert problems(step) == [f"{name} is a link"]
    with pytest.raises(ValueError, match=f"is not read: {name} is a link"):
        find_readers(folder)[1].read("w")
    largest.unlink()
    os.mkfifo(largest)
    assert problems(step) == [f"{name} is a FIFO"]
    (step / "manifest.json").unlink()
    os.mkfifo(step / "manifest.json")
    (problem,) = problems(step)
    assert "manifest.json is a FIFO, not a regular file" in problem


def test_a_step_that_is_a_link_is_broken_and_deleted_alone(folder):
    (folder / "step_00000002").rename(folder / "moved")
    (folder / "step_00000002").symlink_to("moved")
    assert problems(folder / "step_00000002") == ["it is a link; put the folder itself in its place"]
    delete(folder / "step_00000002")
    assert not (folder / "step_00000002").is_symlink()
    assert problems(folder / "moved")[0] == "its manifest is that of step 2"


def test_a_number_of_parts_that_no_run_has_is_not_counted_up_to(tmp_path):
    for name in (
        "step_00000001.part-0-of-3000000000",
        "step_00000001.part-0-of-99999",
        "step_00000001.part-5-of-3",
        "step_00000001.part-0-of-1",
        f"step_{'9' * 99}",
        "step_0000000\u0661",
        "step_00000001\n",
        "step_00000001.partial\x1b[2J.partial",
    ):
        (tmp_path / name).mkdir()
        assert read_name(name)[0] == -1 or name.endswith("of-1")
    assert find_finished_steps(tmp_path) == {}
    assert visible_readers(tmp_path) == []
    assert partial_folders(tmp_path) == []
    (tmp_path / "step_00000001.part-0-of-16384").mkdir()
    (reader,) = visible_readers(tmp_path)
    assert reader.problems()[-1] == "part 1, 2, 3, 4, 5, 6, 7, 8 and 16375 more of 16384 cannot be seen"


def test_what_other_writers_have_not_finished_is_revoked(tmp_path):
    mine, other, old = (
        partial_folder(tmp_path, step, writer=by) for step, by in ((7, "a"), (7, "b.c"), (5, "d"))
    )
    for each in (mine, other, old, partial_folder(tmp_path, 5), step_folder(tmp_path, 3)):
        each.mkdir()
        (each / "file").touch()
    assert len(partial_folders(tmp_path)) == 4
    assert partial_folders(tmp_path, "a") == [partial_folder(tmp_path, 5), mine]
    assert list(find_finished_steps(tmp_path)) == [3]
    asked = []
    revoke_unfinished(tmp_path, "a", lambda names: asked.append(names) or {"d"})
    assert asked == [{"b.c", "d"}]
    assert other.exists()
    revoke_unfinished(tmp_path, "a", lambda names: names)
    with pytest.raises(FileNotFoundError):
        other.rename(step_folder(tmp_path, 7))
    mine.rename(step_folder(tmp_path, 7))
    assert list(find_finished_steps(tmp_path)) == [3, 7]
    assert partial_folders(tmp_path) == [partial_folder(tmp_path, 5)]
    assert not list(tmp_path.glob(".*"))


def test_an_array_whose_file_says_otherwise_is_not_read(folder):
    def change(body):
        body["leaves"]["w"]["shape"] = [4, 5]

    edit(folder, change)
    with pytest.raises(ValueError, match=r"its file has float32 \(4, 4\), and the manifest float32 \(4, 5\)"):
        find_readers(folder)[1].read("w")


def test_an_array_that_declares_more_than_is_there_is_not_allocated(tmp_path):
    """Its metadata is forged, as the manifest is: 400 GB, of which no chunk is there."""
    import tensorstore

    with Checkpoints(tmp_path, CheckpointPolicy()) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3), "b": jnp.ones((512, 512))}, {})
    base = {"driver": "file", "path": f"{tmp_path}/step_00000001/arrays/"}
    for size, compressor, words in (
        (10**11, None, "it declares 400,000,000,000 bytes, and its files can hold 1,"),
        (10**7, None, "it declares 40,000,000 bytes, and its files can hold 1,"),
        (10**11, {"id": "zstd", "level": 1}, "it declares 400,000,000,000 bytes, and its files can hold 1,"),
    ):
        metadata = {
            "shape": [size],
            "chunks": [1000],
            "dtype": "<f4",
            "compressor": compressor,
            "fill_value": 0,
        }
        kvstore = {"driver": "ocdbt", "base": base, "path": "w/"}
        store = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}
        tensorstore.open(store, create=True, delete_existing=True).result()
        (reader,) = visible_readers(tmp_path)
        leaf = reader.stored_arrays["w"][0].leaf
        object.__setattr__(leaf, "shape", (size,))
        with pytest.raises(ValueError, match="w in ") as error:
            reader.read("w")
        assert words in str(error.value)


def test_a_path_that_is_not_utf_8_and_a_number_that_is_not_finite_come_back(tmp_path):
    extra = {"run": {"data.paths": ["\udcff.txt"], "limit": float("inf")}}
    with Checkpoints(tmp_path, CheckpointPolicy()) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(3)}, extra)
    assert find_readers(tmp_path)[0].extra == extra


@pytest.mark.parametrize("saved", [{}, {"epoch": 0}, {"epoch": "0", "index": 0}, {"epoch": 0, "index": -1}])
def test_a_parse_position_that_no_run_saved_is_refused(saved):
    with pytest.raises(ValueError, match=r"position/(epoch|index) is .*; it is a whole number from 0"):
        _parse_position(saved)
    assert _parse_position({"epoch": 1, "index": 2}) == {"epoch": 1, "index": 2}
