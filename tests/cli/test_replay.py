"""`shardtrain replay` of a run: equal arrays, others, steps without a checkpoint, a past that was left."""

import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from shardtrain import cli
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.cli.replay import _make_programs, select_past
from shardtrain.cli.run_options import parse_run
from shardtrain.elastic.command_file import COMMAND
from shardtrain.elastic.epoch import Epoch, Peer, found_epoch
from shardtrain.elastic.messages import to_json
from shardtrain.elastic.replay import hash_arrays
from shardtrain.elastic.run_files import RunFiles
from shardtrain.trainer.config import describe

RUN = """
from quiet_training import InMemory, random_tokens
from shardtrain import Optimizer, Run
from tiny_language_model import TinyConfig

def run():
    model, data = TinyConfig(vocab=32, dropout=0.1), InMemory(random_tokens())
    return Run(model=model, data=data, optimizer=Optimizer(), batch=8, steps=9)
"""
A, B = (Peer(name=name, address="") for name in "ab")
MESHES = {"a": {"data": 1}, "b": {"data": 2, "tensor": 2}}
EPOCHS = [
    found_epoch(1, A, 0, 4),
    Epoch(number=2, step=2, members=(A, B), slots=((0, 1), (2, 3)), why="joined b"),
    Epoch(number=3, step=2, members=(B,), slots=((2, 3, 0, 1),), why="lost a", kept=(2,)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of which the chief of one member saved step 1, and that of another a wrong step 3."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "my_run.py").write_text(RUN)
    files = RunFiles(folder / "run" / "elastic")
    for epoch in EPOCHS:
        files.propose(epoch.number, json.dumps(to_json(epoch)).encode())
    for name, mesh in MESHES.items():
        files.describe_member(name, {"mesh": mesh, "device": "cpu"})
    command = {"arguments": ["my_run.py", "--learning-rate", "0.01"], "folder": str(folder)}
    (folder / "run" / "elastic" / COMMAND).write_text(json.dumps(command))
    return folder


@pytest.fixture
def replay(folder, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.chdir(folder.parent)

    def run(first, last):
        code = cli.main(["replay", str(folder / "run"), "--from", str(first), "--to", str(last)])
        return code, *capsys.readouterr()

    return run


def test_steps_are_replayed_and_compared(folder, replay):
    run, _ = parse_run("train", [str(folder / "my_run.py"), "--learning-rate", "0.01"])
    sizes = tuple(MESHES["a"].items())
    program = _make_programs(run, folder, [sizes], 4, None)[sizes]
    total = program.compute(0, range(4))
    program.apply(0, jax.tree.map(np.asarray, total))
    code, out, err = replay(0, 1)
    assert code == 0
    assert "steps 0 to 1, by 1 islands, on 1 device\n" in err
    assert f"step 1: parameters have the SHA-256 {hash_arrays(program.state.params)}\n" in out
    assert "there is no checkpoint of step 1" in out

    extra = {"elastic": {"epoch": 1}, "run": describe(run) | {"seed": 5}}
    with Checkpoints(folder / "run" / "checkpoints", CheckpointPolicy()) as checkpoints:
        checkpoints.save(1, program.state, extra)
        wrong = jax.tree.map(lambda x: x + 1 if x.shape == (32, 8) else x, program.state)
        checkpoints.save(3, wrong, extra | {"elastic": {"epoch": 3}})
    code, out, err = replay(0, 1)
    assert (code, out.splitlines()[1]) == (0, "all arrays are those of the checkpoint of step 1, bitwise")
    code, _, err = replay(1, 4)
    assert code == 2
    assert "--from 1 --to 4 was asked for, and the run has steps 0 to 3; give steps of these" in err
    metrics = folder / "run" / "metrics.jsonl"
    metrics.write_text('{"step": 4}\n')
    assert replay(1, 4)[0] == 0
    metrics.unlink()
    code, out, err = replay(1, 3)
    assert code == 1
    assert "steps 1 to 3, by 2 islands, on 1 device; data=2 tensor=2 (4 devices)\n" in err
    assert "arrays differ from the checkpoint of step 3:\n" in out
    assert out.count(": by up to ") == 10
    assert "perhaps because of: seed: 5 -> 0\n" in out
    assert "perhaps because of: islands of different meshes" in out
    code, _, err = replay(2, 3)
    assert code == 2
    assert "step 2 has no checkpoint" in err
    for step in (5, 4, 5):
        RunFiles(folder / "run" / "elastic").mark_plain(step)
    code, _, err = replay(3, 6)
    assert code == 2
    assert "steps 4 to 6 were trained without --elastic" in err
    (folder / "run" / "elastic" / "members" / "b.json").unlink()
    code, _, err = replay(1, 3)
    assert code == 2
    assert "does not describe the meshes of these members" in err


def test_the_history_is_that_of_the_checkpoint_even_if_the_run_left_it_behind():
    again = [*EPOCHS, found_epoch(4, B, 3, 4)]

    def reader(epoch) -> Any:
        return SimpleNamespace(extra={"elastic": {"epoch": epoch}} if epoch else {})

    assert select_past(again, {6: reader(3)}, 0, 6) == again[:3]
    assert select_past(again, {6: reader(4), 3: reader(3)}, 3, 6) == again
    # a run whose islands came and went from step 3 on has a checkpoint without an epoch
    assert select_past(again, {3: reader(0)}, 3, 7) == again
    with pytest.raises(ValueError, match="the checkpoint of step 5 is of epoch 3"):
        select_past(again, {6: reader(4), 5: reader(3)}, 5, 6)
    with pytest.raises(ValueError, match="give steps in this order"):
        select_past(again, {}, 6, 3)


def test_a_run_that_is_not_elastic_is_refused(tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path), "--from", "0", "--to", "1"]) == 2
    assert "is no elastic run" in capsys.readouterr().err
