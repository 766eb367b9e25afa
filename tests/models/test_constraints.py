"""Every model names the dims of its activations and of its weights at use; a mesh changes no number."""

import itertools
import sys
from dataclasses import replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.imagenet_resnet import ImageNetResNetConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.models.mlp import MlpConfig
from shardtrain.models.resnet import ResNetConfig
from shardtrain.models.vgg import VggConfig
from shardtrain.models.vit import VitConfig

PARAMETERS = {
    "vocab": "tensor", "embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor",
    "channels_in": "fsdp", "channels_out": "tensor", "segments": None,
}  # fmt: skip
ACTIVATIONS = {
    "batch": "fsdp", "residual_seq": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor",
    "channels_out": "tensor", "vocab": "tensor", "seq": None, "embed": None, "head_dim": None,
    "height": None, "width": None, "channels_in": None,
    "segments": None,
}  # fmt: skip

GPT = DecoderConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=4)
LLAMA = DecoderConfig(
    vocab=32, seq=8, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp=24, positions="rotary",
    norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 8), dtype=np.int32)
MLP = MlpConfig(features=12, mlp=16, num_layers=2, classes=8)
RESNET = ResNetConfig(depth=11, filters=4, num_groups=2, height=6, width=4, colours=1, classes=8)
IMAGENET = ImageNetResNetConfig(
    depth=18, filters=4, norm="group", num_groups=2, height=12, width=8, classes=8,
)  # fmt: skip
VGG = VggConfig(filters=4, num_groups=2, hidden=8, classes=8)
BOTH = EncoderDecoderConfig(
    vocab=32, seq=8, embed=16, num_encoder_layers=1, num_decoder_layers=2, num_heads=4, num_kv_heads=2,
)  # fmt: skip
T5 = replace(
    BOTH, num_kv_heads=None, num_encoder_layers=2, positions="relative", relative_buckets=8,
    relative_distance=10, norm="rmsnorm", bias=False, activation="geglu", query_scale=1.0, head_scale=0.25,
)  # fmt: skip
BERT = EncoderConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=4, mlp=24, tied=False)
VIT = VitConfig(
    height=8, width=8, classes=8, patch=4, embed=16, num_layers=2, num_heads=4, mlp=24, pooling="mean"
)
MASK = np.array([[1] * 8, [1] * 6 + [0] * 2] * 2, np.int32)
IMAGES = np.random.default_rng(0).normal(size=(4, 3, 4)).astype(np.float32)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )


CASES = {
    "gpt": (GPT, [TOKENS]),
    "llama": (LLAMA, [TOKENS]),
    "mlp": (MLP, [IMAGES]),
    "resnet": (RESNET, [np.random.default_rng(1).normal(size=(4, 6, 4, 1)).astype(np.float32)]),
    "imagenet_resnet": (IMAGENET, [np.random.default_rng(1).normal(size=(4, 12, 8, 3)).astype(np.float32)]),
    "vgg": (VGG, [np.random.default_rng(1).normal(size=(4, 32, 32, 3)).astype(np.float32)]),
    "encoder_decoder": (BOTH, [TOKENS[:, :6], TOKENS]),
    "t5": (T5, [TOKENS[:, :6], TOKENS, MASK[:, 2:]]),
    "encoder": (BERT, [TOKENS, MASK, MASK]),
    "vit": (VIT, [np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype(np.float32)]),
}
"""Name -> configuration, inputs of the model."""


@pytest.fixture(params=[*CASES, "linen"])
def case(request, pure):
    """Name, parameters, their dims, (params, inputs) -> outputs, inputs."""
    name = request.param
    if name != "linen":
        config, inputs = CASES[name]
        model = pure(config)
        return name, model.params, model.dims, lambda params, inputs: model.apply(params, *inputs), inputs
    model = pure(GPT)
    linen = LinenDecoder(GPT)
    return (
        name,
        model.params,
        model.dims,
        lambda params, tokens: linen.apply({"params": params}, tokens),
        TOKENS,
    )


def names_used(apply, params, inputs, monkeypatch):
    """The dims of every constraint that one call passes."""
    used = []

    def record(x, dims, *_, **__):
        assert x.ndim == len(dims), dims
        used.append(dims)
        return x

    for name, module in list(sys.modules.items()):
        if name.startswith("shardtrain.models.") and hasattr(module, "with_logical_constraint"):
            monkeypatch.setattr(module, "with_logical_constraint", record)
    jax.eval_shape(lambda: apply(params, inputs))  # a new function: nothing traced before is reused
    return used


def test_every_weight_is_constrained_where_it_is_used(case, monkeypatch):
    name, params, dims, apply, inputs = case
    used = names_used(apply, params, inputs, monkeypatch)
    for leaf in jax.tree.leaves(dims, is_leaf=is_dims):
        own = tuple(dim for dim in leaf if dim != "layers")
        if name != "linen" or own != ("embed",):  # its layer norms are flax's own
            assert own in used or JOINED.get(own) in used, own


@pytest.mark.parametrize("case", ["gpt", "llama", "linen", "mlp"], indirect=True)
def test_activations_are_named_in_order(case, monkeypatch):
    """One constraint said twice running counts once."""
    name, params, _, apply, inputs = case
    activations = [dims for dims in names_used(apply, params, inputs, monkeypatch) if dims[0] == "batch"]
    activations = [dims for dims, _ in itertools.groupby(activations)]
    if name == "mlp":
        inside, outside = ("batch", "mlp"), ("batch", "embed")
        assert activations == [outside, inside, outside, inside, outside, ("batch", "vocab")]
        return
    stream, gathered = ("batch", "residual_seq", "embed"), ("batch", "seq", "embed")
    q, kv = (("batch", "seq", heads, "head_dim") for heads in ("heads", "kv_heads"))
    joined = ("batch", "seq", "kv_heads", None, "head_dim")
    hidden = ("batch", "seq", None, "mlp") if name == "llama" else ("batch", "seq", "mlp")
    block = [stream, gathered, joined, q, kv, q, gathered, stream, gathered, hidden, gathered, stream]
    assert activations[: len(block)] == block
    assert activations[-3:] == [stream, gathered, ("batch", "seq", "vocab")]


IMAGE = ("batch", "height", "width")


def test_what_a_convolution_reads_is_whole_and_what_it_writes_is_not(pure, monkeypatch):
    """Norms and sums lie between two convolutions, on shards."""
    config, inputs = CASES["resnet"]
    apply = lambda params, inputs: pure(config).apply(params, *inputs)  # noqa: E731
    used = names_used(apply, pure(config).params, inputs, monkeypatch)
    activations = [dims for dims in used if dims[0] == "batch"]
    reads, writes = (*IMAGE, "channels_in"), (*IMAGE, "channels_out")
    projected = [*[reads, writes] * 4, writes]
    assert activations == [reads, writes, *projected * 3, ("batch", "channels_in"), ("batch", "vocab")]


JOINED = {
    ("embed", "heads", "head_dim"): ("embed", "kv_heads", None, "head_dim"),
    ("embed", "kv_heads", "head_dim"): ("embed", "kv_heads", None, "head_dim"),
    ("embed", "mlp"): ("embed", None, "mlp"),
}
"""Kernels that are joined to one before they are used -> its dims."""


def is_dims(x):
    return isinstance(x, tuple)


def sharded(params, dims, mesh):
    def put(dims, x):
        return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*(PARAMETERS.get(dim) for dim in dims))))

    return jax.tree.map(put, dims, params, is_leaf=is_dims)


# the law of test_central.py is of gpt and linen, and test_per_device.py has convolutions on a mesh
ELSEWHERE = ("gpt", "linen", "t5", "encoder_decoder", "resnet", "imagenet_resnet", "vgg", "vit")


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[pytest.mark.full] * (name in ELSEWHERE)) for name in (*CASES, "linen")],
    indirect=True,
)
def test_a_mesh_changes_no_number(case, mesh, quick_jit):
    _, params, dims, apply, inputs = case

    def loss(params, inputs):
        return jnp.square(apply(params, inputs)).mean()

    expected = quick_jit(jax.value_and_grad(loss))(params, inputs)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(list(ACTIVATIONS.items())):
        actual = quick_jit(jax.value_and_grad(loss))(sharded(params, dims, mesh), inputs)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize("remat", ["none", "weights"])
def test_other_rules_on_the_same_mesh_are_followed(remat, mesh, pure):
    """No trace made under some rules is used again under others."""
    model = pure(replace(GPT, remat=remat))

    def constraints(rules):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(list(rules.items())):
            return jax.jit(lambda params: model.apply(params, TOKENS)).lower(model.params).as_text()

    with_mlp, without = constraints(ACTIVATIONS), constraints({**ACTIVATIONS, "mlp": None})
    hidden = '[{"fsdp"}, {}, {"tensor"}]> : tensor<4x8x64xf32>'
    assert hidden in with_mlp
    assert hidden not in without
