"""What crosses, in bytes: counted by a group that only counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardtrain.combine import MeshGroup, make_combiner
from shardtrain.combine.messages import ALL_GATHER, ALL_REDUCE, EXCHANGE, Message, trace_messages


class Sent:
    """What a rank gives to a group in one round of a combiner."""

    def __init__(self, name, size, shapes):
        like = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        self.sent = trace_messages(make_combiner(name), like, size)

    def all(self, kind):
        return [each.num_bytes for each in self.sent if each.kind == kind]

    def bytes(self, kind):
        return sum(self.all(kind))


SIZES = (2, 3, 7, 12)


@pytest.mark.parametrize("size", SIZES)
def test_adasum_sends_what_an_all_reduce_sends_and_scalars(size):
    elements = 2520 * 3  # every size divides both leaves
    shapes = [((2520,), jnp.float32), ((2, 2520), jnp.float32)]
    group = Sent("adasum", size, shapes)
    assert group.bytes(EXCHANGE) == 2 * 4 * elements * (size - 1) / size
    assert group.bytes(ALL_GATHER) == 4 * 2
    twos = (size & -size).bit_length() - 1
    odd = size >> twos
    pairs, nodes, spans = [1] * twos, odd, [2 ** (i + 1) for i in range(twos)]
    while nodes > 1:
        pairs.append(nodes // 2)
        spans.append(size)
        nodes -= nodes // 2
    reduces = [(n, span) for kind, n, span in group.sent if kind == ALL_REDUCE]
    assert reduces == [*((12 * 2 * p, s) for p, s in zip(pairs, spans, strict=True)), (8 * 2, size)]


def test_adasum_of_16_bits_sends_16_bits():
    for dtype in (jnp.bfloat16, jnp.float16):
        group = Sent("adasum", 4, [((64,), dtype), ((8, 8), jnp.float32)])
        assert group.bytes(EXCHANGE) == 2 * (2 * 64 + 4 * 64) * 3 / 4
    assert Sent("bfloat16+adasum", 4, [((64,), jnp.float32)]).bytes(EXCHANGE) == 2 * 2 * 64 * 3 / 4


def test_small_leaves_share_a_message_and_large_ones_go_without_a_copy():
    small = [((4,), jnp.float32), ((6,), jnp.float32), ((), jnp.float32)]
    large = [((1 << 18,), jnp.float32)]
    for shapes, messages in ((small, 1), (small + large, 2), (2 * large, 1)):
        assert len(Sent("adasum", 2, shapes).all(EXCHANGE)) == 2 * messages  # there and back


def test_leaves_that_do_not_divide_cost_less_than_a_slice_more():
    group = Sent("adasum", 4, [((5,), jnp.float32), ((), jnp.float32), ((0,), jnp.float32)])
    assert group.bytes(EXCHANGE) == 2 * 4 * (8 + 4) * 3 / 4


@pytest.mark.parametrize("size", SIZES)
def test_mean_sends_what_its_docstring_says(size):
    shapes = [((10,), jnp.float32), ((2, 5), jnp.float32)]
    assert Sent("mean", size, shapes).sent == [Message(ALL_REDUCE, 4 * (20 + size), size)]
    group = Sent("mean", size, [((2520,), jnp.bfloat16)])
    assert group.bytes(ALL_REDUCE) == 4 * size
    assert group.bytes(EXCHANGE) == 2 * 2520 * (size - 1) / size
    assert group.bytes(ALL_GATHER) == 2 * 2520 / size
    assert Sent("bfloat16+mean", size, [((2520,), jnp.float32)]).sent == group.sent
    with_scales = Sent("float16+mean", size, [((2520,), jnp.float32)])
    assert with_scales.bytes(ALL_GATHER) == group.bytes(ALL_GATHER) + 4
    assert with_scales.bytes(EXCHANGE) == group.bytes(EXCHANGE)


def test_mean_sends_large_leaves_without_a_copy():
    shapes = [((10,), jnp.float32), ((512, 512), jnp.float32), ((7,), jnp.float32)]
    assert [n for _, n, _ in Sent("mean", 2, shapes).sent] == [4 * (17 + 2), 4 * 512**2]
    assert [n for _, n, _ in Sent("mean", 2, shapes[1:2]).sent] == [4 * 2, 4 * 512**2]


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
        group = Sent(f"{codec}+{combiner}", 4, shapes)
        if codec.startswith("power_sgd") and combiner == "mean":
            # factors are averaged: the left ones and what is not factored, then the right ones
            expected = [4 * (rank * 30 + 50 + 4), 4 * (rank * 20 + 4)]
            assert group.all(ALL_REDUCE) == expected
            assert len(group.sent) == 2
            continue
        assert {each.kind for each in group.sent} == {ALL_GATHER}
        assert group.bytes(ALL_GATHER) == num_bytes
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
