"""Delta simulation of a task graph against simulating it anew, after changes of different size.

uv run python benchmarks/simulator.py [--stages 8] [--microbatches 32] [--blocks 64] [--repeats 40]

The first graph: a step of a pipeline with gathered weights and sums of gradients that overlap. Then random
graphs, of which one task at a time changes. Anew: the graph is checked, sorted and simulated.
Both give the same timeline, which is compared each time. Figures:
docs/benchmarks/simulator.md.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from shardtrain.plan.prediction import Choice
from shardtrain.plan.simulator.delta import DeltaSimulation
from shardtrain.plan.simulator.step_graph import step_graph
from shardtrain.plan.simulator.task_graph import Task, TaskGraph
from shardtrain.plan.simulator.timeline import timeline
from shardtrain.plan.step_collectives import (
    BETWEEN,
    GRADIENT,
    INSIDE,
    MICROBATCH,
    MICROBATCH_GRADIENT,
    Collective,
)
from shardtrain.plan.step_times import StepTimes
from shardtrain.sharding.layout import Layout


def graph_of(num_stages: int, num_microbatches: int, num_blocks: int) -> TaskGraph:
    """A step of a pipeline over fsdp and data, about as long as that of a model of 7 billion parameters."""
    mesh = {"pipeline": num_stages, "data": 4, "fsdp": 8}
    times = StepTimes(
        num_stages=num_stages,
        choice=Choice(layout=Layout(mesh=mesh), accumulate=num_microbatches),
        num_blocks=num_blocks,
        forward=0.02,
        backward=0.04,
        ends=0.01,
        hop=0.0005,
        collectives=(
            Collective(ALL_GATHER, ("fsdp",), MICROBATCH, 0.2, 0.01, INSIDE),
            Collective(REDUCE_SCATTER, ("fsdp",), MICROBATCH_GRADIENT, 0.2, 0.01, INSIDE),
            Collective(ALL_REDUCE, ("data",), GRADIENT, 0.3, 0.001, BETWEEN, of_blocks=0.9),
        ),
        update=0.01,
    )
    return step_graph(times, overlap=True)


def random_graph(num_queues: int, reach: int, most_needs: int) -> TaskGraph:
    """A graph of 10,000 tasks on so many queues; each needs some of so many before it."""
    rng = random.Random(0)
    tasks = []
    for i in range(10_000):
        others = (
            {(rng.randrange(max(0, i - reach), i),) for _ in range(rng.randint(0, most_needs))} if i else ()
        )
        queue = f"queue {rng.randrange(num_queues)}"
        tasks.append(Task((i,), "task", "forward", queue, rng.random(), tuple(others)))
    return TaskGraph(tasks)


def operator(graph: TaskGraph, task: Task) -> list[Task]:
    """All tasks of the same block and kind, in all microbatches."""
    return [each for each in graph if each.name.split(", microb")[0] == task.name.split(", microb")[0]]


def measured(
    graph: TaskGraph, chosen: Callable[[Task], Sequence[Task]], tasks: Sequence[Task]
) -> tuple[float, float, float, float, float]:
    """Median seconds anew and by delta, the ratio of the means, the median ratio, tasks placed again."""
    simulation = DeltaSimulation(graph)
    anew, by_delta, placed = [], [], []
    for task in tasks:
        new = {each.key: replace(each, seconds=0.7 * each.seconds) for each in chosen(task)}
        changed: list[Task] = [new.get(key, each) for key, each in graph.by_key.items()]
        begin = time.perf_counter()
        full = timeline(TaskGraph(changed))
        anew.append(time.perf_counter() - begin)
        before = simulation.num_simulated
        begin = time.perf_counter()
        simulation.change(put=new.values())
        by_delta.append(time.perf_counter() - begin)
        placed.append(simulation.num_simulated - before)
        assert simulation.timeline == full
        simulation.undo()
    ratio = statistics.mean(anew) / statistics.mean(by_delta)
    of_each = statistics.median(a / b for a, b in zip(anew, by_delta, strict=True))
    return statistics.median(anew), statistics.median(by_delta), ratio, of_each, statistics.median(placed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (("stages", 8), ("microbatches", 32), ("blocks", 64), ("repeats", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    graph = graph_of(options.stages, options.microbatches, options.blocks)
    rng = random.Random(0)

    def some(kinds: Sequence[str]) -> list[Task]:
        """Some tasks of these kinds, always the same."""
        return rng.choices([task for task in graph if task.kind in kinds], k=options.repeats)

    print(f"{len(graph.by_key)} tasks\n")
    print(
        "| change | anew, ms | delta, ms | ratio of means | ratio of a median change | tasks placed again |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    cases: dict[str, tuple[Callable[[Task], Sequence[Task]], Sequence[str]]] = {
        "a collective": (lambda task: [task], ("collective",)),
        "a block of one microbatch": (lambda task: [task], ("forward", "backward")),
        "a block, in all microbatches": (lambda task: operator(graph, task), ("forward", "backward")),
        "the optimizer of a stage": (lambda task: [task], ("update",)),
    }
    for name, (chosen, kinds) in cases.items():
        print(row(name, measured(graph, chosen, some(kinds))))
    for queues, reach, needs in ((8, 200, 3), (64, 200, 3), (64, 2000, 3), (8, 2000, 1), (64, 2000, 1)):
        graph = random_graph(queues, reach, needs)
        tasks = rng.choices(list(graph), k=options.repeats)
        name = f"random: {queues} queues, up to {needs} needs of {reach} tasks before"
        print(row(name, measured(graph, lambda task: [task], tasks)))


def row(name: str, figures: tuple[float, float, float, float, float]) -> str:
    """A row of the table."""
    anew, by_delta, ratio, of_each, placed = figures
    return (
        f"| {name} | {1e3 * anew:.1f} | {1e3 * by_delta:.2f} | {ratio:.1f} | {of_each:.1f} | {placed:.0f} |"
    )


if __name__ == "__main__":
    main()
