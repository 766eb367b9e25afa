"""Every attention of the registry against its definition, and the choice of one."""

import re
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from mesh_gradients import compile_gradients, compute_gradients

from shardtrain.functional.activation_rules import noting
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.attention import ATTENTIONS, Attention, ScoreOptions, attend, attend_whole, blockwise
from shardtrain.models.attention.cudnn import has_flash
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.ops import PLAIN, Ops
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh

SEGMENTS = np.array([[0] * 4 + [1] * 5 + [2] * 2, [0] * 11, np.arange(11)], np.int32)
MASK = np.ones((3, 11), np.int32)
# rows that show one key, none, and the second half
MASK[0, 1:] = MASK[1] = MASK[2, :5] = 0
CASES = {
    "plain": {},
    "not causal": {"causal": False},
    "another sequence": {"causal": False, "mask_BS": MASK[:, :7]},
    "mask": {"mask_BS": MASK},
    "mask of each query": {"mask_BS": MASK[:, :, None] | np.eye(11, dtype=np.int32)},
    "segments": {"segments_BT": SEGMENTS},
    "window": {"window": 3},
    "traced window": {"window": np.int32(6)},
    "wide window": {"window": 40},
    "soft cap": {"soft_cap": 0.5},
    "bias": {"bias_BHTS": np.random.default_rng(1).normal(size=(3, 4, 11, 11)).astype(np.float32)},
    "all": {"mask_BS": MASK, "segments_BT": SEGMENTS, "window": np.int32(2), "soft_cap": 0.5},
}


def by_definition(
    q, k, v, *, causal=True, mask_BS=None, segments_BT=None, window=None, soft_cap=None, bias_BHTS=0
):
    """Attention of repeated heads in float64; queries that see no key see all alike."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / np.sqrt(q.shape[-1]) + bias_BHTS
    scores = scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)
    behind = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
    seen = np.broadcast_to((behind >= 0) | (not causal), (len(q), *behind.shape))
    seen = seen if window is None else seen & (behind < window)
    seen = seen if segments_BT is None else seen & (segments_BT[:, :, None] == segments_BT[:, None, :])
    if mask_BS is not None:
        seen = seen & ((mask_BS if mask_BS.ndim == 3 else mask_BS[:, None]) != 0)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights, v)


def differentiate(attention, inputs):
    def loss(q, k, v):
        out = attention(q, k, v)
        return jnp.sin(out * jnp.arange(1, 1 + out.shape[1])[:, None, None]).sum(), out

    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
    return out, *gradients


@cache
def draw_inputs(case):
    """Queries, keys and values, and what the definition gives in float64 with its gradients."""
    random, num_keys = np.random.default_rng(0), 7 if case == "another sequence" else 11
    shapes = (3, 11, 4, 8), (3, num_keys, 2, 8), (3, num_keys, 2, 8)
    inputs = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) for x in inputs]
        return inputs, differentiate(partial(by_definition, **CASES[case]), wide)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ATTENTIONS)
def test_results_and_gradients_are_those_of_the_definition(name, case, monkeypatch):
    # several blocks, and the last of them padded
    monkeypatch.setattr(blockwise, "AT_ONCE", 4)
    options, (inputs, expected) = CASES[case], draw_inputs(case)
    traced = {key: x for key, x in options.items() if isinstance(x, (np.ndarray, np.generic))}
    fixed = {key: x for key, x in options.items() if key not in traced}

    def compute(inputs, traced):
        return differentiate(partial(attend_whole, name, **fixed, **traced), inputs)

    asked = ScoreOptions(**fixed, **jax.tree.map(jnp.asarray, traced))
    obstacles = ATTENTIONS[name].find_obstacles(inputs[0], inputs[1], asked, ())
    # the mask of a cache is for xla, whatever a model was trained with
    if obstacles and case != "mask of each query":
        with pytest.raises(ValueError, match=re.escape("; ".join(obstacles)) + ". Use 'auto'"):
            jax.eval_shape(compute, inputs, traced)
        return
    for got, wanted in zip(jax.jit(compute)(inputs, traced), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["xla", "blockwise"])
def test_16_bits_give_16_bits(name, monkeypatch):
    monkeypatch.setattr(blockwise, "AT_ONCE", 4)
    x = jax.random.normal(jax.random.key(0), (2, 5, 2, 8))
    for dtype, near in ((jnp.float16, 2e-3), (jnp.bfloat16, 0.03)):
        # jitted, as XLA for CPUs has no product of float16
        found = jax.jit(partial(attend_whole, name))(*[x.astype(dtype)] * 3)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.astype(jnp.float32), attend_whole("xla", x, x, x), near, near)


def describe(kind, capability=None):
    """What jax tells of a device; a CPU has no compute capability, and a GPU of AMD one such as gfx90a."""
    return SimpleNamespace(
        device_kind=kind, **({} if capability is None else {"compute_capability": capability})
    )


H100, V100 = describe("NVIDIA H100 80GB HBM3", "9.0"), describe("Tesla V100-SXM2-16GB", "7.0")
CPU, AMD = describe("cpu"), describe("AMD Instinct MI250X", "gfx90a")
CHOICES = [
    (H100, {}, "cudnn"),
    (H100, {"seq": 8192}, "cudnn"),
    (H100, {"dtype": jnp.float16, "head_dim": 128, "window": 4}, "cudnn"),
    (describe("NVIDIA B300 SXM6 AC", "10.3"), {}, "cudnn"),
    (describe("NVIDIA A100-SXM4-40GB", "8.0"), {}, "cudnn"),
    (describe("NVIDIA L40S", "8.9"), {}, "cudnn"),
    (H100, {"head_dim": 60}, "heads of a multiple of 8 features up to 128, not 60"),
    (H100, {"head_dim": 256}, "heads of a multiple of 8 features up to 128, not 256"),
    (H100, {"dtype": jnp.float32}, "16 bits, not float32"),
    (H100, {"soft_cap": 30.0}, "no soft cap"),
    (H100, {"window": jnp.int32(4)}, "a window that is the same in all blocks"),
    (H100, {"segments_BT": 0}, "no mask and no segments"),
    (V100, {}, "NVIDIA GPUs here from compute capability 8.0, not Tesla V100-SXM2-16GB (7.0)"),
    (AMD, {}, "NVIDIA GPUs here from compute capability 8.0, not AMD Instinct MI250X (gfx90a)"),
    (AMD, {"seq": 4096}, "blockwise"),
    (CPU, {"seq": 511}, "xla"),
    (CPU, {"seq": 512}, "blockwise"),
    (CPU, {"seq": 512, "mask_BS": "of each query"}, "xla"),
    (CPU, {"seq": 512, "bias_BHTS": 0}, "xla"),
]


@pytest.mark.parametrize(("device", "options", "expected"), CHOICES, ids=str)
def test_auto_takes_what_device_dtype_and_length_allow(monkeypatch, device, options, expected):
    ops, options = Ops(devices=(device,)), {"seq": 8, "head_dim": 64, "dtype": jnp.bfloat16, **options}
    seq, head_dim, dtype = (options.pop(name) for name in ("seq", "head_dim", "dtype"))
    shapes = {"segments_BT": (1, seq), "bias_BHTS": (1, 1, seq, seq), "mask_BS": (1, seq, seq)}
    options |= {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items() if name in options}
    chosen, x = [], jax.ShapeDtypeStruct((1, seq, 1, head_dim), dtype)
    for name, each in ATTENTIONS.items():
        take = partial(lambda name, q, *_: (chosen.append(name), q)[1], name)
        monkeypatch.setitem(ATTENTIONS, name, each._replace(attend=take))
    jax.eval_shape(lambda x: attend(ops, x, x, x, "auto", **options), x)
    if expected in ATTENTIONS:
        assert chosen == [expected]
        return
    assert chosen == ["xla"]
    with pytest.raises(ValueError) as error:
        jax.eval_shape(lambda x: attend(ops, x, x, x, "cudnn", **options), x)
    assert str(error.value) == (
        f"attention 'cudnn' cannot be computed here: cudnn needs {expected}. Use 'auto'; a run that"
        " resumes also needs --allow.changed model.attention"
    )


def test_cudnn_is_given_its_window(monkeypatch):
    windows = []

    # as jax traces it only where such a device is
    def attention(q, k, v, *, implementation, local_window_size, is_causal):
        windows.append((implementation, local_window_size, is_causal))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", attention)
    x = jnp.zeros((1, 4, 1, 64), jnp.bfloat16)
    for name, window in (("auto", 3), ("cudnn", None)):
        attend(Ops(devices=(H100,)), x, x, x, name, window=window)
    assert windows == [("cudnn", (2, 0), True), ("cudnn", None, True)]


def test_cudnn_runs_where_every_gpu_has_it():
    found = [has_flash(devices) for devices in ([H100, H100], [H100, V100], [CPU], [])]
    assert found == [True, False, False, False]


def test_what_no_attention_computes_is_refused():
    x, keys = jnp.zeros((1, 4, 3, 8)), jnp.zeros((1, 4, 2, 8))
    with pytest.raises(ValueError, match="use causal=True or window=None"):
        attend(PLAIN, x, x, x, "auto", causal=False, window=2)
    with pytest.raises(ValueError, match="3 heads of queries cannot share 2 heads of keys"):
        attend(PLAIN, x, keys, keys, "blockwise")


def test_an_unknown_attention_is_refused_with_those_that_exist():
    x = jnp.zeros((1, 4, 1, 8))
    expected = "attention is 'xl'; allowed are 'auto', 'cudnn', 'xla', 'blockwise'. Use attention='xla'."
    with pytest.raises(ValueError, match=expected):
        attend(PLAIN, x, x, x, "xl")
    with pytest.raises(ValueError, match=expected):
        DecoderConfig(vocab=8, seq=8, embed=8, num_layers=1, num_heads=1, attention="xl")


CONFIG = DecoderConfig(
    vocab=16, seq=16, embed=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp=16, positions="rotary",
    window=5, full_every=2,
)  # fmt: skip


def make_case(config, mesh, rows=8):
    """Packed rows on a mesh, as `compile_gradients` takes them."""
    random, is_staged = np.random.default_rng(0), "pipeline" in mesh
    tokens = random.integers(0, config.vocab, (rows, config.seq + 1), np.int32)
    segments = np.sort(random.integers(0, 3, (rows, config.seq), np.int32), axis=1)
    batch = {"tokens": tokens, "segments": segments, "weights": np.ones(segments.shape, np.float32)}
    layout = Layout(mesh=mesh, context_attention="all-to-all")
    return (from_nnx(config), layout, batch, 1 + is_staged), {"counts": (1, 1) * is_staged}


def compute(config, mesh):
    case, options = make_case(config, mesh)
    return compute_gradients(*case, **options)


@pytest.fixture(scope="module")
def expected():
    return compute(replace(CONFIG, attention="xla"), {"data": 1})


@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline": 2, "data": 2, "tensor": 2},
        pytest.param({"pipeline": 2, "context": 2, "fsdp": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_blocks_are_those_of_one_device_in_stages(mesh, expected, monkeypatch, assert_same):
    """Without stages: `test_packed_rows.py`."""
    monkeypatch.setattr(blockwise, "AT_ONCE", 4)
    assert_same(compute(replace(CONFIG, attention="blockwise"), mesh), expected)


def test_devices_exchange_nothing_for_blocks(monkeypatch):
    """XLA splits the loops over rows and heads."""
    monkeypatch.setattr(blockwise, "AT_ONCE", 4)
    layout = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2})
    mesh = make_mesh(layout, jax.devices()[:8])
    split = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, "tensor"))
    q, k = (jax.ShapeDtypeStruct((8, 16, heads, 8), jnp.float32, sharding=split) for heads in (4, 2))
    segments = jax.ShapeDtypeStruct(
        (8, 16), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(split.spec[0]))
    )

    def both(q, k, v, segments):
        out, back = jax.vjp(partial(attend_whole, "blockwise", segments_BT=segments), q, k, v)
        return out, *back(out)

    text = jax.jit(both, out_shardings=split).lower(q, k, k, segments).compile().as_text() or ""
    assert text.count("while(") >= 4
    assert re.findall(r" (all-[a-z]+|collective-[a-z]+|reduce-scatter)(?:-start)?\(", text) == []


def test_an_attention_of_a_user_is_a_dict_entry(expected, monkeypatch, assert_same):
    lines = []

    def find_obstacles(q, k, options, devices):
        return ["segments"] * (options.segments_BT is None)

    def attend(q, k, v, options):
        return by_definition(q, k, v, **{**options._asdict(), "bias_BHTS": 0})

    monkeypatch.setitem(ATTENTIONS, "mine", Attention(find_obstacles, attend))
    with noting(lines.append):
        assert_same(compute(replace(CONFIG, attention="mine"), {"data": 2}), expected)
    assert lines == ["attention: mine, as asked for: float32 on cpu"]


def test_packed_rows_of_long_sequences_have_no_scores_of_all_positions(assert_same):
    config = replace(
        CONFIG, seq=2048, num_layers=1, num_heads=1, num_kv_heads=1, window=None, full_every=None
    )
    found = {}
    for name in ("xla", "auto"):
        case, _ = make_case(replace(config, attention=name), {"data": 1}, rows=1)
        compiled, arguments, _ = compile_gradients(*case)
        result = compiled(*arguments)
        figures: Any = compiled.memory_analysis()
        found[name] = figures.temp_size_in_bytes, result.loss_sum, result.grads
    assert found["auto"][0] <= found["xla"][0] / 8
    assert_same(*(jax.tree.map(np.asarray, found[name][1:]) for name in ("auto", "xla")))
