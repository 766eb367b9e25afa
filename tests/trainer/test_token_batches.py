"""Batches counted in tokens: the losses of one device on meshes and islands; islands resume bitwise."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from quiet_training import InMemory, train_quietly
from tiny_language_model import TinyConfig

from shardtrain.islands.options import Across
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.resume import _next_position, check_options, find_checkpoint
from shardtrain.trainer.strategy import Strategy

PROGRAM = Path(__file__).parents[1] / "programs" / "token_islands.py"


@pytest.fixture(scope="module")
def alone(tmp_path_factory, mpiexec):
    """The metrics of the run on one device."""
    folder = tmp_path_factory.mktemp("alone")
    mpiexec(1, PROGRAM, folder, "1", 1, 1)
    return read_jsonl(folder / "whole" / "metrics.jsonl")


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "shares", "devices", "microbatches"),
    [
        # 7 and 15 rows do not divide: they are padded
        pytest.param(1, "1", 4, 2, id="one island, padded"),
        pytest.param(2, "3,1", 1, 1, id="2 islands"),
        pytest.param(3, "2,0,1", 1, 2, id="3 islands, one empty"),
        pytest.param(4, "1,2,3,4", 1, 1, id="4 islands"),
    ],
)
def test_losses_are_those_of_one_device_and_it_resumes(
    ranks, shares, devices, microbatches, alone, mpiexec, tmp_path
):
    mpiexec(ranks, PROGRAM, tmp_path, shares, devices, microbatches, devices=devices)
    found = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    for line, expected in zip(found, alone, strict=True):
        for name in ("train/loss", "heldout/loss", "grad_norm"):
            if name in expected:
                np.testing.assert_allclose(line[name], expected[name], rtol=1e-5, err_msg=f"{name} {line}")
    assert sum("heldout/loss" in line for line in found) == 2


@pytest.mark.full
def test_shares_follow_the_seconds_of_a_token_whatever_rows_a_batch_has(mpiexec, tmp_path):
    mpiexec(2, PROGRAM, tmp_path, "auto", 1, 1)
    printed = (tmp_path / "printed.txt").read_text()
    rows = printed.partition("rows of the islands from now on: ")[2].partition(";")[0]
    # of the shortest lines, 15 in a batch, one island computes three times as many in the same time
    assert rows in ("11, 4", "12, 3"), printed


class Words:
    """Words of 1 to 4 tokens."""

    def __init__(self, longest: int = 4):
        self.lengths = [1 + i % longest for i in range(20)]

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"tokens": np.arange(self.lengths[index] + 1, dtype=np.int32)}


def tiny(folder, **changes):
    run = Run(
        model=TinyConfig(vocab=8),
        data=InMemory(Words()),
        batch=12,
        batch_unit="tokens",
        steps=4,
        run_dir=folder,
        evaluate_every=None,
        log_every=1,
    )
    return dataclasses.replace(run, **changes)


def test_another_number_of_tokens_reads_the_epoch_again(tmp_path, one_device):
    train_quietly(tiny(tmp_path))
    _, printed, _ = train_quietly(tiny(tmp_path, batch=16, steps=5))
    assert "WARNING: the token batching has changed since the checkpoint: the epoch starts again" in printed
    position = find_checkpoint(tmp_path).extra["position"]
    # the first batch of 16 tokens has 4 words
    assert position == {"epoch": 0, "index": 4}


def test_another_seed_reads_the_epoch_again(tmp_path):
    run, notes = tiny(tmp_path), []
    extra = {"run": {**describe(run), "data.fingerprint": None}, "position": {"epoch": 1, "index": 4}}
    for seed, index in ((run.seed, 4), (7, 0)):
        again = dataclasses.replace(run, seed=seed)
        now = {**describe(again), "data.fingerprint": None}
        assert _next_position(again, extra, now, notes.append) == {"epoch": 1, "index": index}
    (note,) = notes
    assert note.startswith("WARNING: the token batching has changed since the checkpoint")


def test_a_checkpoint_from_before_there_were_batches_of_tokens_is_resumed(tmp_path):
    run = tiny(tmp_path, batch_unit="examples")
    notes = []
    now = describe(run)
    check_options({name: now[name] for name in now if name != "batch_unit"}, now, run, notes.append)
    (note,) = notes
    assert note.startswith("changed since then: ")
    assert "batch_unit" in note


def test_limits_by_memory_are_refused(tmp_path):
    with pytest.raises(ValueError) as error:
        tiny(tmp_path, strategy=Strategy(across=Across(share_limits="auto")))
    assert str(error.value).splitlines()[1:] == [
        "  - share_limits is 'auto', which measures one shape of batches, and batch_unit is 'tokens', whose"
        " batches have several; give each island a number of tokens, such as --share-limits 2048,4096"
    ]


def test_data_without_lengths_is_refused(tmp_path):
    source = [{"tokens": np.arange(5, dtype=np.int32)}] * 8
    with pytest.raises(ValueError) as error:
        train_quietly(tiny(tmp_path, data=InMemory(source)))
    assert str(error.value) == (
        "batch_unit is 'tokens', and the data's samples, a list, have no `lengths`: give them that attribute,"
        " the number of tokens of each, or use --batch-unit examples"
    )


@pytest.mark.parametrize(
    "strategy", [Strategy(across=Across(axis="pipeline")), Strategy(layout=Layout(mesh={"pipeline": 2}))]
)
def test_pipelines_are_refused(strategy, tmp_path):
    with pytest.raises(ValueError) as error:
        tiny(tmp_path, strategy=strategy)
    assert str(error.value).splitlines()[1:] == [
        "  - batch_unit is 'tokens', and the stages of a pipeline need batches of one shape; use --batch-unit"
        " examples, or no pipeline"
    ]
