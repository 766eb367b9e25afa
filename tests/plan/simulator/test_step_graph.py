"""The task graph of a strategy: schedule and seconds as predicted, and what overlap gives."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from planned_steps import NODES as MACHINE
from planned_steps import subject_of

from shardtrain.models.decoder import DecoderConfig
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.simulate import simulate
from shardtrain.plan.machine import BETWEEN
from shardtrain.plan.predict import predict_choices, steps
from shardtrain.plan.prediction import Choice
from shardtrain.plan.simulator.step_graph import make_step_graph
from shardtrain.plan.step_collectives import GRADIENT, Collective
from shardtrain.plan.step_times import StepTimes, compute_step_times
from shardtrain.report.step_trace import TracedStep, trace_text
from shardtrain.sharding.layout import Layout

STRATEGIES = [
    Choice(layout=Layout(mesh={"data": 6}), accumulate=2, remat="none"),
    Choice(layout=Layout(mesh={"fsdp": 2, "tensor": 2, "data": 2}), remat="weights"),
    Choice(layout=Layout(mesh={"fsdp": 4, "tensor": 2}, zero=1), accumulate=2, remat="none"),
    Choice(layout=Layout(mesh={"tensor": 4}, sequence_sharded=True), remat="none"),
    Choice(layout=Layout(mesh={"data": 3}), remat="none"),
    Choice(layout=Layout(mesh={"pipeline": 3, "data": 2}), accumulate=4, remat="none"),
    Choice(layout=Layout(mesh={"pipeline": 2, "tensor": 2}), accumulate=2, schedule="zero_bubble"),
    Choice(
        layout=Layout(mesh={"pipeline": 3, "fsdp": 2}), accumulate=3, schedule="interleaved", virtual_stages=2
    ),
    Choice(layout=Layout(mesh={"data": 1}), remat="none"),
]  # fmt: skip


@pytest.fixture(scope="module")
def subject():
    return subject_of(DecoderConfig(vocab=64, seq=64, embed=32, num_layers=6, num_heads=4, mlp=128), rows=24)


@pytest.mark.parametrize("choice", STRATEGIES, ids=lambda choice: str(dict(choice.layout.mesh)))
def test_without_overlap_a_step_takes_what_is_predicted(subject, choice):
    num_devices = math.prod(choice.layout.mesh.values())
    (predicted,) = predict_choices(subject, MACHINE, num_devices, [choice])
    (step,) = steps(subject, MACHINE, num_devices, [choice])
    times = compute_step_times(step, MACHINE)
    graph, beside = make_step_graph(times), make_step_graph(times, overlap=True)
    assert graph.timeline.makespan == pytest.approx(predicted.seconds.total, rel=1e-12)
    of_optimizer = [task.seconds for task in graph if task.kind == "update"]
    assert of_optimizer == [predicted.seconds.update] * times.num_stages
    # sums of gradients beside computations take no longer, but for the latency of more messages
    latency = sum(each.latency_seconds for each in times.collectives if each.phase == GRADIENT)
    assert beside.timeline.makespan <= graph.timeline.makespan + latency * times.num_blocks
    if "tensor" not in choice.layout.mesh and "pipeline" not in choice.layout.mesh and num_devices > 1:
        assert beside.timeline.makespan < graph.timeline.makespan


def of_stages(schedule="1f1b", **others):
    """Four stages of two blocks each."""
    sizes = {"num_stages": 4, "num_blocks": 8, "forward": 1.0, "backward": 1.5, "ends": 0.5, "hop": 0.25}
    choice = Choice(layout=Layout(mesh={"pipeline": 4}), accumulate=6, schedule=schedule)
    return StepTimes(**({**sizes, "choice": choice, "collectives": (), "update": 0.125} | others))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_the_tasks_run_as_the_schedule_is_simulated(schedule):
    times = of_stages(schedule)
    table = make_table(schedule, 4, 6, lockstep=True)
    # in every tick each stage sends both ways, whatever its tasks are
    sent = table.num_ticks * 2 * times.hop
    simulated = simulate(table, times.task)
    graph = make_step_graph(times)
    found = graph.timeline
    assert found.makespan == simulated.makespan + sent + times.update
    for stage in range(4):
        # the blocks of each of the schedule's tasks, one after the other
        begins = [found.start[task.key] for task in graph if task.queue == f"stage {stage}: compute"]
        wanted = [simulated.start[task] + task.tick * 2 * times.hop for task in table.order(stage)]
        assert set(wanted) <= set(begins)
        assert len(begins) >= 2 * len(wanted) + 1


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)])
def test_a_task_of_a_pipeline_takes_what_its_part_runs(schedule, chunks):
    choice = Choice(
        layout=Layout(mesh={"pipeline": 4}), accumulate=8, schedule=schedule, virtual_stages=chunks
    )
    times = of_stages(choice=choice, again=2.0, first=0.125, first_backward=0.25, tick=0.0625)
    last = chunks - 1
    # the last part has no forward; the first looks up and adds rows, the last has the loss
    assert times.task(0, 0, "forward") == 1.0 + 0.125
    assert times.task(1, 0, "forward") == 1.0
    assert times.task(3, last, "forward") == 0.0
    kinds = len(times.table.kinds) - 1
    assert times.task(1, 0, "backward") == 2.0 + 1.5 / kinds
    assert times.task(0, 0, "backward") == 2.0 + 1.5 / kinds + 0.25
    assert times.task(3, last, "backward") == 2.0 + 1.5 / kinds + 0.5
    # all stages together, in 8 microbatches; and the slots of each tick
    parts = 4 * chunks
    of_all = 8 * (parts - 1 + 0.125 + parts * (kinds * 2.0 + 1.5) + 0.25 + 0.5)
    assert times.compute == pytest.approx(of_all / 4 + times.table.num_ticks * 0.0625)
    assert times.hops == 2 * 0.25
    assert make_step_graph(times).timeline.makespan == pytest.approx(
        simulate(times.table, times.task).makespan + times.table.num_ticks * (0.5 + 0.0625) + times.update
    )


def test_a_sum_of_gradients_runs_beside_the_backward_of_the_blocks_before():
    # of 8 blocks in 1 s each backward, sums of 0.5 s each: all but the last run beside the next backward
    sums = Collective("all-reduce", ("data",), GRADIENT, 4.0, 0.0, BETWEEN, of_blocks=1.0)
    times = of_stages(
        num_stages=1,
        choice=Choice(layout=Layout(mesh={"data": 2})),
        forward=4.0,
        backward=8.0,
        ends=0.0,
        collectives=(sums,),
        update=0.0,
    )
    assert make_step_graph(times).timeline.makespan == 16.0
    assert make_step_graph(times, overlap=True).timeline.makespan == 12.5
    # sums that take longer than the backward of a block wait for each other
    slow = replace(times, collectives=(sums._replace(sent_seconds=16.0),))
    assert make_step_graph(slow, overlap=True).timeline.makespan == 4.0 + 1.0 + 16.0


def test_a_model_without_blocks_is_one_task_for_each_microbatch():
    choice = Choice(layout=Layout(mesh={"data": 2}), accumulate=3)
    times = of_stages(num_stages=1, choice=choice, num_blocks=1, forward=0.0, backward=0.0, ends=2.0)
    graph = make_step_graph(times)
    assert [task.name for task in graph] == [
        *(f"forward and backward, microbatch {number}" for number in range(3)),
        "optimizer",
    ]
    assert graph.timeline.makespan == 6.125


def test_a_trace_has_a_row_for_each_queue_without_overlap():
    sums = Collective("all-reduce", ("data",), GRADIENT, 4.0, 0.0, BETWEEN, of_blocks=0.5)
    graph = make_step_graph(of_stages(collectives=(sums,)), overlap=True)
    found = graph.timeline
    events = json.loads(trace_text([TracedStep("a step", graph)]))["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"stage 0: compute", "stage 3: link between nodes", "link between stages"} <= set(rows.values())
    tasks = [event for event in events if event["ph"] == "X"]
    assert len(tasks) == sum(task.seconds > 0 for task in graph)
    assert max(event["ts"] + event["dur"] for event in tasks) == pytest.approx(1e6 * found.makespan)
    for row in rows:
        own = sorted((event["ts"], event["dur"]) for event in tasks if event["tid"] == row)
        assert all(a + length <= b + 1e-6 for (a, length), (b, _) in pairwise(own))
