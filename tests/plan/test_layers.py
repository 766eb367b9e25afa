"""Partition of layers: AccPar's tables, the exact search against all choices, layers of traced models."""

from itertools import pairwise, product

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain import classification_loss, next_token_loss
from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.resnet import ResNetConfig
from shardtrain.plan.layers.assignment import choose_best, estimate_exchange, least_sum, partition_layers
from shardtrain.plan.layers.baselines import BASELINES, data_parallel, hypar, mesh_levels
from shardtrain.plan.layers.compare import TENSOR_DIMS, EquivalentMesh, NoMesh, find_mesh, plan_layers
from shardtrain.plan.layers.layer_graph import Layer, Source
from shardtrain.plan.layers.partition import (
    Side,
    Split,
    count_flops,
    exchange_seconds,
    find_missing,
    join_groups,
    list_splits,
    make_group,
)
from shardtrain.plan.layers.trace_layers import trace_layers
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.subject import Subject

DECODER = DecoderConfig(vocab=64, seq=32, embed=32, num_layers=3, num_heads=4, mlp=128)
NODES = Machine(
    rates=Rates(flops_per_second=1e9),
    devices_per_node=4,
    device_link=Link(bytes_per_second=4e7),
    node_link=Link(bytes_per_second=1e7),
)


def subject_of(model, loss, **batch):
    shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in batch.items()}
    return Subject(model=lambda remat: model, loss=loss, optimizer=optax.sgd(0.1), batch=shapes)


def image_batch(rows, size):
    floats = jnp.float32
    return {
        "image": ((rows, size, size, 3), floats),
        "label": ((rows,), jnp.int32),
        "weights": ((rows,), floats),
    }


@pytest.fixture(scope="module")
def decoder():
    tokens = {"tokens": ((16, 33), jnp.int32), "weights": ((16,), jnp.float32)}
    return subject_of(convert_model(DECODER), next_token_loss, **tokens)


def chain(*sizes, rows=16):
    """Matrix products from size to size."""
    layers = []
    for i, (into, out) in enumerate(pairwise(sizes)):
        layers.append(
            Layer(
                name=f"fc{i}",
                kind="product",
                sources=(Source(layer=i - 1, num_bytes=4 * rows * into),) if i else (),
                flops=2 * rows * into * out,
                weight_bytes=4 * into * out,
                output_bytes=4 * rows * out,
                rows=rows,
                size_in=into,
                size_out=out,
            )
        )
    return tuple(layers)


@pytest.mark.parametrize("ratio", [0.5, 0.25])
def test_layouts_give_the_published_tables(ratio):
    # AccPar, table 5, for the first group with part a and the other with b; F and E have as many bytes
    a, b = ratio, 1 - ratio
    table = {
        ("I", "I"): 0.0,
        ("I", "II"): a * b * 2,
        ("I", "III"): b,
        ("II", "I"): b,
        ("II", "II"): b,
        ("II", "III"): 0.0,
        ("III", "I"): a * b * 2,
        ("III", "II"): 0.0,
        ("III", "III"): b,
    }
    # the other group receives so slowly that it never decides
    first, other = (
        Side(flops_per_second=1, bytes_per_second=1),
        Side(flops_per_second=1, bytes_per_second=1e9),
    )
    for (before, after), expected in table.items():
        splits_of_both = Split(before, ratio), Split(after, ratio)
        assert exchange_seconds(1.0, *splits_of_both, (first, other)) == pytest.approx(expected, abs=1e-6)


def test_what_is_missing_is_what_arrays_lack():
    # 12 x 12 elements, held and needed as index sets
    rows, columns = np.mgrid[:12, :12]

    def owned(layout, ratio, group):
        index = {"rows": rows, "features": columns}.get(layout)
        return np.ones((12, 12), bool) if index is None else (index < 12 * ratio) != bool(group)

    for before, after in product(("rows", "features", "whole"), repeat=2):
        for have, need in product((0.25, 0.5, 0.75), repeat=2):
            lacks = [(owned(after, need, g) & ~owned(before, have, g)).mean() for g in (0, 1)]
            assert find_missing(before, after, have, need) == pytest.approx(lacks)


def step_seconds(layers, chosen, sides):
    """What the search minimises."""
    compute = (
        max(flops / side.flops_per_second for side, flops in zip(sides, count_flops(*each), strict=True))
        for each in zip(layers, chosen, strict=True)
    )
    return estimate_exchange(layers, chosen, sides) + sum(compute)


@settings(max_examples=20)
@given(data=st.data(), number=st.integers(1, 8))
def test_elimination_is_the_least_of_all_choices(data, number):
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    sizes = random.integers(1, 4, number)
    single = [random.random(size) for size in sizes]
    # a chain, and joins between any two
    edges = {(i - 1, i) for i in range(1, number)}
    edges |= {
        tuple(sorted(random.choice(number, 2, replace=False))) for _ in range(number // 2) if number > 1
    }
    pairs = {(int(i), int(j)): random.random((sizes[i], sizes[j])) for i, j in edges}

    def total(choice):
        return sum(single[i][v] for i, v in enumerate(choice)) + sum(
            table[choice[i], choice[j]] for (i, j), table in pairs.items()
        )

    least, chosen = least_sum(single, pairs)
    assert total(chosen) == pytest.approx(least)
    assert least == pytest.approx(min(map(total, product(*map(range, sizes)))))


def random_layers(random, number):
    """A chain, of which some layers read an earlier one too, or are a join."""
    layers = []
    for i in range(number):
        read = (
            {i - 1} | ({int(random.integers(i))} if i > 1 and random.random() < 0.5 else set())
            if i
            else set()
        )
        joins = len(read) > 1 and random.random() < 0.5
        layers.append(
            Layer(
                name=str(i),
                kind="join" if joins else "product",
                sources=tuple(Source(layer=j, num_bytes=random.random()) for j in sorted(read)),
                flops=0.0 if joins else random.random(),
                weight_bytes=0.0 if joins else random.random(),
                output_bytes=random.random(),
            )
        )
    return tuple(layers)


@settings(max_examples=12)
@given(seed=st.integers(0, 10**6), number=st.integers(1, 4), equal=st.booleans())
def test_the_search_finds_the_shortest_step(seed, number, equal):
    random = np.random.default_rng(seed)
    layers = random_layers(random, number + 2 * equal)
    first = Side(flops_per_second=1.0, bytes_per_second=2.0, latency_seconds=0.01)
    speeds = random.uniform(0.2, 2, 2)
    sides = (first, first if equal else Side(flops_per_second=speeds[0], bytes_per_second=speeds[1]))
    chosen = choose_best(layers, sides)
    every = product(*(list_splits(layer, sides) for layer in layers))
    assert step_seconds(layers, chosen, sides) == pytest.approx(
        min(step_seconds(layers, each, sides) for each in every)
    )
    # so it is never slower than any of the others, nor with more to choose than with less
    times = {name: step_seconds(layers, way(layers, sides, 0), sides) for name, way in BASELINES.items()}
    assert times.pop("accpar with copies") <= times["accpar"] + 1e-9
    assert times["accpar"] <= min(times.values()) + 1e-9


def test_wide_layers_take_features_and_narrow_ones_rows():
    (pair,) = {make_group(NODES, 2).sides}
    # alternating II and III: partial sums alone are exchanged
    wide = [split.way for split in choose_best(chain(4096, 4096, 4096, 4096, rows=4), pair)]
    assert "I" not in wide
    assert all(before != after for before, after in pairwise(wide))
    assert {split.way for split in choose_best(chain(8, 8, 8, rows=4096), pair)} == {"I"}
    # a dim of one element cannot be split
    assert {split.way for split in choose_best(chain(8, 8, 1, rows=1), pair)} <= {"II", "III"}


def test_data_parallelism_costs_its_gradients_on_each_level():
    layers = chain(64, 64, 64)
    found = partition_layers(layers, make_group(NODES, 8), data_parallel)
    num_bytes = 2 * 4 * 64 * 64
    # 2 nodes by one link; then 2 and 1 links of devices
    expected = num_bytes / 1e7 + num_bytes / 8e7 + num_bytes / 4e7
    assert found.exchange_seconds == pytest.approx(expected)
    assert found.compute_seconds == pytest.approx(sum(layer.step_flops for layer in layers) / 8e9)
    assert [level.group.devices for level in found.levels] == [8, 4, 2]
    assert find_mesh(layers, found) == EquivalentMesh(data=8, tensor=1, dims=TENSOR_DIMS)


@pytest.mark.parametrize("devices", [1, 3, 5, 7, 12])
def test_any_number_of_devices_computes_everything_once(devices):
    layers = chain(64, 96, 64)
    found = partition_layers(layers, make_group(NODES, devices))
    total = sum(layer.step_flops for layer in layers)
    assert found.compute_seconds == pytest.approx(total / (devices * 1e9))

    def leaves(each):
        return [leaf for half in each.halves for leaf in leaves(half)] or [each]

    assert len(leaves(found)) == devices


def test_unequal_groups_get_unequal_parts():
    slow = Machine(rates=Rates(flops_per_second=2.5e8))
    both = join_groups([make_group(NODES, 2, "new"), make_group(slow, 2, "old")], Link(bytes_per_second=1e7))
    layers = chain(64, 64, 64, rows=512)
    found = partition_layers(layers, both)
    assert [half.name for half in both.halves] == ["new", "old"]
    assert {round(split.ratio, 2) for split in found.chosen} == {0.8}
    # halves of a published way wait for the slow group
    in_halves = partition_layers(layers, both, hypar)
    assert in_halves.compute_seconds == pytest.approx(2.5 * found.compute_seconds)
    with pytest.raises(NoMesh, match="islands run it, which take rows by --shares"):
        find_mesh(layers, found)


def test_layers_of_a_decoder(decoder):
    layers = trace_layers(decoder)
    names = [layer.name for layer in layers if layer.has_weights]
    assert len(names) == 1 + 4 * DECODER.num_layers + 1
    assert (names[0], names[-1]) == ("embedding", "embedding")
    up = next(layer for layer in layers if layer.name == "blocks/mlp/up/kernel[1]")
    assert up.flops == 2 * 16 * 32 * 32 * 128
    assert up.weight_bytes == 4 * 32 * 128
    assert (up.dims_in, up.dims_out) == (("embed",), ("mlp",))
    assert [source.num_bytes for source in up.sources] == [4 * 16 * 32 * 32]
    assert layers[up.sources[0].layer].kind == "join"
    # forward and backward have the flops of the whole traced step
    traced = sum(_flops(kernel) for kernel in decoder.program(None).kernels)
    assert sum(layer.step_flops for layer in layers) == pytest.approx(traced, rel=0.02)


def _flops(kernel):
    inside = 0 if kernel.body is None else sum(map(_flops, kernel.body.kernels))
    return kernel.flops + kernel.trips * inside


def test_layers_of_images_and_of_linen():
    config = ResNetConfig(depth=11, filters=4, height=8, width=8)
    layers = trace_layers(subject_of(convert_model(config), classification_loss, **image_batch(8, 8)))
    joins = [layer for layer in layers if layer.kind == "join"]
    assert len(joins) == config.num_blocks
    assert all(len(layer.sources) == 2 for layer in joins)
    assert all(source.layer < i for i, layer in enumerate(layers) for source in layer.sources)

    class Net(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = flax.linen.relu(flax.linen.Conv(4, (3, 3))(x))
            return flax.linen.Dense(10)(x.reshape(x.shape[0], -1))

    image = jnp.zeros((1, 8, 8, 3))
    found = trace_layers(subject_of(from_linen(Net(), image), classification_loss, **image_batch(8, 8)))
    assert [(layer.kind, layer.size_in, layer.size_out) for layer in found] == [
        ("convolution", 3, 4),
        ("product", 256, 10),
    ]
    assert found[1].sources == (Source(layer=0, num_bytes=4 * 8 * 256),)


def test_types_that_a_mesh_runs(decoder):
    layers = trace_layers(decoder)
    megatron = partition_layers(layers, make_group(NODES, 8), mesh_levels(1, TENSOR_DIMS))
    assert find_mesh(layers, megatron) == EquivalentMesh(data=2, tensor=4, dims=TENSOR_DIMS)
    types = {layer.name: split.way for layer, split in zip(layers, megatron.levels[1].chosen, strict=True)}
    assert types["blocks/mlp/up/kernel[0]"] == "III"
    assert types["blocks/mlp/down/kernel[0]"] == "II"

    def mixed(layers, sides, level):
        one, other = data_parallel(layers, sides), mesh_levels(0, TENSOR_DIMS)(layers, sides, 0)
        return (*one[:5], *other[5:])

    found = partition_layers(layers, make_group(NODES, 2), mixed)
    with pytest.raises(NoMesh, match="an axis of a mesh does one of both for all layers"):
        find_mesh(layers, found)


def test_ways_are_compared_by_name(decoder):
    plan = plan_layers(trace_layers(decoder), make_group(NODES, 8), 4)
    assert set(plan.ways) == {*BASELINES, "megatron"}
    assert plan.ways[plan.best].seconds == min(way.seconds for way in plan.ways.values())
    top = plan.ways["megatron"].levels
    assert {split.way for split in top[0].chosen} == {"I", "rows"}
    assert {split.way for split in top[1].chosen} == {"II", "III", "features", "whole"}


def test_devices_that_gain_nothing_compute_copies():
    # messages cost more than the work: a search level by level of types alone splits all the same
    slow = Machine(rates=Rates(flops_per_second=1e12), device_link=Link(latency_seconds=1.0))
    layers = chain(8, 8, 8, rows=4)
    plan = plan_layers(layers, make_group(slow, 8), 8)
    assert plan.best == "accpar with copies"
    best = plan.ways[plan.best]
    assert best.exchange_seconds == 0
    assert plan.ways["accpar"].exchange_seconds >= 1
    with pytest.raises(NoMesh, match="level 0 computes all layers on both halves: use 4 of its devices"):
        find_mesh(layers, best)
