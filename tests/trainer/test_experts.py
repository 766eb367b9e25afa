"""Runs of mixtures of experts: what one layout saved another restores, with the same losses."""

import json
import shutil
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from fine_tuning import CONSTANT, initial, run_of
from safetensors.numpy import load_file
from saved_decoder import save

from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.reader import find_readers
from shardtrain.functional.model import path_text
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.models.huggingface.files import export_model
from shardtrain.optim.optimizer import Optimizer
from shardtrain.sharding.layout import Layout
from shardtrain.system.lazy_array import LazyArray
from shardtrain.trainer import pretrained
from shardtrain.trainer.config import StartFrom
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train

PROGRAMS = Path(__file__).parents[1] / "programs"
MODEL = DecoderConfig(
    vocab=64, seq=8, embed=8, num_layers=2, num_heads=2, mlp=8, activation="swiglu", bias=False, remat="none",
    experts=Experts(num=4, top=2, capacity=1.0, shared=1, scores="sigmoid", bias=0.01),
)  # fmt: skip
EXPERTS = Strategy(layout=Layout(mesh={"expert": 4, "tensor": 2}))


def run_on(strategy, folder, steps):
    optimizer = Optimizer(name="sgd", learning_rate=CONSTANT)
    options = {"steps": steps, "log_every": 1, "checkpoints": CheckpointPolicy(every_steps=1, keep=3)}
    return run_of(MODEL, folder, strategy=strategy, optimizer=optimizer, **options)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_experts_are_restored_on_another_mesh(tmp_path, on_one_device):
    """A step on each: a mesh of experts restores what one device saved, and that what the mesh saved."""
    with on_one_device():
        whole = train(run_on(Strategy(), tmp_path / "whole", 3)).state
    shutil.copytree(
        tmp_path / "whole", tmp_path / "parts", ignore=shutil.ignore_patterns("step_0000000[23]*")
    )
    assert [each.step for each in find_readers(tmp_path / "parts" / "checkpoints")] == [1]
    train(run_on(EXPERTS, tmp_path / "parts", 2))
    with on_one_device():
        state = train(run_on(Strategy(), tmp_path / "parts", 3)).state
    for name in ("train/loss", "grad_norm", "train/expert_drops", "train/router_balance"):
        got, expected = ([line[name] for line in lines(tmp_path / end)] for end in ("parts", "whole"))
        assert len(got) == 3
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=name)
    # biases have moved, by the loads of all devices
    bias = np.asarray(state.model_state["blocks"]["mlp"]["router_bias"])
    np.testing.assert_allclose(bias, whole.model_state["blocks"]["mlp"]["router_bias"], atol=1e-6)
    assert np.abs(bias).max() > 0.009
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


MIXTRAL = DecoderConfig(
    vocab=64, seq=8, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp=32,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False,
    experts=Experts(num=4, top=2), remat="none",
)  # fmt: skip


def exported(folder, model, seed):
    """A folder of Hugging Face with a model's initial parameters, which are returned."""
    params = initial(run_of(model, seed=seed))
    arrays = {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}
    shapes = {path: x.shape for path, x in arrays.items()}
    export_model(folder, vars(model), shapes, arrays.__getitem__, max_shard_bytes=10_000)
    return params


@pytest.mark.full
def test_experts_of_a_folder_are_read_one_by_one(tmp_path, monkeypatch):
    params = exported(tmp_path / "mixtral", MIXTRAL, 5)
    assert len(list((tmp_path / "mixtral").glob("*.safetensors"))) > 3
    model = pretrained.read_pretrained(tmp_path / "mixtral")
    monkeypatch.setattr(pretrained, "MOST_KEPT_BYTES", 0)
    start = StartFrom(checkpoint=tmp_path / "mixtral")
    run = run_of(model, tmp_path, steps=1, strategy=EXPERTS, start_from=start, freeze=("*", "!final_norm/*"))
    found = jax.device_get(train(run, None).state.params)
    for (path, x), wanted in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(params), strict=True):
        assert np.array_equal(x, wanted) == (path_text(path) != "final_norm/scale"), path


def test_one_array_of_the_files_is_in_memory_beside_a_parameter(tmp_path, monkeypatch):
    wide = DecoderConfig(**{**vars(MIXTRAL), "mlp": 1024, "embed": 64, "experts": Experts(num=16)})
    exported(tmp_path / "mixtral", wide, 5)
    reader = pretrained.open_pretrained(tmp_path / "mixtral")
    monkeypatch.setattr(pretrained, "MOST_KEPT_BYTES", 0)
    tracemalloc.start()
    values = reader.read("params/blocks/mlp/up")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.shape == (2, 16, 64, 1024)
    # 32 arrays of experts, of which three are there at a time at most
    assert peak < values.nbytes * (1 + 3 / 32) + 100_000


def test_an_export_has_one_file_in_memory_and_no_parameter_with_all_its_experts(tmp_path):
    wide = DecoderConfig(**{**vars(MIXTRAL), "mlp": 1024, "embed": 64, "experts": Experts(num=16)})
    params, _ = save(tmp_path / "run", wide)
    (reader,) = find_readers(tmp_path / "run/checkpoints")
    shapes = {
        path.removeprefix("params/"): leaf.shape
        for path, leaf in reader.leaves.items()
        if path.startswith("params/")
    }
    # as the command reads it, which compares checksums before that
    tracemalloc.start()
    export_model(
        tmp_path / "out", vars(wide), shapes,
        lambda path: LazyArray(partial(reader.read, f"params/{path}")), max_shard_bytes=1 << 20,
    )  # fmt: skip
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    experts = np.asarray(params["blocks"]["mlp"]["up"])
    # arrays of a file, and the bytes that are written of them
    assert peak < 3 * (1 << 20) < experts.nbytes / 2
    files = [load_file(path) for path in (tmp_path / "out").glob("*.safetensors")]
    assert len(files) > 20
    name = "model.layers.1.block_sparse_moe.experts.7.w3.weight"
    (found,) = (file[name] for file in files if name in file)
    np.testing.assert_array_equal(found, experts[1, 7].T)


DENSE = replace(MIXTRAL, experts=None)


@pytest.fixture(scope="module")
def dense(on_one_device, tmp_path_factory):
    """A folder with the initial parameters of a dense run whose batches are all alike; beside it that run."""
    both = tmp_path_factory.mktemp("dense")
    exported(both / "folder", DENSE, 5)
    checkpoints = CheckpointPolicy(every_steps=1, keep=2)
    with on_one_device():
        train(run_of(DENSE, both / "run", seed=5, steps=2, batch=16, log_every=1, checkpoints=checkpoints))
    return both


@pytest.mark.parametrize(
    ("start", "strategy", "experts"),
    [
        pytest.param("folder", EXPERTS, "num=4,top=2,balance=0", marks=pytest.mark.full),
        ("run", None, "num=4,top=4,balance=0,bias=0.01"),
    ],
    ids=["folder, mesh of experts", "run, one device"],
)
def test_an_upcycled_model_has_the_loss_of_the_dense_one(
    start, strategy, experts, dense, tmp_path, on_one_device
):
    steps_done = 0 if start == "folder" else 1
    start_from = StartFrom(checkpoint=dense / start, step=steps_done or None, upcycle=True)
    model = replace(MIXTRAL, experts=experts)
    run = run_of(
        model, tmp_path, steps=1, batch=16, log_every=1, start_from=start_from, seed=7,
        strategy=strategy or Strategy(),
    )  # fmt: skip
    with nullcontext() if strategy else on_one_device():
        params = jax.device_get(train(run).state.params)
    expected = lines(dense / "run")[steps_done]["train/loss"]
    assert lines(tmp_path)[0]["train/loss"] == pytest.approx(expected, rel=1e-5)
    # copies part as soon as their tokens differ, and routers are not alike
    up = params["blocks"]["mlp"]["up"]
    assert not np.array_equal(up[:, 0], up[:, 1])
    assert np.abs(params["blocks"]["mlp"]["router"]).max() > 0.01


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"experts": None}, "experts is None; give the experts, such as --model.experts num=8,top=2"),
        (
            {"experts": Experts(num=4, shared=1), "mlp": 16},
            "shared is 1; a shared feed-forward would be added",
        ),
        (
            {"experts": Experts(num=4, shared=1), "mlp": 16},
            "mlp is 16; a copy of the dense feed-forward has 32",
        ),
    ],
)
def test_what_cannot_be_upcycled_is_refused(changes, problem, dense):
    reader = pretrained.open_pretrained(dense / "folder")
    with pytest.raises(ValueError, match="a model with experts from a dense one") as error:
        pretrained.upcycle(reader, replace(MIXTRAL, **changes))
    assert problem in str(error.value)


@pytest.mark.full
def test_experts_on_two_islands_have_the_losses_of_one(mpiexec, on_one_device, tmp_path):
    found = mpiexec(2, PROGRAMS / "experts_islands.py", tmp_path, devices=2)
    assert found[0] == "1 True\n"
    model = replace(MODEL, experts=Experts(num=4, top=2, capacity=1.0, shared=1, balance=0.1))
    optimizer = Optimizer(name="sgd", learning_rate=CONSTANT, clip=100.0)
    with on_one_device():
        train(run_of(model, tmp_path / "one", optimizer=optimizer, log_every=1, steps=2), None)
    expected = lines(tmp_path / "one")
    for case in ("replicas", "stages"):
        for name in ("train/loss", "train/router_balance", "train/expert_drops"):
            got = [line[name] for line in lines(tmp_path / case)]
            np.testing.assert_allclose(got, [line[name] for line in expected], rtol=1e-5, err_msg=case + name)
