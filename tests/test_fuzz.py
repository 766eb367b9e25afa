"""Files of strangers, crafted or mutated: no code runs, no file outside is touched.

Nothing hangs either, and nothing is allocated that is not there. The promises are those of SECURITY.md.
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tomli_w
from guarded_readers import EVIL, garbled, spoilt
from safetensors.numpy import save

from shardtrain import cli
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.discover import discover
from shardtrain.checkpoints.manifest import _text
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.processes import gather_alone
from shardtrain.checkpoints.reader import visible_readers
from shardtrain.cli.checkpoint_files import find_mask_token, run_file_text
from shardtrain.cli.run_file import load_run
from shardtrain.errors.options import list_plain_options
from shardtrain.imported import option_problems, read_mask_token, read_model, write_about
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.huggingface.families import FAMILIES
from shardtrain.models.huggingface.files import import_model
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.table_file import read_table, write_table
from shardtrain.report.checkpoints import list_text, show_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout_file import read_layout
from shardtrain.trainer.run_folder import MARK, take_mark

NUMBER = 90
"""Of files per format, without `--full`."""
GOLDEN = Path(__file__).parent / "models" / "golden"


@pytest.fixture(autouse=True)
def number_of_files(pytestconfig, monkeypatch):
    if pytestconfig.getoption("--full"):
        monkeypatch.setitem(globals(), "NUMBER", 500)


def json_inputs(value: Any, seed: str, number: int | None = None) -> Iterator[bytes]:
    """Two of three are JSON, with some of what Python alone takes for JSON."""
    number = number or NUMBER
    rng = random.Random(seed)
    for i in range(number):
        text = json.dumps(spoilt(value, rng) if i % 3 else value).encode()
        yield text if i % 3 else garbled(text, rng)


def golden(family: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    name = {"gemma3_text": "gemma3", "resnet": "resnet18", "mt5": "t5"}.get(family, family)
    with np.load(GOLDEN / f"{name}.npz") as file:
        state = {n.removeprefix("weight/"): file[n] for n in file.files if n.startswith("weight/")}
        return json.loads(str(file["config"])) | {"model_type": family}, state


def test_manifests(guarded, tmp_path):
    folder = tmp_path / "run"
    with Checkpoints(folder, CheckpointPolicy()) as checkpoints:
        for step in (1, 2):
            state = {"w": jnp.full((4, 4), step, jnp.float32), "b": jnp.ones(3)}
            checkpoints.save(step, state, {"run": {"seed": 0, "batch": 4}, "position": {"epoch": 0}})
    path = folder / "step_00000002" / "manifest.json"
    text = path.read_text()
    body, rng, counts = json.loads(text)["body"], random.Random("manifest"), {1: 0, 2: 0}
    for i in range(NUMBER):
        if i % 4:
            path.write_text(_text(spoilt(body, rng)))
        else:
            path.write_bytes(garbled(text.encode(), rng))

        def read(show: bool = i % 10 == 0) -> None:
            found = visible_readers(folder)
            for reader in found:
                if show or path.parent in reader.folders.values():  # nobody changed the other step
                    for name in reader.leaves:
                        reader.read(name)
            if show:
                list_text(found, [])
                for reader in found:
                    show_text(reader)

        guarded(read)
        found = guarded(lambda: discover([folder], None, gather_alone))
        if isinstance(found, ValueError):
            assert "reads schema 1 and 2" in str(found)
        else:
            counts[found.step] += 1
    assert counts[1] > NUMBER / 3
    assert counts[2] > 0


def test_tokenizers(guarded, tmp_path):
    config = EncoderConfig(vocab=32, seq=8, embed=16, num_layers=1, num_heads=4)
    content = {
        "added_tokens": [{"id": 4, "content": "[MASK]", "special": True}],
        "model": {"vocab": {"a": 0}},
    }
    path, folder, found = tmp_path / "tokenizer.json", tmp_path / "in", []
    folder.mkdir()
    (folder / "run.py").write_text(run_file_text(EncoderConfig, "masked tokens"))
    for data in json_inputs(content, "tokenizer"):
        path.write_bytes(data)
        token = guarded(lambda: find_mask_token([path], 32))
        if type(token) is int:
            assert 0 <= token < 32
            write_about(folder / "model.json", config, token)
            assert load_run(str(folder / "run.py")).data.mask_token == token
        found.append(type(token))
    assert set(found) == {int, type(None), ValueError}


@pytest.mark.parametrize("family", FAMILIES)
def test_configs(family, guarded, tmp_path):
    config, state = golden(family)
    (tmp_path / "model.safetensors").write_bytes(save(state))
    num_read, number = 0, NUMBER // 3
    for data in json_inputs(config, family, number):
        (tmp_path / "config.json").write_bytes(data)
        found = guarded(lambda: import_model(tmp_path))
        if not isinstance(found, Exception):
            num_read += 1
            assert option_problems(type(found.config), list_plain_options(found.config)) == []
            write_about(tmp_path / "model.json", found.config)
            assert read_model(tmp_path / "model.json", type(found.config)) == found.config
    assert 0 < num_read < number


def test_safetensors(guarded, tmp_path):
    config, state = golden("gpt2")
    (tmp_path / "config.json").write_text(json.dumps(config))
    data, rng, num_read = save(state), random.Random("safetensors"), 0
    (length,) = struct.unpack("<Q", data[:8])
    header, arrays = json.loads(data[8 : 8 + length]), data[8 + length :]
    for i in range(NUMBER):
        text = json.dumps(spoilt(header, rng)).encode()
        if i % 3 == 0:
            text = garbled(data[8 : 8 + length], rng)
        size = rng.choice((0, 1, 2**63, 2**64 - 1, 10**8, len(text) - 1)) if i % 10 == 0 else len(text)
        (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", size) + text + arrays)
        found = guarded(lambda: len(dict(import_model(tmp_path).arrays)))
        num_read += isinstance(found, int)
    assert num_read < NUMBER / 4


def test_options_of_imported_models(guarded, tmp_path):
    path, found = tmp_path / "model.json", []
    write_about(path, DecoderConfig(vocab=32, seq=8, embed=16, num_layers=1, num_heads=4), 3)
    for data in json_inputs(json.loads(path.read_text()), "options"):
        path.write_bytes(data)
        config = guarded(lambda: read_model(path, DecoderConfig))
        found.append(type(config))
        token = guarded(lambda: read_mask_token(path, 32))
        assert isinstance(token, Exception) or 0 <= token < 32
    assert set(found) == {DecoderConfig, ValueError}


def test_marks_of_programs(guarded, tmp_path):
    mark = {"program": "the training step", "options": "--mesh data=2", "jax": "0.10.2"}
    said = []
    for data in json_inputs(mark, "mark"):
        (tmp_path / MARK).write_bytes(data)
        said.append(guarded(lambda: take_mark(tmp_path)))
    assert all(isinstance(text, str) and text.isprintable() for text in said)
    assert {"an earlier start" in text for text in said} == {True, False}


def test_meshes(guarded, tmp_path):
    files = [path.read_bytes() for path in Path("meshes").resolve().parents[0].glob("*.toml")]
    files += [path.read_bytes() for path in (Path(__file__).parents[1] / "meshes").glob("one_*.toml")]
    extra = b'[parameters]\nembed = ["fsdp"]\n[activations]\nmlp = []\n'
    values = [json.dumps(each).encode() for each in EVIL] + [
        b"1_0",
        b"0x7fffffffffffffff",
        b"inf",
        b"[[[[]]]]",
    ]
    rng, path, found = random.Random("mesh"), tmp_path / "mine.toml", []
    for i in range(NUMBER):
        lines = (rng.choice(files) + extra).split(b"\n")
        at = rng.choice([n for n, line in enumerate(lines) if b"=" in line])
        lines[at] = lines[at].partition(b"=")[0] + b"= " + rng.choice(values)
        path.write_bytes(b"\n".join(lines) if i % 3 else garbled(b"\n".join(lines), rng))
        layout = guarded(lambda: read_layout(path))
        found.append(type(layout).__name__)
        if not isinstance(layout, Exception):
            guarded(lambda layout=layout: axis_sizes(layout.mesh, 8))
            path.write_text(tomli_w.dumps(asdict(layout)))
            assert read_layout(path) == layout
    assert set(found) == {"Layout", "ValueError"}


def test_schedules(guarded, tmp_path):
    path, rng, found = tmp_path / "mine.csv", random.Random("schedule"), []
    write_table(make_table("1f1b", 3, 4), path)
    lines = path.read_text().splitlines()
    for i in range(NUMBER):
        mine = [line.split(",") for line in lines]
        for _ in range(rng.randint(0, 3)):
            row = rng.choice(mine)
            value = rng.choice((*EVIL, "backward", "1", "10000000000", "\u0661"))
            row[rng.randrange(len(row))] = str(value).replace("\ud800", "?")
        data = "\n".join(",".join(row) for row in mine).encode()
        path.write_bytes(data if i % 3 else garbled(data, rng))
        for lockstep in (False, True):
            found.append(
                type(guarded(lambda lockstep=lockstep: read_table(path, lockstep=lockstep))).__name__
            )
    assert set(found) == {"Table", "ValueError"}


def names(rng: random.Random) -> Iterator[str]:
    """Like those of steps, and not."""
    numbers = ("1", "00000001", "00000003", "-1", "9" * 15, "9" * 16, "9" * 200, "\u0661", "1e3", "0x1", "")
    parts = (
        "",
        ".part-0-of-2",
        ".part-0-of-3000000000",
        ".part-9-of-2",
        ".part-0-of-0",
        ".part--1-of-2",
        ".part-",
    )
    ends = (
        "",
        ".partial",
        ".partial.partial",
        "\n",
        "\x1b[2J",
        "\x1b]0;x\x07.partial",
        " ",
        "\udcff",
        "\u202e",
    )
    while True:
        name = f"step_{rng.choice(numbers)}{rng.choice(parts)}{rng.choice(ends)}"
        name = garbled(os.fsencode(name), rng)[:200] if rng.random() < 0.2 else os.fsencode(name)
        if name.replace(b".", b"") and b"/" not in name and b"\0" not in name and len(name) < 250:
            yield os.fsdecode(name)


def test_names_in_a_run_folder(guarded, tmp_path, capsys):
    rng, outside, real = random.Random("names"), tmp_path / "outside", tmp_path / "real"
    with Checkpoints(real, CheckpointPolicy(keep=9)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": jnp.ones(3)}, {})
    made = names(rng)
    for i in range(NUMBER // 20):
        folder = tmp_path / f"run{i}"
        shutil.copytree(real, folder)
        for name in [next(made) for _ in range(20)]:
            path = folder / name
            if path.exists() or path.is_symlink():
                continue
            rng.choice(
                (
                    path.mkdir,
                    lambda path=path: path.write_text("{}"),
                    lambda path=path: os.mkfifo(path),
                    lambda path=path: path.symlink_to(outside / "step_00000001"),
                    lambda path=path: shutil.copytree(real / "step_00000001", path),
                )
            )()
        for words in (["ls"], ["show"], ["verify"], ["prune", "--keep", "1"]):
            assert guarded(lambda w=words, f=folder: cli.main(["checkpoint", w[0], str(f), *w[1:]])) in (
                0,
                1,
                2,
            )
            said = "".join(capsys.readouterr())
            assert "Traceback" not in said
            assert all(c == "\n" or c.isprintable() for c in said)
        chosen = guarded(lambda f=folder: discover([f], None, gather_alone))
        assert chosen.step == 2
