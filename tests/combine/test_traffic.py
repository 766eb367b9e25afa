"""What crosses, in bytes: counted by a group that passes everything on."""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardtrain.combine import MeshGroup, make_combiner


@dataclass
class Counting:
    """A group that notes the bytes this rank hands over, by method."""

    group: MeshGroup
    sent: list = field(default_factory=list)

    @property
    def size(self):
        return self.group.size

    @property
    def index(self):
        return self.group.index

    def all_reduce(self, x, span=None):
        self.sent.append(("all_reduce", x.nbytes, span or self.size))
        return self.group.all_reduce(x, span)

    def exchange(self, x, sources):
        assert sorted(sources) == list(range(self.size))
        assert all(source != rank for rank, source in enumerate(sources))
        self.sent.append(("exchange", x.nbytes, None))
        return self.group.exchange(x, sources)

    def all_gather(self, x):
        self.sent.append(("all_gather", x.nbytes, None))
        return self.group.all_gather(x)

    def whole(self, x, op: Literal["sum", "max"] = "sum", *, stages=False):
        return self.group.whole(x, op, stages=stages)

    def bytes(self, method):
        return sum(n for name, n, _ in self.sent if name == method)


def sent(name, size, shapes):
    """The counting group after one round of a combiner; nothing is computed."""
    group = Counting(MeshGroup("data", size))
    combiner = make_combiner(name)
    like = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    state = jax.eval_shape(combiner.init, like)
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape), x.dtype), (like, state))
    jax.eval_shape(
        jax.vmap(lambda tree, state: combiner.combine(tree, 1.0, state, group), axis_name="data"), *stacked
    )
    return group


SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 12)


@pytest.mark.parametrize("size", SIZES)
def test_adasum_sends_what_an_all_reduce_sends_and_scalars(size):
    elements = 2520 * 3  # every size divides both leaves
    shapes = [((2520,), jnp.float32), ((2, 2520), jnp.float32)]
    group = sent("adasum", size, shapes)
    assert group.bytes("exchange") == 2 * 4 * elements * (size - 1) / size
    assert group.bytes("all_gather") == 4 * 2
    twos = (size & -size).bit_length() - 1
    odd = size >> twos
    pairs, nodes, spans = [1] * twos, odd, [2 ** (i + 1) for i in range(twos)]
    while nodes > 1:
        pairs.append(nodes // 2)
        spans.append(size)
        nodes -= nodes // 2
    reduces = [(n, span) for name, n, span in group.sent if name == "all_reduce"]
    assert reduces == [*((12 * 2 * p, s) for p, s in zip(pairs, spans, strict=True)), (8 * 2, size)]


def test_adasum_of_16_bits_sends_16_bits():
    for dtype in (jnp.bfloat16, jnp.float16):
        group = sent("adasum", 4, [((64,), dtype), ((8, 8), jnp.float32)])
        assert group.bytes("exchange") == 2 * (2 * 64 + 4 * 64) * 3 / 4
    assert sent("bfloat16+adasum", 4, [((64,), jnp.float32)]).bytes("exchange") == 2 * 2 * 64 * 3 / 4


def test_small_leaves_share_a_message_and_large_ones_go_without_a_copy():
    small = [((4,), jnp.float32), ((6,), jnp.float32), ((), jnp.float32)]
    large = [((1 << 18,), jnp.float32)]
    for shapes, messages in ((small, 1), (small + large, 2), (2 * large, 1)):
        exchanges = [n for name, n, _ in sent("adasum", 2, shapes).sent if name == "exchange"]
        assert len(exchanges) == 2 * messages  # there and back


def test_leaves_that_do_not_divide_cost_less_than_a_slice_more():
    group = sent("adasum", 4, [((5,), jnp.float32), ((), jnp.float32), ((0,), jnp.float32)])
    assert group.bytes("exchange") == 2 * 4 * (8 + 4) * 3 / 4


@pytest.mark.parametrize("size", SIZES)
def test_mean_sends_what_its_docstring_says(size):
    shapes = [((10,), jnp.float32), ((2, 5), jnp.float32)]
    assert sent("mean", size, shapes).sent == [("all_reduce", 4 * (20 + size), size)]
    group = sent("mean", size, [((2520,), jnp.bfloat16)])
    assert group.bytes("all_reduce") == 4 * size
    assert group.bytes("exchange") == 2 * 2520 * (size - 1) / size
    assert group.bytes("all_gather") == 2 * 2520 / size
    assert sent("bfloat16+mean", size, [((2520,), jnp.float32)]).sent == group.sent
    with_scales = sent("float16+mean", size, [((2520,), jnp.float32)])
    assert with_scales.bytes("all_gather") == group.bytes("all_gather") + 4
    assert with_scales.bytes("exchange") == group.bytes("exchange")


def test_mean_sends_large_leaves_without_a_copy():
    shapes = [((10,), jnp.float32), ((512, 512), jnp.float32), ((7,), jnp.float32)]
    assert [n for _, n, _ in sent("mean", 2, shapes).sent] == [4 * (17 + 2), 4 * 512**2]
    assert [n for _, n, _ in sent("mean", 2, shapes[1:2]).sent] == [4 * 2, 4 * 512**2]


@pytest.mark.parametrize("combiner", ["mean", "adasum"])
def test_codecs_gather_small_payloads(combiner):
    shapes = [((30, 20), jnp.float32), ((50,), jnp.float32)]
    elements, rank = 650, 2
    payloads = {
        "int8": elements + 4 * 2 + 4,
        "top_k:0.1": 8 * (60 + 5) + 4,
        f"power_sgd:{rank}": 4 * (rank * (30 + 20) + 50) + 4,
    }
    for codec, num_bytes in payloads.items():
        group = sent(f"{codec}+{combiner}", 4, shapes)
        if codec.startswith("power_sgd") and combiner == "mean":
            # factors are averaged: the left ones and what is not factored, then the right ones
            expected = [4 * (rank * 30 + 50 + 4), 4 * (rank * 20 + 4)]
            assert [n for name, n, _ in group.sent if name == "all_reduce"] == expected
            assert len(group.sent) == 2
            continue
        assert {name for name, _, _ in group.sent} == {"all_gather"}
        assert group.bytes("all_gather") == num_bytes
        assert num_bytes < 2 * 4 * elements / 4


def test_16_bits_cross_a_mesh_as_16_bits():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    combiner = make_combiner("bfloat16+mean")
    group = MeshGroup("data", 2)
    tree = [jnp.ones((2, 64))]
    state = jax.tree.map(lambda x: jnp.stack([x] * 2), combiner.init([tree[0][0]]))

    def shard(tree, state):
        tree, state = jax.tree.map(lambda x: x[0], (tree, state))
        return combiner.combine(tree, 1.0, state, group).value

    run = jax.shard_map(
        shard, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec(), check_vma=False
    )
    text = jax.jit(run).lower(tree, state).compile().as_text() or ""
    moved = [line for line in text.splitlines() if " collective-permute(" in line or " all-gather(" in line]
    assert moved
    assert all("u16[" in line.split("=")[1] for line in moved)
