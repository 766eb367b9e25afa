"""Plans for GPUs: the model's own choice of attention, passes over memory, the form for one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import planned_steps
import pytest
from fine_tuning import Numbers, run_of
from flax.linen.spmd import with_logical_constraint
from tiny_language_model import TinyConfig

from shardtrain import cli
from shardtrain.axes import EMBED, LAYERS, MLP
from shardtrain.cli import calibrate
from shardtrain.functional.nnx_model import convert_model
from shardtrain.islands.cluster import IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.models.attention import ATTENTIONS, LONG
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.device_calls import BlocksCall, FlashCall, counts_flash
from shardtrain.plan.devices import find_device
from shardtrain.plan.live_arrays import Trip, sort_for_gpus
from shardtrain.plan.machine import make_machine
from shardtrain.plan.operators.search import trace_whole_step
from shardtrain.plan.predict import find_sharding, predict_choices
from shardtrain.plan.program import CallSizes, Kernel, Sharding
from shardtrain.plan.program_cost import Durations, compute_costs
from shardtrain.plan.space import Choice
from shardtrain.plan.trace import Target, trace
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.planned import make_subjects

H100, V100, L4 = "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-16GB", "NVIDIA L4"
ROWS, SEQ, HEADS, HEAD_DIM = 4, 256, 2, 16
CONFIG = DecoderConfig(
    vocab=64, seq=SEQ, embed=HEADS * HEAD_DIM, num_layers=2, num_heads=HEADS, mlp=64, dtype="bfloat16"
)
WHOLE = Sharding((), (), ())


def subject_of(kind=H100, *, one_device=True, has_flash=True, **options):
    model, target = convert_model(replace(CONFIG, **options)), Target(kind, one_device, has_flash)
    return planned_steps.subject_of(CONFIG, ROWS, model=lambda _: model, target=target)


def has_scores(program):
    """Whether a program has an array in memory with a number for each query and key."""
    in_memory = {i for kernel in program.kernels for i in (*kernel.reads, *kernel.writes)}
    return any(program.arrays[i].shape.count(SEQ) > 1 for i in in_memory) or any(
        has_scores(kernel.body) for kernel in program.kernels if kernel.body is not None
    )


def calls(program):
    inside = [call for kernel in program.kernels if kernel.body for call in calls(kernel.body)]
    return [*inside, *(kernel.call for kernel in program.kernels if kernel.call)]


CHOICES = [
    ({}, False),
    ({"kind": V100}, True),
    ({"soft_cap": 30.0}, True),
    ({"remat": "full"}, False),
    ({"window": 32}, False),
]


@pytest.mark.parametrize(("subject", "scores"), CHOICES, ids=str)
def test_a_plan_has_the_attention_that_the_model_chooses(subject, scores):
    program = subject_of(**subject).program(None)
    assert has_scores(program) == scores
    assert all(isinstance(call, FlashCall) for call in calls(program))
    assert counts_flash(program) == (not scores)
    # computed again where all is
    backward = [call.backward for call in calls(program)]
    number = 0 if scores else 1 + (subject.get("remat") == "full")
    assert (backward.count(False), backward.count(True)) == (number, min(number, 1))


def test_attention_in_blocks_is_one_call_without_scores():
    program = subject_of(V100, attention="blockwise", soft_cap=30.0).program(None)
    assert not has_scores(program)
    assert [(type(call), call.backward) for call in calls(program)] == [
        (BlocksCall, False),
        (BlocksCall, True),
    ]


def test_sequences_are_long_or_short_for_the_planned_devices(monkeypatch):
    monkeypatch.setitem(LONG, "cpu", SEQ)
    found = {kind: has_scores(subject_of(kind).program(None)) for kind in ("cpu", V100, "TPU v4")}
    assert found == {"cpu": False, V100: True, "TPU v4": True}


def test_the_choice_is_that_of_the_models_own_function(monkeypatch):
    seen = []

    def find_obstacles(q, k, options, devices):
        capability = getattr(devices[0], "compute_capability", "")
        seen.append((q.dtype.name, q.shape[-1], devices[0].device_kind, capability))
        return ["no planner"]

    monkeypatch.setitem(ATTENTIONS, "cudnn", ATTENTIONS["cudnn"]._replace(find_obstacles=find_obstacles))
    assert has_scores(subject_of().program(None))
    # shapes alone are found without a target before
    assert {each for each in seen if each[2] != "cpu"} == {("bfloat16", HEAD_DIM, H100, "9.0")}


def test_flash_attention_takes_less_memory_and_time_and_its_flops_are_those_of_the_model():
    machine = make_machine(ClusterDevice(name=H100), 1, in_float32=False)
    flash, xla = (
        predict_choices(subject_of(has_flash=has_flash), machine, 1, [Choice(layout=Layout())])[0]
        for has_flash in (True, False)
    )
    scores = ROWS * HEADS * SEQ * SEQ * 4
    assert flash.memory.total < xla.memory.total - scores
    assert flash.seconds.total < xla.seconds.total
    assert flash.flops == xla.flops


def test_devices_that_split_heads_split_flash_attention():
    subject = subject_of(one_device=False)
    program = subject.program(None)

    def found(tensor):
        layout, sizes = Layout(mesh={"tensor": tensor}), axis_sizes({"tensor": tensor}, tensor)
        completed = subject.state(Choice(layout=layout), tensor).layout
        sharding = find_sharding(completed, sizes, 1)
        return compute_costs(program, [sharding], Durations(lambda flops, moved: flops))[0]

    assert found(2).seconds == pytest.approx(found(1).seconds / 2)


def test_flash_attention_costs_what_queries_see():
    call = FlashCall(
        queries=8, keys=8, head_dim=64, item_bytes=2, causal=False, window=None, softmax_features=128.0
    )
    sizes = CallSizes([np.array([8 * 64 * 2])] * 3, [], lambda axis: 1, True)
    product = 2 * 8 * 8 * 64

    def cost(**changes):
        return call._replace(**changes).cost(sizes)

    # two products, which take three times as long with heads of 64 features
    assert (cost().flops, cost().timed_flops) == (2 * product, 3 * 2 * product)
    assert cost().temporary_bytes == 0
    # the backward computes the scores again, which is no flop of the model, and adds up in float32
    assert (cost(backward=True).flops, cost(backward=True).timed_flops) == (4 * product, 3 * 5 * product)
    assert cost(backward=True).temporary_bytes == 8 * 64 * 4
    # 1 + 2 + ... + 8 of 64 pairs; with a window 1 + 2 + 6 x 2 and 1 + 2 + 3 + 5 x 3
    assert cost(causal=True).timed_flops == 6 * product * 36 / 64
    assert cost(causal=True, window=2).timed_flops == 6 * product * 15 / 64
    assert cost(causal=True, window=100).timed_flops == 6 * product * 36 / 64
    assert cost(causal=True).flops == 2 * product


def test_operators_of_a_plan_have_the_flops_of_flash_attention():
    subject = subject_of(one_device=False)
    graph = trace_whole_step(subject, 2, None)
    work = [part.amount for each in graph.operators if "device_call" in each.name for part, *_ in each.work]
    # 2 products forward and 5 back of all pairs that are seen, for heads of 16 features and 128 more
    pairs = ROWS * HEADS * SEQ * (SEQ + 1) / 2
    assert sum(work) == pytest.approx(7 * 2 * pairs * (HEAD_DIM + 128))


def passes(function, shapes, kind=H100):
    """Bytes that the kernels of a function read and write."""
    inputs = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
    names = [None] * len(inputs)
    results = len(jax.tree.leaves(jax.eval_shape(function, *inputs)))
    program = trace(function, inputs, names, [None] * results, [False] * results, target=Target(kind))
    return compute_costs(program, [WHOLE], Durations(lambda flops, moved: moved))[0].seconds


X = ((64, 64), jnp.float32)
ALL, DIM = 64 * 64 * 4, 64 * 4


def test_on_gpus_sums_share_the_pass_of_what_reads_the_same_array():
    def sums_beside_a_chain(x, y):
        return x.sum(0), (x + y).astype(jnp.float32), (x * y).sum(1)

    assert passes(sums_beside_a_chain, [X, X], "any") == 6 * ALL + 2 * DIM
    assert passes(sums_beside_a_chain, [X, X]) == 3 * ALL + 2 * DIM

    # what waits for a sum reads the array once more; a sum of what a chain writes does not
    def normed(x):
        y = x / x.sum(-1, keepdims=True)
        return y, y.sum(0)

    assert passes(normed, [X], "any") == 4 * ALL + 3 * DIM
    assert passes(normed, [X]) == 3 * ALL + 3 * DIM


def test_on_gpus_a_product_shares_no_pass():
    def product_and_sum(x):
        y = x @ x
        return y, y.sum()

    assert passes(product_and_sum, [X]) == passes(product_and_sum, [X], "any") == 3 * ALL + 4


def test_on_gpus_elementwise_results_are_computed_twice_rather_than_written():
    def twice(x, y):
        hidden = jnp.exp(x)
        return (hidden * y) @ y, (hidden + y) @ y

    # x is read by both chains, in the place of one pass that reads it and writes what both read
    assert passes(twice, [X, X], "any") - passes(twice, [X, X]) == 2 * ALL


def test_on_gpus_a_lookup_reads_its_rows():
    rows = ((8,), jnp.int32)

    def looked_up(table, indices):
        return jnp.take(table.astype(jnp.float32), indices, axis=0, mode="clip")

    small = ((64, 64), jnp.bfloat16)
    # the table is not converted first; indices are read, rows are read and written
    of_gpu, of_any = (passes(looked_up, [small, rows], kind) for kind in (H100, "any"))
    assert of_gpu < 2 * 8 * 64 * 4 + 200
    assert of_any > ALL

    def looked_up_where_it_is_sent(table, indices):
        made = with_logical_constraint(jnp.sin(table), (EMBED, None))
        return jnp.take(with_logical_constraint(made, (MLP, None)), indices, axis=0, mode="clip")

    # on one device nothing is sent, and the rows are those of the array before
    assert passes(looked_up_where_it_is_sent, [X, rows]) < 2 * ALL + 2 * 8 * 64 * 4 + 200


def kernel(reads, writes, name="dot_general", call=None):
    return Kernel(name=name, reads=reads, writes=writes, call=call)


def test_on_gpus_a_trip_runs_what_the_next_one_needs_first_and_each_product_when_it_is_needed():
    call = FlashCall(
        queries=8, keys=8, head_dim=8, item_bytes=2, causal=False, window=None, softmax_features=0
    )
    gradient, early, late = kernel((0,), (1,)), kernel((0,), (2,)), kernel((0,), (3,))
    carried = kernel((3, 2), (4,))
    trip = Trip(carried=[4], parts=[], is_loop=np.array([True]))
    assert sort_for_gpus([gradient, early, late, carried], trip) == [2, 1, 3, 0]
    # what devices compute by hand, such as what they send, keeps its place
    called = kernel((2,), (5,), "device_call", call)
    assert sort_for_gpus([gradient, early, called, late, carried], trip) == [1, 2, 3, 4, 0]
    # a result that is carried as it came needs no kernel
    assert sort_for_gpus([gradient], trip._replace(carried=[0])) == [0]


def test_on_gpus_sums_that_nothing_needs_come_last_outside_of_loops():
    kernels = [kernel((0,), (1,)), kernel((0,), (2,), "reduce_sum"), kernel((0,), (3,), "reduce_sum")]
    assert sort_for_gpus([*kernels, kernel((3,), (4,))], None) == [0, 2, 3, 1]


def peak(function, shapes, names, kind=H100, stored=()):
    """The most bytes of a traced function; devices have halves of the dims of weights that are named."""
    inputs = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    program = trace(function, inputs, names, [None], [False], target=Target(kind))
    sharding = Sharding((), tuple((dim, ("fsdp",)) for dim in stored), (("fsdp", 2),))
    return compute_costs(program, [sharding], Durations(lambda flops, moved: flops))[0].peak_bytes


BLOCKS = [(64, 64), (4, 64, 64)]
NAMES = [("batch", None), (LAYERS, EMBED, MLP)]


def test_on_gpus_a_trip_copies_the_parts_of_stacked_arrays_that_products_or_several_kernels_read():
    def products(x, ws, unroll=1):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, ws, unroll=unroll)[0]

    def elementwise(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sin(x + w) @ x, None), x, ws)[0]

    def twice(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.cos(jnp.sin(x + w) @ x + w) @ x, None), x, ws)[0]

    def copied(function, shapes=BLOCKS):
        return peak(function, shapes, NAMES) - peak(function, shapes, NAMES, "any")

    assert (copied(products), copied(elementwise), copied(twice)) == (ALL, 0, ALL)
    # plain code and a loop of one trip use it where it is
    assert copied(lambda x, ws: products(x, ws, unroll=4)) == 0
    assert copied(products, [(64, 64), (1, 64, 64)]) == 0


def test_on_gpus_gathered_weights_live_while_they_are_read_and_some_are_transposed():
    def product(x, w):
        return jnp.sin(x @ w) @ x

    weights = [("batch", None), (EMBED, MLP)]
    # x @ w beside the gathered w, or what is made of it beside the result
    assert peak(product, [(64, 64)] * 2, weights, stored=[EMBED]) == 2 * ALL
    assert peak(lambda x, w: x @ w, [(64, 64)] * 2, weights, stored=[EMBED]) == 2 * ALL
    assert peak(lambda x, w: x @ w, [(64, 64)] * 2, weights) == ALL

    def blocks(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ x + w) @ x, None), x, ws)[0]

    def gathered(dim):
        return peak(blocks, BLOCKS, NAMES, stored=[dim]) - peak(blocks, BLOCKS, NAMES)

    # a trip's, and for blocks that are gathered along their second dim a copy of all that is stored
    assert gathered(EMBED) == ALL
    assert gathered(MLP) == ALL + 4 * ALL / 2

    def figures(kind):
        choice = Choice(layout=Layout(mesh={"fsdp": 2}))
        return subject_of(kind, one_device=False).state(choice, 2).figures

    # other programs have them all the time
    assert figures(H100).gathered == 0 < figures("any").gathered


def test_one_gpu_is_planned_for_in_the_form_for_one():
    run = run_of(TinyConfig(num_layers=2))
    kinds = [
        IslandKind(kind=str(i), devices=number, device=ClusterDevice(name=name, teraflops=1.0))
        for i, (name, number) in enumerate(((H100, 1), (H100, 2), (None, 1)))
    ]
    targets = [subject.target for subject in make_subjects(run, Numbers(), kinds)]
    assert targets == [Target(H100, one_device=True), Target(H100), Target()]

    def lookups(one_device):
        program = subject_of(one_device=one_device).program(None)
        return sum(kernel.name == "gather" for kernel in program.kernels)

    # the targets' logits, beside the tokens
    assert (lookups(True), lookups(False)) == (2, 1)


def test_rates_are_those_of_the_device_and_a_cluster_file_may_say_others():
    known = find_device(H100)
    assert known is not None
    rates = make_machine(ClusterDevice(name=H100), 1, in_float32=False).rates
    assert rates.flops_per_second == known.reached.products * 989.5e12
    assert rates.memory_bytes_per_second == known.reached.memory * 3.35e12
    assert rates.kernel_seconds == known.reached.kernel_seconds
    # in float32 nothing was measured
    assert make_machine(ClusterDevice(name=H100), 1, in_float32=True).rates.flops_per_second == 33.5e12
    measured = ClusterDevice(name=H100, teraflops=700.0, memory_gb_per_second=3000.0, kernel_us=4.0)
    rates = make_machine(measured, 1, in_float32=False).rates
    assert (rates.flops_per_second, rates.memory_bytes_per_second) == (700e12, 3e12)
    assert rates.kernel_seconds == pytest.approx(4e-6)
    assert make_machine(ClusterDevice(teraflops=1.0), 1, in_float32=False).rates.kernel_seconds == 5e-6


def test_calibrate_names_a_known_device(capsys, monkeypatch):
    monkeypatch.setattr(
        calibrate,
        "measure_machine",
        lambda dtype: make_machine(ClusterDevice(name=H100), 1, in_float32=False),
    )
    assert cli.main(["calibrate"]) == 0
    assert "name = " not in capsys.readouterr().out
    monkeypatch.setattr(calibrate, "find_device", lambda kind: find_device(H100))
    assert cli.main(["calibrate"]) == 0
    assert '[islands.device]\nname = "cpu"\nteraflops = ' in capsys.readouterr().out
