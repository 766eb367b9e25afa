"""What every model keeps: named dims, the numbers of one device, float32 logits, parts that make it whole."""

import itertools
import math
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bare_models import fill, list_parameters
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardtrain.functional.model import path_text
from shardtrain.models.decoder import DecoderConfig, gpt2
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.imagenet_resnet import ImageNetResNetConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.models.mlp import MlpConfig
from shardtrain.models.resnet import ResNetConfig
from shardtrain.models.rotary import LinearScaling
from shardtrain.models.vgg import VggConfig
from shardtrain.models.vit import VitConfig, vit
from shardtrain.sharding.array_dims import NamedArray
from shardtrain.sharding.resolve import resolve
from shardtrain.sharding.rules import PARAMETER_RULES

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

SCALING = LinearScaling(factor=2.0)
GPT = DecoderConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=4)
LLAMA = DecoderConfig(
    vocab=32, seq=8, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp=24, positions="rotary",
    norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 32, (4, 8), dtype=np.int32)
MLP = MlpConfig(features=12, mlp=16, num_layers=2, classes=8)
RESNET = ResNetConfig(depth=11, filters=4, num_groups=2, height=8, width=6, colours=1, classes=8)
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
    "resnet": (RESNET, [np.random.default_rng(1).normal(size=(4, 8, 6, 1)).astype(np.float32)]),
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


# other models and meshes: the central law and the fuzzer
@pytest.mark.parametrize("case", ["llama", "mlp", "encoder"], indirect=True)
def test_a_mesh_changes_no_number(case, mesh, quick_jit):
    _, params, dims, apply, inputs = case

    def loss(params, inputs):
        return jnp.square(apply(params, inputs)).mean()

    expected = quick_jit(jax.value_and_grad(loss))(params, inputs)
    for path, gradient in jax.tree.leaves_with_path(expected[1]):
        # softmax does not see what is added to all scores
        has_none = path_text(path).endswith("k/bias")
        assert (np.abs(gradient).max() > 1e-6) != has_none, path_text(path)
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


@pytest.mark.parametrize("name", ["gpt", "llama", "mlp", "encoder_decoder"])
def test_every_parameter_is_float32_and_has_the_sizes_of_its_dims(name):
    config = replace(CASES[name][0], dtype="bfloat16")
    for path, parameter in list_parameters(config):
        dims = parameter.get_metadata()["out_sharding"]
        assert parameter.shape == tuple(config.sizes[dim] for dim in dims), path
        assert parameter.dtype == jnp.float32, path


@pytest.mark.parametrize(
    ("name", "most"),
    [("llama", 0.03), ("encoder", 0.03), ("encoder_decoder", 0.05), ("mlp", 0.03), ("resnet", 0.1)],
)
def test_bfloat16_is_close_and_gives_float32(name, most, pure, quick_jit):
    config, inputs = CASES[name]
    exact, rounded = (
        quick_jit(pure(each).apply)(pure(config).params, *inputs)
        for each in (config, replace(config, dtype="bfloat16"))
    )
    assert rounded.dtype == exact.dtype == jnp.float32
    assert 1e-4 < np.abs(exact - rounded).max() / np.abs(exact).max() < most


@pytest.mark.parametrize(
    ("name", "policies"),
    [("encoder_decoder", ("none", "dots", "outputs", "full")), ("resnet", (False, True))],
)
def test_remat_keeps_less(name, policies, pure):
    def count_kept(remat):
        config, inputs = CASES[name]
        model = pure(replace(config, remat=remat))
        backward = lambda params: jax.vjp(model.apply, params, *inputs)[1]  # noqa: E731
        return sum(x.size for x in jax.tree.leaves(jax.eval_shape(backward, model.params)))

    kept = [count_kept(remat) for remat in policies]
    assert all(less < more for more, less in itertools.pairwise(kept))
    assert kept[-1] < 0.5 * kept[0]


@pytest.mark.parametrize(
    ("name", "rtol"),
    [
        *(("gpt", 1e-5), ("resnet", 1e-4), ("vgg", 1e-4), ("encoder_decoder", 1e-4)),
        pytest.param("encoder", 1e-5, marks=pytest.mark.full),
    ],
)
def test_parts_in_programs_of_their_own_have_the_masks_of_a_call(name, rtol, pure, seeded, quick_jit):
    """A pipeline's way: keys, first, run on shares of the blocks, last. A residual network drops nothing."""
    plain, inputs = CASES[name]
    config: Any = replace(plain, dropout=0.25) if hasattr(plain, "dropout") else plain
    params = pure(plain).params
    assert_close = partial(np.testing.assert_allclose, rtol=rtol, atol=rtol / 10)

    def part(work, **mode):
        make = (
            partial(fill, config, params) if config is plain else partial(seeded, config, params, 3, **mode)
        )
        return quick_jit(lambda *given: work(make(), *given))

    def run(share):
        def work(module, x, keys):
            is_list = isinstance(module.blocks, nnx.List)
            blocks = module.blocks[share] if is_list else jax.tree.map(lambda x: x[share], module.blocks)
            return module.run(blocks, x, None if keys is None else keys[share])

        return part(work)

    keys, x = (part(work)() for work in (lambda m: m.block_keys(), lambda m: m.first(*inputs)))
    for share in (slice(0, 1), slice(1, 3), slice(3, None)):
        x = run(share)(x, keys)
    first, second = part(lambda module: (module(*inputs), module(*inputs)))()
    assert_close(part(lambda module, x: module.last(x))(x), first)
    assert np.allclose(first, second) == (config is plain)
    still = part(lambda module: module(*inputs), deterministic=True)()
    assert_close(still, quick_jit(pure(plain).apply)(params, *inputs))


LLAMA_SMALL = DecoderConfig(
    vocab=32_000, seq=2048, embed=768, num_layers=12, num_heads=12, num_kv_heads=4, mlp=2048,
    positions="rotary", norm="rmsnorm", activation="swiglu", bias=False, tied=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (gpt2(), 124_439_808),
        (LLAMA_SMALL, 124_668_672),
        # BERT base, without the pooler and the head of the second task
        (EncoderConfig(vocab=30522, seq=512, embed=768, num_layers=12, num_heads=12), 109_514_298),
        (vit("tiny"), 5_717_416),
        (vit("small"), 22_050_664),
        (vit("base"), 86_567_656),
        (vit("large"), 304_326_632),
        (ImageNetResNetConfig(depth=18), 11_689_512),
        (ImageNetResNetConfig(depth=50), 25_557_032),
        pytest.param(ImageNetResNetConfig(depth=34), 21_797_672, marks=pytest.mark.full),
        pytest.param(ImageNetResNetConfig(depth=101), 44_549_160, marks=pytest.mark.full),
        pytest.param(ImageNetResNetConfig(depth=152), 60_192_808, marks=pytest.mark.full),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_sizes_are_the_published_ones(config, published):
    assert sum(math.prod(v.shape) for _, v in list_parameters(config)) == published


@pytest.mark.parametrize(
    ("name", "placed"),
    [
        ("resnet", {"blocks/1/convolutions/1/kernel": ((), (), ("fsdp",), ("tensor",))}),
        ("vgg", {"blocks/1/convolution/kernel": ((), (), ("fsdp",), ("tensor",))}),
        ("vgg", {"classifier/1/kernel": (("tensor",), ("fsdp",))}),
    ],
)
def test_every_parameter_of_images_is_placed_by_the_default_rules(name, placed):
    arrays = {
        "/".join(map(str, path)): NamedArray(dims=v.get_metadata()["out_sharding"], shape=v.shape)
        for path, v in list_parameters(replace(CASES[name][0], colours=3))
    }
    specs = resolve(arrays, PARAMETER_RULES, {"fsdp": 2, "tensor": 2})
    assert placed.items() <= specs.items()


@pytest.mark.parametrize(
    ("name", "lengths"),
    [("gpt", [9]), ("encoder", [9]), ("encoder_decoder", [9, 8]), ("encoder_decoder", [6, 12])],
)
def test_tokens_longer_than_seq_are_refused(name, lengths, pure):
    model, tokens = pure(CASES[name][0]), [jnp.zeros((1, length), jnp.int32) for length in lengths]
    with pytest.raises(ValueError, match="seq=8 positions") as error:
        jax.eval_shape(model.apply, model.params, *tokens)
    longest = max(lengths)
    assert str(error.value) == (
        f"tokens of length {longest} were given to a decoder of seq=8 positions. "
        f"Give at most 8 tokens, or build it with seq={longest}."
    )


REFUSED = [
    (
        GPT,
        {"vocab": 0, "remat": "full=1,none=2", "only_post_norm": True, "qk_norm_joint": True},
        "vocab is 0; it must be at least 1. Use vocab=1 or more.",
        "remat is 'full=1,none=2', which are 3 blocks, and the model has 2; use numbers that add up to 2",
        "only_post_norm is True; it needs post_norm=True",
        "qk_norm_joint is True; it needs qk_norm=True",
    ),
    (
        GPT,
        {"num_heads": 5},
        "embed 16 is not a multiple of num_heads 5: 16 % 5 = 1. Use embed=15 or embed=20.",
    ),
    (
        GPT,
        {"num_kv_heads": 3},
        "num_heads 4 is not a multiple of num_kv_heads 3: 4 % 3 = 1. Use num_heads=3 or num_heads=6.",
    ),
    (LLAMA, {"head_dim": 5}, "head_dim is 5; rotary positions turn pairs. Use head_dim=6."),
    (
        GPT,
        {"eps": math.inf, "theta": math.nan},
        "theta is nan; give a number, finite",
        "eps is inf; give a number, finite",
    ),
    (
        GPT,
        {"norm": "rms", "embed": "8", "rope_scaling": "ntk:factor=2", "dropout": 1.0},
        "embed is '8'; give a whole number: embed=8",
        "norm is 'rms'; allowed: layernorm, rmsnorm, rmsnorm_plus_one",
        "rope_scaling: there is no kind 'ntk' (known: linear, llama3, yarn, longrope); write"
        " KIND:NAME=VALUE,...",
    ),
    (
        GPT,
        {"soft_cap": 0.0, "rope_scaling": SCALING, "rotary_dims": 4, "full_every": 2, "qk_norm": True}
        | {"remat": "ful", "dtype": "bf16"},
        "remat: there is no policy 'ful' (did you mean 'full'?); use none, weights, dots, outputs, full,"
        " offload, or numbers of blocks: full=6,none=18",
        "dtype is 'bf16'; allowed: float32, bfloat16, float16",
        "soft_cap is 0.0; it must be above 0 and finite. Use a small number such as soft_cap=1e-5.",
        "rope_scaling is LinearScaling(factor=2.0); it needs positions='rotary'",
        "rotary_dims is 4; it needs positions='rotary'",
        "full_every is 2; it needs a window",
        "qk_norm needs norm='rmsnorm' or 'rmsnorm_plus_one', and norm is 'layernorm'",
    ),
    (
        LLAMA,
        {"rotary_dims": 7, "window": 2, "full_every": 1, "attention": "cudnn"},
        "rotary_dims is 7; it is even and at most head_dim, 4. Use rotary_dims=4.",
        "full_every is 1, so that no block has the window; use 2 or more, or window=None",
        "attention 'cudnn' has no full_every; use attention='auto' or 'xla'",
    ),
    (
        VGG,
        {"depth": 17, "height": 8, "width": 40, "hidden": 0, "filters": 3, "dropout": 1.0},
        "hidden is 0; it must be at least 1. Use hidden=1 or more.",
        "dropout is 1.0; it must be at least 0 and below 1. Use dropout=0.0 to switch it off.",
        "filters 3 is not a multiple of num_groups 2: 3 % 2 = 1. Use filters=2 or filters=4.",
        "depth is 17; allowed are 16, 19. Use depth=16.",
        "height 8 is not a multiple of 2 ** poolings 32: 8 % 32 = 8. Use height=32.",
        "width 40 is not a multiple of 2 ** poolings 32: 40 % 32 = 8. Use width=32 or width=64.",
    ),
    (
        VGG,
        {"hidden": None, "dropout": 0.5, "norm": "groups", "dtype": "bfloat"},
        "norm is 'groups'; allowed: group, batch",
        "dtype is 'bfloat'; allowed: float32, bfloat16, float16",
        "dropout is 0.5 and there are no hidden features. Use dropout=0.0 or hidden=512.",
    ),
    (
        RESNET,
        {"depth": 50, "filters": 5},
        "filters 5 is not a multiple of num_groups 2: 5 % 2 = 1. Use filters=4 or filters=6.",
        "depth is 50; it must be 9 n + 2. Use depth=47 or depth=56.",
    ),
    (
        RESNET,
        {"depth": 2, "filters": 0, "colours": -1, "norm": "layer", "dtype": "float8"},
        "norm is 'layer'; allowed: group, batch",
        "dtype is 'float8'; allowed: float32, bfloat16, float16",
        "filters is 0; it must be at least 1. Use filters=1 or more.",
        "colours is -1; it must be at least 1. Use colours=1 or more.",
        "depth is 2; it must be 9 n + 2. Use depth=11 or depth=20.",
    ),
    (
        IMAGENET,
        {"depth": 51, "filters": 10, "num_groups": 4, "classes": 0},
        "classes is 0; it must be at least 1. Use classes=1 or more.",
        "filters 10 is not a multiple of num_groups 4: 10 % 4 = 2. Use filters=8 or filters=12.",
        "depth is 51; allowed are 18, 34, 50, 101, 152. Use depth=50.",
    ),
    (
        BOTH,
        {"num_encoder_layers": 0, "dropout": 1.0, "remat": "ful"},
        "remat is 'ful'; allowed: none, weights, dots, outputs, full, offload",
        "dropout is 1.0; it must be at least 0 and below 1. Use dropout=0.0 to switch it off.",
        "num_encoder_layers is 0; it must be at least 1. Use num_encoder_layers=1 or more.",
    ),
    (
        T5,
        {"relative_buckets": 6, "relative_distance": 3, "attention": "cudnn", "head_scale": -1.0},
        "head_scale is -1.0; it must be above 0 and finite. Use a small number such as head_scale=1e-5.",
        "relative_buckets is 6; it is a multiple of 4. Use relative_buckets=4.",
        "relative_distance is 3; it is above half of relative_buckets, 6. Use relative_distance=4 or more.",
        "attention 'cudnn' has no relative positions; use attention='auto' or 'xla'",
    ),
    (
        BERT,
        {"segments": 0, "activation": "swiglu", "vocab": 0},
        "activation is 'swiglu'; allowed: gelu, gelu_erf",
        "vocab is 0; it must be at least 1. Use vocab=1 or more.",
        "segments is 0; it must be at least 1. Use segments=1 or more.",
    ),
    (
        VIT,
        {"height": 30, "width": 16, "classes": 0, "embed": 10},
        "height 30 is not a multiple of patch 4: 30 % 4 = 2. Use height=28 or height=32.",
        "classes is 0; it must be at least 1. Use classes=1 or more.",
    ),
    (VIT, {"patch": 0}, "patch is 0; it must be at least 1. Use patch=1 or more."),
    (
        MLP,
        {"features": 0, "dropout": -0.1},
        "features is 0; it must be at least 1. Use features=1 or more.",
        "dropout is -0.1; it must be at least 0 and below 1. Use dropout=0.0 to switch it off.",
    ),
]


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: type(row[0]).__name__)
def test_every_problem_of_a_configuration_is_reported(row):
    config, change, *problems = row
    with pytest.raises(ValueError) as error:
        replace(config, **change)
    assert str(error.value).splitlines() == [
        f"{type(config).__name__}:",
        *(f"  - {each}" for each in problems),
    ]
