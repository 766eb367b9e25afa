"""The devices of stages, from the options or the table of known devices; and costs traced from a model."""

import math

import jax
import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.resnet import ResNetConfig
from shardtrain.pipeline.block_costs import model_costs
from shardtrain.pipeline.costs import ChainTrace
from shardtrain.pipeline.options import Pipeline
from shardtrain.pipeline.partition import parse_cuts
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_costs import BlockCost, ModelCosts, StageCosts, StageDevices
from shardtrain.pipeline.stage_cut import best_cut
from shardtrain.plan.devices import find_device
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.trainer.combinations import find_sharded_block_problems
from shardtrain.trainer.stage_cut import (
    StageIslandDevices,
    cut_text,
    describe_island_devices,
    find_stage_devices,
    flops_per_second,
)

FAST, SLOW = "NVIDIA H100 80GB HBM3", "NVIDIA L4"


def islands(*kinds, number=1):
    return [StageIslandDevices(kind, number, 1, 1) for kind in kinds]


def test_a_stage_is_as_fast_as_the_slowest_of_its_islands():
    found, counted = find_stage_devices(Pipeline(), [islands(FAST, SLOW), islands(FAST, FAST, number=2)])
    fast, slow = find_device(FAST), find_device(SLOW)
    assert fast is not None
    assert slow is not None
    assert [each.flops_per_second for each in found] == [
        fast.matrix_flops_per_second,
        slow.matrix_flops_per_second,
    ]
    assert [each.memory_bytes for each in found] == [fast.memory_bytes, slow.memory_bytes]
    # one cut for two pipelines
    both = find_stage_devices(Pipeline(stage_memory="auto;auto"), [islands(FAST), islands(SLOW)])[0]
    assert both[0].memory_bytes == min(fast.memory_bytes, slow.memory_bytes)
    assert counted == "by the peak rates of their devices"


def test_devices_without_bfloat16_are_compared_in_float32():
    titan, quadro = "NVIDIA TITAN RTX", "Quadro P4000"
    found, counted = find_stage_devices(Pipeline(), [islands(titan, quadro)])
    assert [each.flops_per_second for each in found] == [16.3e12, 5.3e12]
    assert counted == "by the peak rates of their devices"
    found, counted = find_stage_devices(Pipeline(), [islands(titan, FAST)])
    assert [each.flops_per_second for each in found] == [16.3e12, 67e12]
    # the one has no rate in bfloat16 in the table, the other none in float32
    assert "speed of NVIDIA TITAN RTX is" in find_stage_devices(Pipeline(), [islands(titan, "TPU v4")])[1]


def test_where_a_device_is_not_known_the_number_counts_or_what_is_given():
    mixed = [[*islands(FAST, number=2), *islands("cpu")]]
    found, counted = find_stage_devices(Pipeline(), mixed)
    assert [each.flops_per_second for each in found] == [2, 1]
    assert found[1].memory_bytes == math.inf
    assert counted == "by the number of devices, as the speed of cpu is not known"
    given = Pipeline(stage_speeds="1,0.5", stage_memory="80,0.5")
    found, counted = find_stage_devices(given, mixed)
    assert [each.flops_per_second for each in found] == [1e12, 0.5e12]
    assert [each.memory_bytes for each in found] == [80e9, 0.5e9]
    assert find_stage_devices(Pipeline(stage_memory="unlimited"), mixed)[0][0].memory_bytes == math.inf
    with pytest.raises(ValueError) as error:
        find_stage_devices(Pipeline(stage_memory="1", link_speed=3.0), mixed)
    assert str(error.value) == (
        "2 stages cannot be cut by time:\n"
        "  - stage_memory has 1 numbers, and there are 2 stages; give one each\n"
        "  - link_speed is 3.0, and the speed of cpu is not known; give stage_speeds in teraflops a second"
    )


def test_measured_speeds_are_those_of_the_islands():
    measured = [[StageIslandDevices("cpu", 2, 1, 1, 3e9), StageIslandDevices("cpu", 1, 1, 1, 4e9)]]
    found, counted = find_stage_devices(Pipeline(stage_speeds="measured", link_speed=1.0), measured)
    assert [each.flops_per_second for each in found] == [6e9, 4e9]
    assert counted == "by the measured speed of their devices"
    with pytest.raises(ValueError, match="stage_speeds is 'measured', and no islands are there"):
        find_stage_devices(Pipeline(stage_speeds="measured"), [islands(FAST, SLOW)])


@pytest.mark.full
def test_the_costliest_block_is_timed():
    """Its flops forward and backward over the mean time of its runs."""
    config = ResNetConfig(depth=11, filters=4, num_groups=2, height=8, width=8, colours=1, classes=10)
    batch = {
        "image": np.zeros((2, 8, 8, 1), np.float32),
        "label": np.zeros(2, np.int32),
        "weights": np.ones(2, np.float32),
    }
    traced = ChainTrace(from_nnx(config), classification_loss, batch)
    flops = 3 * max(traced.costs("flops").blocks)
    # five runs that take long, and as many as a second needs of those that do not
    for seconds, runs in ((2.0, 5), (0.125, 8)):
        times = iter([seconds * i for i in range(runs + 1)])
        assert flops_per_second(traced, lambda times=times: next(times)) == flops / seconds
        assert not list(times)


def test_words_that_are_for_all_pipelines():
    for speeds in ("measured;4,1", "measured;measured"):
        with pytest.raises(ValueError, match="give 'measured' alone, which measures the islands of all"):
            Pipeline(stage_speeds=speeds)
    with pytest.raises(ValueError, match="give 'time' alone, which cuts each pipeline for its own islands"):
        parse_cuts("time;3,1")


@pytest.mark.parametrize(
    ("state_bytes", "beside"),
    [
        (1.0, "predicted 1.49 times as fast as the equal cut 2,2"),
        (3e9, "the equal cut 2,2 does not fit the memory"),
    ],
)
def test_a_cut_is_compared_with_the_equal_cut_if_that_fits(state_bytes, beside):
    block = BlockCost(forward_flops=1, backward_flops=2, state_bytes=state_bytes)
    devices = [
        StageDevices(flops_per_second=3, memory_bytes=9e9),
        StageDevices(flops_per_second=1, memory_bytes=3e9),
    ]
    table = make_table("1f1b", 2, 8)
    costs = StageCosts(model=ModelCosts(blocks=[block] * 4), devices=devices, table=table)
    found = best_cut(costs)
    assert found.counts == (3, 1)
    assert cut_text(costs, found, "by hand").endswith(f"; {beside}")


def test_blocks_that_are_sharded_inside_an_island_have_no_owners():
    layout = Layout(mesh={"fsdp": 2}, parameters={"layers": ("fsdp",)})
    devices = jax.devices()[:2]
    told = "the dim 'layers' is sharded over ['fsdp']; use the rule layers = [], or one cut for all"
    assert find_sharded_block_problems(layout, make_mesh(layout, devices)) == [told]
    plain = Layout(mesh={"fsdp": 2})
    assert find_sharded_block_problems(plain, make_mesh(plain, devices)) == []


def test_what_a_layout_shards():
    layout = Layout(mesh={"data": -1, "fsdp": 2, "tensor": 2}, zero=3)
    assert describe_island_devices(layout, "cpu", 8) == StageIslandDevices("cpu", 8, 4, 4)
    assert describe_island_devices(Layout(mesh={"fsdp": 2}, zero=1), "cpu", 2) == StageIslandDevices(
        "cpu", 2, 1, 2
    )


def test_costs_of_a_model_by_hand():
    embed, mlp, vocab, seq, rows = 8, 16, 256, 8, 2
    batch = {"tokens": np.zeros((rows, seq + 1), np.int32), "weights": np.ones(rows, np.float32)}
    traced = ChainTrace(from_nnx(TinyConfig(num_layers=3)), next_token_loss, batch)
    costs = model_costs(traced, optax.sgd(0.1, momentum=0.9).init)
    assert len(costs.blocks) == 3
    block = costs.blocks[0]
    # parameters, momentum and gradients in float32
    assert block.state_bytes == 12 * 2 * embed * mlp
    assert block.output_bytes == rows * seq * embed * 4 == costs.first.output_bytes
    products = 2 * rows * seq * 2 * embed * mlp
    assert products < block.forward_flops < 2 * products
    assert block.backward_flops == 2 * block.forward_flops
    # its input and hidden features at least, and no parameter
    assert rows * seq * (embed + mlp) * 4 <= block.saved_bytes <= 8 * rows * seq * (embed + mlp) * 4
    assert costs.first.state_bytes >= 12 * vocab * embed
    # the table is lent to the head: its values and its gradient
    assert 8 * vocab * embed <= costs.last.state_bytes < 12 * vocab * embed
