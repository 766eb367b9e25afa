"""Gradients on a mesh against one device, before the first step."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from quiet_training import InMemory
from tiny_language_model import TinyConfig

from shardtrain import Layout, Run, Strategy, Text, classification_loss, train
from shardtrain.pipeline.options import Pipeline

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


PIXELS = np.random.default_rng(0).normal(size=(16, 4, 4, 16)).astype(np.float32)
IMAGES = [{"image": image, "label": np.int32(i % 4)} for i, image in enumerate(PIXELS)]
"""16 images of 4 x 4 pixels with 16 channels, of 4 classes."""


class Net(nnx.Module):
    """Two convolutions that constrain nothing, and what a user's own shard_map makes of their mean."""

    def __init__(self, rngs, mean=lambda x: x):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, None, "embed", "mlp"))
        self.first = nnx.Conv(16, 32, (3, 3), kernel_init=init, use_bias=False, rngs=rngs)
        self.second = nnx.Conv(32, 32, (3, 3), kernel_init=init, use_bias=False, rngs=rngs)
        self.mean = mean

    def __call__(self, images):
        y = self.second(nnx.silu(self.first(images)))
        return self.mean(jnp.square(y).reshape(len(y), 4, -1).mean(-1))


def sum_over_tensor(x):
    """A wrong psum: x is whole on each device along tensor."""
    if "tensor" not in jax.sharding.get_abstract_mesh().shape:
        return x
    own = lambda x: jax.lax.psum(x, "tensor")  # noqa: E731
    return jax.shard_map(own, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)(x)


def mean_over_tensor(x):
    return sum_over_tensor(x) / jax.sharding.get_abstract_mesh().shape.get("tensor", 1)


def run_of(tmp_path, mesh=CUBE, mean=lambda x: x, **options):
    return Run(
        model=lambda rngs: Net(rngs, mean),
        data=InMemory(IMAGES),
        loss=classification_loss,
        batch=16,
        steps=1,
        evaluate_every=None,
        strategy=Strategy(layout=Layout(mesh=mesh)),
        run_dir=tmp_path,
        **options,
    )


def test_a_wrong_psum_of_the_model_ends_the_run(tmp_path):
    with pytest.raises(ValueError) as error:
        train(run_of(tmp_path, mean=sum_over_tensor))
    text = str(error.value)
    assert text.startswith(
        "on the mesh data=2,fsdp=2,tensor=2 the gradients of 2 of 2 parameters differ from one device:"
    )
    assert "operations that were not tried on meshes: psum, shard_map" in text
    assert text.endswith("--check-layout off trains with these gradients")
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_right_one_trains_and_off_checks_nothing(tmp_path, capsys):
    train(run_of(tmp_path / "right", mean=mean_over_tensor))
    assert (
        "layout checked: the gradients of 8 rows equal those of one device up to" in capsys.readouterr().out
    )
    train(run_of(tmp_path / "off", mean=mean_over_tensor, check_layout="off"))
    assert "layout checked" not in capsys.readouterr().out


def test_what_the_compiler_splits_wrongly_is_found(tmp_path, monkeypatch):
    # without the rule by which each device computes convolutions itself
    monkeypatch.delattr(jax.lax.conv_general_dilated_p, "bind")
    with pytest.raises(ValueError, match=r"'first/kernel' is off by \d"):
        train(run_of(tmp_path, check_layout="rows=4"))


def test_a_loss_of_groups_of_rows_is_compared_by_as_many_as_a_replica_has(tmp_path, capsys):
    def of_groups(apply, batch):
        losses = -jax.nn.log_softmax(apply(batch["image"]))[jnp.arange(len(batch["label"])), batch["label"]]
        worst, weights = losses.reshape(-1, 4).max(1), batch["weights"].reshape(-1, 4).min(1)
        return (worst * weights).sum(), weights.sum()

    run = replace(run_of(tmp_path, {"data": 2, "tensor": 4}, mean_over_tensor), loss=of_groups)
    train(run)
    assert "layout checked: the gradients of 16 rows equal those" in capsys.readouterr().out


@pytest.mark.full
def test_stages_and_microbatches_are_compared_too(tmp_path, capsys):
    layout = Layout(mesh={"pipeline": 2, "data": 4})
    # blocks are stored in another order than on one device
    pipeline = Pipeline(schedule="interleaved", virtual_stages=2)
    run = Run(
        model=TinyConfig(num_layers=4, dropout=0.1),
        data=Text(seq=8),
        batch=16,
        steps=1,
        evaluate_every=None,
        check_layout="rows=1",
        strategy=Strategy(layout=layout, accumulate=2, pipeline=pipeline),
        run_dir=tmp_path,
    )
    train(run)
    assert "layout checked: the gradients of 8 rows" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["rows=0", "2", "on"])
def test_other_values_are_refused(tmp_path, value):
    with pytest.raises(
        ValueError, match=f"check_layout is '{value}'; use auto, off, or a number of rows: rows=2"
    ):
        run_of(tmp_path, check_layout=value)
