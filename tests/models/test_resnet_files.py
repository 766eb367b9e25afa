"""ResNets of Hugging Face: logits by running statistics, files in and out, starts from a folder."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from golden_models import load_golden, load_model
from safetensors.numpy import load_file, save_file

from shardtrain.cli.checkpoint_files import Export, Import, export_checkpoint, import_checkpoint
from shardtrain.cli.run_file import load_run
from shardtrain.models.huggingface import from_huggingface, to_huggingface
from shardtrain.models.huggingface.families import read_config, write_config
from shardtrain.models.imagenet_resnet import ImageNetResNetConfig
from shardtrain.models.vit import VitConfig
from shardtrain.trainer.pretrained import keep_training_options, read_pretrained
from shardtrain.trainer.trained_model import load

STATE = "model_state/"


@pytest.fixture(scope="module", params=["resnet18", "resnet50"])
def golden(request):
    golden, (config, state) = load_golden(request.param), load_model(request.param)
    config = {**config, "image_height": 40, "image_width": 32}
    return config, state, golden["image"].transpose(0, 2, 3, 1), golden["logits"]


@pytest.fixture
def folder(golden, tmp_path):
    """As `save_pretrained` writes it: with the number of batches of each norm, an integer."""
    config, state, _, _ = golden
    norms = [name.removesuffix("mean") for name in state if name.endswith("running_mean")]
    counts = {f"{name.removesuffix('running_')}num_batches_tracked": np.int64(7) for name in norms}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    save_file({**state, **{n: np.asarray(x) for n, x in counts.items()}}, tmp_path / "hub/model.safetensors")
    return tmp_path / "hub"


def test_logits_of_a_loaded_folder_are_those_of_transformers(golden, folder):
    """By the running statistics of the files; `load` is the way of every command."""
    model = load(folder, read_pretrained(folder))
    logits = nnx.jit(lambda model, images: model(images))(model, golden[2])
    np.testing.assert_allclose(logits, golden[3], rtol=0, atol=1e-4)


@pytest.mark.parametrize("golden", ["resnet18"], indirect=True)
def test_a_checkpoint_has_the_statistics_and_is_exported_with_them(golden, folder, tmp_path, capsys):
    _, state, images, logits = golden
    assert import_checkpoint(Import(folder=folder, out=tmp_path / "in")) == 0
    num = sum(x.size for name, x in state.items() if "running" not in name)
    assert f"resnet: {num:,} parameters" in capsys.readouterr().out
    run = load_run(str(tmp_path / "in" / "run.py"))
    found = load(tmp_path / "in", run.model)(images)
    np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4)
    assert export_checkpoint(Export(run=str(tmp_path / "in"), out=tmp_path / "out")) == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(
        written["resnet.embedder.embedder.normalization.running_var"],
        state["resnet.embedder.embedder.normalization.running_var"],
    )


@pytest.mark.parametrize(
    "depth", [18, 34, 50, *(pytest.param(depth, marks=pytest.mark.full) for depth in (101, 152))]
)
def test_every_array_of_each_depth_has_a_place(depth):
    """Shapes alone: each parameter and statistic of the model is written, and read again."""
    config = ImageNetResNetConfig(depth=depth, filters=2, classes=3, height=48, width=64, colours=1)
    graph = nnx.eval_shape(lambda: config(nnx.Rngs(0)))
    kinds = {"": nnx.Param, STATE: nnx.BatchStat}
    tree = {}
    for prefix, kind in kinds.items():
        for path, x in nnx.to_flat_state(nnx.state(graph, kind)):
            *parents, name = [*prefix.split("/")[:-1], *map(str, path)]
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = np.zeros(x.shape, np.float32)
    state = to_huggingface(config, tree)
    again, found = from_huggingface(write_config(config), state)
    assert again == config
    assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, tree)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"depths": [2, 2, 2, 3]},
            "depths is [2, 2, 2, 3] with layer_type 'basic'; ImageNetResNet has (2, 2,",
        ),
        (
            {"hidden_sizes": [2, 4, 8, 9]},
            "hidden_sizes is [2, 4, 8, 9]; ImageNetResNet has [2, 4, 8, 16] only",
        ),
        (
            {"downsample_in_bottleneck": True},
            "downsample_in_bottleneck is True; ImageNetResNet has False only",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; ImageNetResNet has 'relu' only"),
        ({"image_height": 0}, "image_height is 0; it is a whole number from 1"),
    ],
)
def test_other_residual_networks_are_refused(changes, problem):
    config = load_model("resnet18")[0]
    assert read_config(config)[1].height == 224
    with pytest.raises(ValueError, match="Hugging Face config") as error:
        read_config({**config, **changes})
    assert problem in str(error.value)


def test_group_norms_are_no_resnet_of_these_files():
    config = replace(ImageNetResNetConfig(), norm="group")
    with pytest.raises(ValueError, match="norm is 'group'; resnet has 'batch' only"):
        write_config(config)


def test_options_of_training_of_another_kind_stay_those_of_the_folder():
    """A transformer's run file says what to recompute, a residual network's whether."""
    resnet, vit = ImageNetResNetConfig(), VitConfig(height=8, width=8, classes=2, patch=4, dtype="bfloat16")
    assert keep_training_options(resnet, vit) == replace(resnet, dtype="bfloat16")
