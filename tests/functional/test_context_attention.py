"""Attention over sequences sharded over context: that of whole ones, balanced, or refused."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.functional import ring_attention
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.ring import Ring
from shardtrain.functional.run_trace import find_model_ops
from shardtrain.models.attention import attend, attend_whole, score_blocks
from shardtrain.models.attention.score_blocks import VisibleKeys
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.system.xla_flags import step_options

RANDOM = np.random.default_rng(0)


def arrays(num_queries=16, num_keys=16, kv_heads=2, dtype=jnp.float32, heads=4):
    """Queries, keys, values; a mask whose rows show one key, the second half, none, and all of them."""
    shapes = (4, num_queries, heads, 8), (4, num_keys, kv_heads, 8), (4, num_keys, kv_heads, 8)
    mask = np.ones((4, num_keys), np.int32)
    mask[0, 1:] = mask[1, : num_keys // 2] = mask[2] = 0
    return [jnp.asarray(RANDOM.normal(size=shape), dtype) for shape in shapes], jnp.asarray(mask)


def computed(compute: Any, inputs: Any, **options: Any) -> Any:
    """What an attention returns, and its gradients."""

    def loss(q, k, v):
        out = compute(q, k, v, **options)
        of_position = jnp.arange(1, 1 + out.shape[1])[:, None, None] / out.shape[1]
        return jnp.sin(out.astype(jnp.float32) * of_position).sum(), out

    (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*inputs)
    return out, *grads


def on_mesh(kind, mesh, inputs, activations: Any = None, **options):
    layout = Layout(mesh=mesh, context_attention=kind, activations=activations or {})
    devices = make_mesh(layout, jax.devices()[: int(np.prod(list(mesh.values())))])

    def compute(*inputs):
        with activation_rules(layout.activation_rules, devices, *layout.tracing):
            attention = partial(attend, find_model_ops(), kind="xla")
            return computed(attention, inputs, **options)

    return jax.jit(compute, in_shardings=NamedSharding(devices, PartitionSpec()))(*inputs)


STAGES = {"pipeline": 2}
"""In a mesh with stages a ring is one of pairs; these stages compute alike."""
SEGMENTS = np.array([[0] * 5 + [1] * 7 + [2] * 4, [0] * 16, [0] + [1] * 14 + [2], np.arange(16)], np.int32)
REPLICATED = {"activations": {"kv_heads": ()}}
FEWER_AXES = {"batch": (), "heads": ("tensor", "fsdp"), "kv_heads": ("tensor",)}
FEW = {"num_queries": 4, "num_keys": 4}
OTHERS = {"mask": True, "causal": False}
CASES: dict[str, tuple[str, dict[str, int], dict[str, int], dict[str, Any]]] = {
    "ring, padding": ("ring", {"context": 4, "tensor": 2}, {}, {"mask": True}),
    "ring, segments, not causal": ("ring", {"context": 2}, {}, {"segments": True, "causal": False}),
    "ring, window of many parts": ("ring", {"context": 4}, {}, {"window": 6, "segments": True}),
    "ring, wide window": ("ring", {"context": 4}, {}, {"window": 12}),
    "ring, wider than all": ("ring", {"context": 2}, {}, {"window": 40}),
    "ring, window, padding, cap": ("ring", {"context": 4}, {}, {"window": 3, "mask": True, "soft_cap": 0.5}),
    "pairs, segments": ("ring", {**STAGES, "context": 4}, {}, {"segments": True}),
    "pairs, window of two parts": ("ring", {**STAGES, "context": 2}, {}, {"window": 3}),
    "pairs, window of many parts": ("ring", {**STAGES, "context": 4}, {}, {"window": 6, "segments": True}),
    "all-gather, segments, window, cap": (
        "all-gather", {"context": 2, "fsdp": 2}, {}, {"segments": True, "window": 3, "soft_cap": 0.5},
    ),
    "all-to-all, all options": (
        "all-to-all", {"context": 2}, {}, {"segments": True, "mask": True, "soft_cap": 0.5, "window": 5},
    ),
    "pairs, to another sequence": (
        "ring", {**STAGES, "context": 4}, {"num_queries": 8, "num_keys": 12}, OTHERS,
    ),
    "ring, to another sequence": (
        "ring", {"context": 4, "fsdp": 2}, {"num_queries": 8, "num_keys": 12}, OTHERS,
    ),
    "all-gather, to another sequence": (
        "all-gather", {"context": 2, "fsdp": 2}, {"num_queries": 4, "num_keys": 6}, OTHERS,
    ),
    "key heads, one for all": ("ring", {"context": 2, "tensor": 2}, {**FEW, "kv_heads": 1}, REPLICATED),
    "key heads, unequal shares": ("ring", {"context": 2, "tensor": 3}, {**FEW, "heads": 6}, REPLICATED),
    "key heads, one of several": ("all-gather", {"context": 2, "tensor": 4}, FEW, REPLICATED),
    "key heads, several of several": (
        "all-to-all", {"context": 2, "tensor": 2}, {**FEW, "heads": 8, "kv_heads": 4}, REPLICATED,
    ),
    "key heads, over fewer axes": (
        "all-gather", {"fsdp": 2, "context": 2, "tensor": 2}, FEW, {"activations": FEWER_AXES},
    ),
}  # fmt: skip
"""Case -> the kind, the mesh, the sizes of the arrays, and the options."""
RARE = ("window of many parts", "wide window", "wider than all", "unequal shares")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] * case.endswith(RARE)) for case in CASES]
)
def test_it_is_that_of_whole_sequences(case, monkeypatch):
    # so that keys are taken in several blocks
    monkeypatch.setattr(score_blocks, "KEYS_AT_ONCE", 2)
    kind, mesh, sizes, options = CASES[case]
    inputs, mask = arrays(**sizes)
    options = dict(options)
    rules = options.pop("activations", None)
    if options.pop("mask", False):
        options["mask_BS"] = mask
    if options.pop("segments", False):
        options["segments_BT"] = SEGMENTS
    expected = jax.jit(partial(computed, partial(attend_whole, "xla"), **options))(inputs)
    for got, wanted in zip(on_mesh(kind, mesh, inputs, rules, **options), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_16_bits_give_16_bits():
    dtype = "bfloat16"
    inputs, _ = arrays(8, 8, dtype=jnp.dtype(dtype))
    out = on_mesh("ring", {"context": 2}, inputs, causal=True)[0]
    assert out.dtype == dtype
    wide = [x.astype(jnp.float32) for x in inputs]
    np.testing.assert_allclose(out.astype(jnp.float32), attend_whole("xla", *wide), rtol=0.03, atol=0.03)


@pytest.mark.parametrize(("num", "in_pairs"), [(3, False), (8, False), (2, True), (6, True)])
def test_a_balanced_ring_computes_what_is_needed_once_and_on_all_devices_as_much(num, in_pairs, monkeypatch):
    """Blocks of scores, as (part of the queries, part of the keys) of the sequence in 2 num parts."""
    found, ring = [], Ring("context", num, "balanced", in_pairs=in_pairs)
    parts = [(2 * i, 2 * num - 1 - 2 * i) for i in range(num)]
    parts = [(min(both), max(both)) for both in parts]
    for device in range(num):
        monkeypatch.setattr(ring_attention.lax, "axis_index", lambda axis, device=device: jnp.int32(device))
        for step in range(num):
            other = int(ring.other(step))
            for mine, theirs, first in ring_attention._list_pairs(step, ring, 8, None):
                pair = parts[device][int(mine)], parts[other][int(theirs)]
                # only on the diagonal are some keys behind some queries
                assert (first is not None) == (pair[0] == pair[1])
                found.append((device, *pair))
    needed = {(query, key) for query in range(2 * num) for key in range(query + 1)}
    assert sorted(pair for _, *pair in found) == sorted(map(list, needed))
    assert {sum(device == i for device, *_ in found) for i in range(num)} == {2 * num + 1}


@pytest.mark.full
@pytest.mark.parametrize(("in_pairs", "least"), [(False, 4), (True, 4 / 1.15)])
def test_a_ring_has_memory_for_the_keys_of_two_devices_and_not_of_all(in_pairs, least):
    """Temporary memory falls as the part of a sequence; in pairs a device also receives its own keys."""
    q, k = (jax.ShapeDtypeStruct((1, 8, *rest, 4096, 64), jnp.float32) for rest in ((1,), ()))
    of_k = PartitionSpec(None, None, "context")
    of_q = PartitionSpec(None, *of_k)

    def compiled(num) -> Any:
        ring = Ring("context", num, "balanced", in_pairs=in_pairs)

        def both_directions(q, k, v):
            out, gradients = jax.vjp(
                partial(ring_attention.ring_attention, seen=VisibleKeys(), ring=ring), q, k, v
            )
            return out, *gradients(out)

        mesh = make_mesh(Layout(mesh={"context": num}), jax.devices()[:num])
        run = jax.shard_map(
            both_directions,
            mesh=mesh,
            in_specs=(of_q, of_k, of_k),
            out_specs=(of_q, of_q, of_k, of_k),
            check_vma=False,
        )
        return jax.jit(run, compiler_options=step_options("cpu")).lower(q, k, k).compile()

    two, eight = compiled(2), compiled(8)
    assert two.memory_analysis().temp_size_in_bytes >= least * eight.memory_analysis().temp_size_in_bytes
    # keys and values go round in both directions, their gradients in one
    sent = re.findall(r" (?:all-gather|collective-permute)(?:-start)?\(", eight.as_text())
    assert len(sent) == 3 * 2 * 7


@pytest.mark.parametrize(("num", "in_pairs"), [(3, False), (8, False), (6, True)])
def test_the_balanced_order_pairs_early_with_late_parts_and_is_taken_back(num, in_pairs):
    mesh = make_mesh(Layout(mesh={"context": num}), jax.devices()[:num])
    split = PartitionSpec(None, "context")
    ring = Ring("context", num, "balanced", in_pairs=in_pairs)

    def exchanged(x):
        there = ring.balance_halves(x)
        return there, ring.balance_halves(there, inverse=True)

    run = jax.shard_map(exchanged, mesh=mesh, in_specs=split, out_specs=(split, split), check_vma=False)
    there, back = jax.jit(run)(jnp.arange(2 * num)[None])
    parts = there[0].reshape(num, 2)
    assert (parts[:, 0] < parts[:, 1]).all()
    assert (parts.sum(1) == 2 * num - 1).all()
    assert parts[:, 0].tolist() == [int(ring.early_part(i)) for i in range(num)]
    assert back[0].tolist() == list(range(2 * num))


def test_what_cannot_be_split_is_refused_with_sizes_that_can():
    with pytest.raises(ValueError) as error:
        on_mesh("ring", {"context": 4}, arrays(14, 14)[0], causal=True)
    assert str(error.value) == (
        "attention by ring over context=4 cannot split this:"
        "\n  - 14 queries cannot be split into 8 parts: 14 % 8 = 6. Use 8 or 16"
        "\n  - 14 keys cannot be split into 8 parts: 14 % 8 = 6. Use 8 or 16"
    )
    with pytest.raises(ValueError) as error:
        on_mesh("all-to-all", {"context": 4}, arrays(8, 8)[0], causal=True)
    assert str(error.value) == (
        "attention by all-to-all over context=4 cannot split this:"
        "\n  - 2 kv_heads of a device cannot be split over 4; use a context that divides them, or"
        " --context-attention ring"
    )
    with pytest.raises(ValueError) as error:
        on_mesh("ring", {"context": 2, "tensor": 2}, arrays(5, 8, 1)[0])
    assert str(error.value) == (
        "attention by ring over context=2 cannot split this:"
        "\n  - 5 queries cannot be split into 4 parts: 5 % 4 = 1. Use 4 or 8"
        "\n  - 1 kv_heads cannot be split over ['tensor'] of total size 2: 1 % 2 = 1. Use another mesh, or"
        " the rule activations.kv_heads = []"
    )


@pytest.mark.parametrize("kind", ["ring", "all-gather", "all-to-all"])
def test_a_window_may_be_computed(kind):
    """As where it differs from block to block."""
    inputs, _ = arrays(8, 8)

    def blocks(q, k, v, attention):
        return jax.lax.scan(lambda q, window: (attention(q, k, v, window=window), None), q, WINDOWS)[0]

    expected = computed(partial(blocks, attention=partial(attend_whole, "xla")), inputs)
    layout = Layout(mesh={"context": 2}, context_attention=kind)
    mesh = make_mesh(layout, jax.devices()[:2])
    with activation_rules(layout.activation_rules, mesh, *layout.tracing):
        attention = partial(attend, find_model_ops(), kind="xla")
        compute = partial(computed, partial(blocks, attention=attention))
        found = jax.jit(compute, in_shardings=NamedSharding(mesh, PartitionSpec()))(inputs)
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


WINDOWS = jnp.array([2, 5, 100])


@pytest.mark.parametrize(("window", "num_sent"), [(1, 0), (2, 2), (9, 2), (10, 4), (13, 4), (14, 6 + 2)])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_ring_sends_as_far_as_a_window_needs(window, num_sent, stages):
    """Keys and values, over 4 devices with 8 positions each; else to all, in the balanced order.

    By pairs a neighbour is reached in two exchanges, and in the balanced order all are met in as many.
    """
    inputs, _ = arrays(32, 32)
    layout = Layout(mesh={"context": 4, "pipeline": stages})
    mesh = make_mesh(layout, jax.devices()[: 4 * stages])
    with activation_rules(layout.activation_rules, mesh, *layout.tracing):
        attention = partial(attend, find_model_ops(), kind="xla", window=window)
        text = str(jax.make_jaxpr(attention)(*inputs))
    found = text.count("ppermute["), text.count("all_gather[")
    by_pairs = num_sent if window == 14 else 2 * num_sent
    assert found == ((num_sent, 0) if stages == 1 else (0, by_pairs))


def test_sequences_that_a_layout_leaves_whole_are_not_split():
    layout = Layout(mesh={"context": 2}, activations={"seq": [], "residual_seq": []})  # type: ignore[arg-type]
    inputs, _ = arrays(5, 5)
    with activation_rules(layout.activation_rules, make_mesh(layout, jax.devices()[:2]), *layout.tracing):
        text = str(jax.make_jaxpr(lambda q, k, v: attend(find_model_ops(), q, k, v, "xla"))(*inputs))
    assert "ppermute" not in text
