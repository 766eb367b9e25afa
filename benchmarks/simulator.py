"""Delta simulation of a task graph against simulating it anew, after changes of different size.

uv run python benchmarks/simulator.py [graphs] [search] [--stages 8] [--microbatches 32] [--blocks 64]
    [--repeats 40] [--proposals 2000]

graphs: a step of a pipeline with gathered weights and sums of gradients that overlap, then random graphs, of
which one task at a time changes. Anew: the graph is checked, sorted and simulated; full: a graph that is
known to be one is simulated. All give the same timeline, which is compared each time. search: proposals a
second of the search over the operators of a decoder with 24 blocks on 16 devices, by delta and by full
simulation; both find the same. Figures: docs/benchmarks/simulator.md.
"""

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from planner import A100_NODES
from shardtrain.plan.operator_plan import graph_of as graph_of_operators
from shardtrain.plan.operator_plan import sharded_by_rules
from shardtrain.plan.simulator.delta import DeltaSimulation
from shardtrain.plan.simulator.markov_chain import ShardedStep, search_shardings
from shardtrain.plan.simulator.placed_task import placed_tasks, simulate
from shardtrain.plan.simulator.timeline import timeline

from shardtrain import next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.functional.remat import with_remat
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.hlo.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from shardtrain.plan.prediction import Choice
from shardtrain.plan.simulator import markov_chain
from shardtrain.plan.simulator.step_graph import step_graph
from shardtrain.plan.simulator.task_graph import Key, Task, TaskGraph
from shardtrain.plan.step_collectives import (
    BETWEEN,
    GRADIENT,
    INSIDE,
    MICROBATCH,
    MICROBATCH_GRADIENT,
    Collective,
)
from shardtrain.plan.step_times import StepTimes
from shardtrain.plan.subject import Subject
from shardtrain.sharding.axis_sizes import axis_sizes
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


class Measured(NamedTuple):
    """Figures of a row, over all changes.

    Args:
      anew, full, delta: mean seconds; anew: the graph is made, checked and simulated; full: simulated alone.
      median: the ratio anew / delta of a median change.
      placed: mean part of the tasks that delta placed again.
      moved: mean part of the tasks with another start or end.
    """

    anew: float
    full: float
    delta: float
    median: float
    placed: float
    moved: float


def measured(graph: TaskGraph, chosen: Callable[[Task], Sequence[Task]], tasks: Sequence[Task]) -> Measured:
    """Change a graph in several ways, each time from the same start."""
    simulation = DeltaSimulation(graph)
    original, num_tasks = simulation.timeline, len(graph.by_key)
    rows = []
    # what is thrown away here is collected between the changes, and in the time of none
    gc.disable()
    for task in tasks:
        new = {each.key: replace(each, seconds=0.7 * each.seconds) for each in chosen(task)}
        changed: list[Task] = [new.get(key, each) for key, each in graph.by_key.items()]
        begin = time.process_time()
        anew = timeline(TaskGraph(changed))
        of_anew = time.process_time() - begin
        placed = placed_tasks({each.key: each for each in changed}, defaultdict(list)).values()
        begin = time.process_time()
        simulate(placed)
        of_full = time.process_time() - begin
        before = simulation.num_simulated
        begin = time.process_time()
        simulation.change(put=new.values())
        of_delta = time.process_time() - begin
        found = simulation.timeline
        assert found == anew
        moved = sum(
            found.start[key] != original.start[key] or found.end[key] != original.end[key]
            for key in found.end
        )
        rows.append(
            (of_anew, of_full, of_delta, (simulation.num_simulated - before) / num_tasks, moved / num_tasks)
        )
        simulation.undo()
        gc.collect()
    gc.enable()
    of_anew, of_full, of_delta, placed, moved = (
        statistics.mean(column) for column in zip(*rows, strict=True)
    )
    median = statistics.median(row[0] / row[2] for row in rows)
    return Measured(of_anew, of_full, of_delta, median, placed, moved)


class FullSimulation:
    """What `DeltaSimulation` is to the search, but each change simulates everything.

    Args:
      graph: as it is at first.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self._tasks = dict(graph.by_key)
        self._before = self._tasks, 0.0
        self.makespan = timeline(graph).makespan

    def task(self, key: Key) -> Task | None:
        """Return the task with a number; None if there is none."""
        return self._tasks.get(key)

    def change(self, *, remove: Iterable[Key] = (), put: Iterable[Task] = ()) -> None:
        """Change some tasks and simulate the graph anew."""
        self._before = self._tasks, self.makespan
        self._tasks = {key: task for key, task in self._tasks.items() if key not in set(remove)}
        self._tasks |= {task.key: task for task in put}
        self.makespan = timeline(TaskGraph(self._tasks.values())).makespan

    def undo(self) -> None:
        """Undo the last change."""
        self._tasks, self.makespan = self._before


def searches(num_proposals: int) -> None:
    """Print proposals a second of the search over operators, by delta and by full simulation."""
    config = DecoderConfig(vocab=50304, seq=2048, embed=2048, num_layers=24, num_heads=16, mlp=8192)
    batch = {
        "tokens": jax.ShapeDtypeStruct((64, 2049), np.int32),
        "weights": jax.ShapeDtypeStruct((64,), np.float32),
    }
    subject = Subject(
        model=lambda remat: as_model(with_remat(config, remat)),
        loss=next_token_loss,
        optimizer=optax.adamw(1e-3),
        batch=batch,
    )
    layout = Layout(mesh={"data": 2, "fsdp": 2, "tensor": 4})
    graph = graph_of_operators(subject, 16, "none")
    completed = subject.state(Choice(layout=layout), 16).layout
    space, start = sharded_by_rules(graph, A100_NODES, axis_sizes(layout.mesh, 16), completed)
    print(f"{len(graph.operators)} operators, {num_proposals} proposals\n")
    print(
        "| simulation | proposals a second | of the search's time in the simulation | tasks | best step, ms |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name, kind in (("full", FullSimulation), ("delta", DeltaSimulation)):
        inside = [0.0]
        with patched(markov_chain, "DeltaSimulation", timed(kind, inside)):
            begin = time.process_time()
            found = search_shardings(space, start, proposals=num_proposals)
            seconds = time.process_time() - begin
        tasks = len(ShardedStep(space, found.shardings).simulation.tasks)
        print(
            f"| {name} | {num_proposals / seconds:.0f} | {inside[0] / seconds:.2f} | {tasks} |"
            f" {1e3 * found.found.seconds:.3f} |"
        )


def timed(kind: type[Any], inside: list[float]) -> type[Any]:
    """Return a simulation that adds up the seconds of its changes."""

    class Timed(kind):
        def change(self, **tasks: Any) -> None:
            begin = time.process_time()
            super().change(**tasks)
            inside[0] += time.process_time() - begin

        def undo(self) -> None:
            begin = time.process_time()
            super().undo()
            inside[0] += time.process_time() - begin

    return Timed


@contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have another value under a name of a module for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def graphs(options: argparse.Namespace) -> None:
    """Print the tables of changed graphs."""
    graph = graph_of(options.stages, options.microbatches, options.blocks)
    rng = random.Random(0)

    def some(kinds: Sequence[str]) -> list[Task]:
        """Some tasks of these kinds, always the same."""
        return rng.choices([task for task in graph if task.kind in kinds], k=options.repeats)

    print(f"{len(graph.by_key)} tasks\n")
    print(
        "| change | anew, ms | full, ms | delta, ms | anew / delta | full / delta | of a median change"
        " | placed again | moved |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    cases: dict[str, tuple[Callable[[Task], Sequence[Task]], Sequence[str]]] = {
        "a collective": (lambda task: [task], ("collective",)),
        "a block of one microbatch": (lambda task: [task], ("forward", "backward")),
        "a block, in all microbatches": (lambda task: operator(graph, task), ("forward", "backward")),
        "the optimizer of a stage": (lambda task: [task], ("update",)),
    }
    for name, (chosen, kinds) in cases.items():
        print(row(name, measured(graph, chosen, some(kinds))), flush=True)
    for queues, reach, needs in ((8, 200, 3), (64, 200, 3), (64, 2000, 3), (8, 2000, 1), (64, 2000, 1)):
        graph = random_graph(queues, reach, needs)
        tasks = rng.choices(list(graph), k=options.repeats)
        name = f"random: {queues} queues, up to {needs} needs of {reach} tasks before"
        print(row(name, measured(graph, lambda task: [task], tasks)), flush=True)


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["graphs", "search"])
    for name, default in (
        ("stages", 8),
        ("microbatches", 32),
        ("blocks", 64),
        ("repeats", 40),
        ("proposals", 2000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    parts = {"graphs": lambda: graphs(options), "search": lambda: searches(options.proposals)}
    for part in options.parts:
        parts[part]()


def row(name: str, found: Measured) -> str:
    """A row of the table."""
    return (
        f"| {name} | {1e3 * found.anew:.1f} | {1e3 * found.full:.1f} | {1e3 * found.delta:.2f} |"
        f" {found.anew / found.delta:.1f} | {found.full / found.delta:.1f} | {found.median:.1f} |"
        f" {100 * found.placed:.1f} % | {100 * found.moved:.1f} % |"
    )


if __name__ == "__main__":
    main()
