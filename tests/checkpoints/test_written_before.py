"""Checkpoints and run files of an earlier version: listed, verified, exported, resumed with its losses."""

import json
import shutil
import zlib
from pathlib import Path

import jax
import pytest
from quiet_training import train_quietly
from safetensors.numpy import load_file

from shardtrain import cli
from shardtrain.checkpoints.reader import find_readers
from shardtrain.cli.run_options import parse_run

FOLDER = Path(__file__).parent / "written_before"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())

OPTIONS = {
    "mesh": "--optimizer.learning-rate.peak 1e-2",
    "stages": "--optimizer.learning-rate.peak 0.3 --optimizer.name sgd",
}


def losses_of(name, mesh, run_dir, monkeypatch):
    """Train the imported run file to step 5 on two devices; return the losses by step and the output."""
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(jax, "device_count", lambda: len(devices))
    words = f"--data.path {FOLDER}/tokens.npy --batch 12 --steps 5 --seed 3 --log-every 1 --run-dir {run_dir}"
    words += f" --optimizer.learning-rate.warmup 1 {OPTIONS[name]} --mesh {mesh}"
    run, _ = parse_run("train", [str(FOLDER / "imported/run.py"), *words.split()])
    _, printed, rows = train_quietly(run)
    assert rows[-1]["heldout/loss"] == pytest.approx(EXPECTED[name]["heldout_loss"], rel=1e-5)
    return {str(row["step"]): row["train/loss"] for row in rows}, printed


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("mesh", "fsdp=2"),
        pytest.param("mesh", "tensor=2", marks=pytest.mark.full),
        pytest.param("stages", "fsdp=2", marks=pytest.mark.full),
    ],
)
def test_an_earlier_run_resumes_with_the_losses_it_would_have_had(name, mesh, tmp_path, monkeypatch):
    run_dir = shutil.copytree(FOLDER / name, tmp_path / "run")
    losses, printed = losses_of(name, mesh, run_dir, monkeypatch)
    assert "step 4/5" in printed
    assert "step 3/5" not in printed
    assert losses == pytest.approx(EXPECTED[name]["losses"], rel=1e-5)


def test_an_earlier_run_file_starts_from_its_imported_parameters(tmp_path, monkeypatch):
    losses, printed = losses_of("mesh", "data=2", tmp_path / "run", monkeypatch)
    assert "parameters of step 0" in printed
    assert losses == pytest.approx(EXPECTED["mesh"]["losses"], rel=1e-5)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_array_of_an_earlier_checkpoint_is_read_bit_by_bit(name):
    (reader,) = find_readers(FOLDER / name / "checkpoints")
    assert reader.step == EXPECTED[name]["step"]
    assert reader.problems() == []
    found = {path: zlib.crc32(reader.read(path).tobytes()) for path in reader.leaves}
    assert found == EXPECTED[name]["arrays"]


@pytest.mark.parametrize("name", EXPECTED)
def test_commands_take_an_earlier_checkpoint(name, tmp_path, capsys):
    def output(*words):
        assert cli.main(["checkpoint", *map(str, words)]) == 0
        return capsys.readouterr().out

    run = FOLDER / name
    assert output("ls", run)
    assert "params/blocks/attention/q/kernel" in output("show", run)
    assert output("verify", run)
    output("export", run, tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert zlib.crc32(exported.tobytes()) == EXPECTED[name]["arrays"]["params/embedding"]
