"""Checkpoints of adapters alone: their arrays, a bitwise resume, and the use of what the run started from."""

import re
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from fine_tuning import initial, paths, run_of
from safetensors.numpy import load_file
from tiny_language_model import TinyConfig

from shardtrain import read_pretrained
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.reader import find_readers
from shardtrain.cli.checkpoint_files import Export, export_checkpoint
from shardtrain.functional.frozen import drop_paths
from shardtrain.functional.model import path_text
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.files import export_model
from shardtrain.models.lora import Lora
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import StartFrom
from shardtrain.trainer.pretrained import add_base, open_pretrained
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.train import train
from shardtrain.trainer.trained_model import load

MODEL = DecoderConfig(
    vocab=64, seq=8, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp=32,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
POLICY = CheckpointPolicy(every_steps=2, trained_only=True)


def base_folder(folder, seed):
    params = initial(run_of(MODEL, seed=seed))
    arrays = {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}
    export_model(folder, vars(MODEL), {path: x.shape for path, x in arrays.items()}, arrays.__getitem__)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_folder(tmp_path_factory.mktemp("base") / "base", 5)


def run(base, folder, **options):
    model = read_pretrained(base, lora=Lora(rank=2, on=("q", "v")), remat="none")
    options = {"start_from": StartFrom(checkpoint=base), "checkpoints": POLICY, "steps": 4, **options}
    return run_of(model, folder, **options)


@pytest.fixture(scope="module")
def whole(base, on_one_device, tmp_path_factory):
    """The parameters after four steps without an interruption, everything saved."""
    folder = tmp_path_factory.mktemp("whole")
    policy = replace(POLICY, trained_only=False)
    with on_one_device():
        return folder, jax.device_get(train(run(base, folder, checkpoints=policy), None).state.params)


@pytest.fixture(scope="module")
def interrupted(base, on_one_device, tmp_path_factory):
    folder = tmp_path_factory.mktemp("interrupted")
    with on_one_device():
        train(run(base, folder, steps=2), None)
    return folder


def test_a_checkpoint_has_adapters_alone_and_is_resumed_bitwise(base, whole, interrupted, one_device):
    reader = find_readers(interrupted / "checkpoints")[-1]
    params = {path for path in reader.leaves if path.startswith("params/")}
    assert params == {f"params/blocks/attention/{which}/lora_{kind}" for which in "qv" for kind in "ab"}
    everything = find_readers(whole[0] / "checkpoints")[-1]
    assert reader.num_bytes < 0.5 * everything.num_bytes
    found = jax.device_get(train(run(base, interrupted), None).state.params)
    jax.tree.map(np.testing.assert_array_equal, found, whole[1])
    # what is frozen is that of the base, which has no adapters
    of_base = initial(run_of(MODEL, seed=5))
    kept = drop_paths(found, set(paths(found)) - set(paths(of_base)))
    jax.tree.map(np.testing.assert_array_equal, kept, of_base)
    assert np.abs(found["blocks"]["attention"]["q"]["lora_b"]).max() > 0


@pytest.mark.full
def test_another_layout_resumes_it_and_saves_everything_if_asked(base, whole, interrupted, tmp_path):
    shutil.copytree(
        interrupted, tmp_path, ignore=shutil.ignore_patterns("step_00000004*"), dirs_exist_ok=True
    )
    assert [each.step for each in find_readers(tmp_path / "checkpoints")] == [2]
    strategy = Strategy(layout=Layout(mesh={"pipeline": 2, "data": 4}), accumulate=2)
    given = run(base, tmp_path, strategy=strategy, checkpoints=replace(POLICY, trained_only=False))
    found = jax.device_get(train(given, None).state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, whole[1])
    # then no base is needed
    assert "base" not in find_readers(tmp_path / "checkpoints")[-1].extra
    load(tmp_path, run(base, None).model)


def test_it_is_loaded_and_exported_with_what_it_started_from(base, whole, interrupted, tmp_path, one_device):
    train(run(base, interrupted), None)
    model = run(base, None).model
    tokens = np.arange(8)[None]
    np.testing.assert_array_equal(load(interrupted, model, base=base)(tokens), load(whole[0], model)(tokens))
    for folder, given in ((interrupted, base), (whole[0], None)):
        export_checkpoint(Export(run=str(folder), out=tmp_path / folder.name, base=given))
    ours, theirs = (load_file(tmp_path / each.name / "model.safetensors") for each in (interrupted, whole[0]))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    # adapters alone need no base
    assert export_checkpoint(Export(run=str(interrupted), out=tmp_path / "peft", adapters=True)) == 0
    only = "has only trained parameters; its other 12 parameters are in "
    with pytest.raises(ValueError, match=only + r".*give --base FOLDER"):
        export_checkpoint(Export(run=str(interrupted), out=tmp_path / "no"))
    with pytest.raises(ValueError, match=only + r".*export it with --base FOLDER, and use that"):
        load(interrupted, model)


def test_another_base_is_refused(base, interrupted, tmp_path):
    reader = find_readers(interrupted / "checkpoints")[0]
    assert add_base(reader, open_pretrained(base), "").leaves.keys() > reader.leaves.keys()
    with pytest.raises(ValueError, match=r"Give the checkpoint that the run started from, then .*base': so"):
        add_base(reader, open_pretrained(base_folder(tmp_path / "other", 6)), "so")
    with pytest.raises(ValueError, match=r"its other 12 parameters are in .*, where the run started: so"):
        add_base(reader, None, "so")


@pytest.mark.full
def test_a_run_of_this_library_is_a_base_too(tmp_path, one_device):
    first = run_of(TinyConfig(num_layers=2), tmp_path / "first", steps=1)
    train(first, None)
    start = StartFrom(checkpoint=tmp_path / "first")
    second = replace(
        first,
        run_dir=tmp_path / "second",
        steps=2,
        freeze=("embedding", "*/up"),
        start_from=start,
        checkpoints=POLICY,
    )
    train(second, None)
    reader = find_readers(tmp_path / "second" / "checkpoints")[-1]
    assert not [
        path for path in reader.leaves if path.startswith("params/") and path.endswith(("embedding", "up"))
    ]
    resumed = jax.device_get(train(replace(second, steps=3), None).state.params)
    straight = replace(second, run_dir=tmp_path / "straight", steps=3)
    jax.tree.map(np.testing.assert_array_equal, resumed, jax.device_get(train(straight, None).state.params))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"start_from": StartFrom()}, "this run starts from no others; give --start-from.checkpoint FOLDER"),
        ({"freeze": ()}, "no frozen parameter of this run comes from the checkpoint that it started from;"),
    ],
)
def test_what_has_nothing_to_leave_out_is_refused(options, problem, base, tmp_path, one_device):
    given = run(base, tmp_path, **options)
    if "freeze" in options:
        given = replace(given, model=read_pretrained(base))
    with pytest.raises(ValueError, match=re.escape(problem)):
        train(given, None)
