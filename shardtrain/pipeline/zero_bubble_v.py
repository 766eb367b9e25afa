"""ZB-V: a pipeline that goes down the stages and back up, with weight gradients in its bubbles. No jax.

Each stage has two chunks in the placement "v": the first stage has the first and the last part of the model,
so it also computes the loss, and the last stage hands its activations on to itself.
"""

from dataclasses import replace

from shardtrain.pipeline.table import KINDS, Table, Task
from shardtrain.pipeline.task_order import Step, earliest, empty_table


def zero_bubble_v(
    num_stages: int, num_microbatches: int, num_chunks: int = 2, lockstep: bool = False
) -> Table:
    """ZB-V (Qi et al. 2024, Zero Bubble Pipeline Parallelism, section 6), in the memory of 1F1B.

    One task a tick, each of half a stage: max(6 M + S - 1, 4 M + 4 S - 2) ticks, so that with enough
    microbatches a stage waits S - 1 ticks in all. Every stage keeps at most min(2 M, 2 S) inputs of parts.
    Lock-step: 2 M + 4 S - 3 ticks, and at most min(2 M, 5 S / 2).

    Args:
      num_stages: S, 1 or more.
      num_microbatches: M, 1 or more.
      num_chunks: 2.
      lockstep: the form, see `Table`.

    Raises:
      ValueError: a number below 1, or other than two chunks.

    >>> zero_bubble_v(4, 8).num_ticks
    51
    """
    sizes = (num_stages, num_microbatches, num_chunks, lockstep)
    table = empty_table(
        "zb_v",
        *sizes,
        KINDS,
        live=lambda stage: 5 * num_stages // 2 if lockstep else 2 * num_stages,
        least_chunks=2,
        most_chunks=2,
        placement="v",
    )
    if lockstep:
        return v_in_lockstep(table)
    return earliest(table, [_order(table, stage) for stage in range(num_stages)])


def _order(table: Table, stage: int) -> list[Step]:
    """Return the order of a stage.

    It is that of 2 S - 1 microbatches or more, which fill the pipeline, without those beyond M.
    """
    stages = table.num_stages
    end = max(table.num_microbatches, 2 * stages - 1)
    steps: list[Step] = []
    done = dict.fromkeys([(kind, chunk) for kind in KINDS for chunk in (0, 1)], 0)

    def add(chunk: int, *kinds: str) -> None:
        for kind in kinds:
            steps.append((kind, chunk, done[kind, chunk]))
            done[kind, chunk] += 1

    # Warm-up: forwards of chunk 0, until the first microbatch has come back up to this stage; then both
    # chunks in turn, until its backward comes down.
    for _ in range(2 * (stages - stage) - 1):
        add(0, "forward")
    for _ in range(stage):
        add(1, "forward")
        add(0, "forward")
    for _ in range(stages - stage):
        add(1, "forward", "backward", "weight")
    # Steady state: all six tasks of a microbatch, each chunk with its own microbatch.
    while done["forward", 1] < end:
        if done["forward", 0] < end:
            add(0, "forward")
        add(0, "backward", "weight")
        add(1, "forward", "backward", "weight")
    # Cool-down: backwards first, for other stages wait for them; weight tasks fill the end.
    for _ in range(stage):
        add(0, "backward")
        add(1, "backward")
    for _ in range(stages - stage):
        add(0, "backward", "weight")
    for chunk in (1, 0):
        while done["weight", chunk] < end:
            add(chunk, "weight")
    return [step for step in steps if step[2] < table.num_microbatches]


def v_in_lockstep(table: Table) -> Table:
    """Assign lock-step ticks to the tasks of a table in the placement "v" with two chunks.

    The forward of part p and microbatch m is in tick 2 m + p, and its backward in tick 2 m + 2 (P - 1) - p,
    for P parts. Parts of one stage differ by an odd number, so their ticks are never the same. The weight
    tasks of a chunk are on all stages in the same tick, which they lengthen only once: those of chunk 0 in
    even ticks once its last backward is done, those of chunk 1 in odd ones.
    """
    placement, turn = table.part_placement, 2 * (table.num_parts - 1)
    after = turn - table.num_stages
    # the tick of the weight tasks of microbatch 0, for each chunk
    weight = (turn, after + (after + 1) % 2)
    tasks = []
    for microbatch in range(table.num_microbatches):
        for part in range(table.num_parts):
            at = (placement.stage(part), placement.chunk(part), microbatch)
            start = 2 * microbatch
            tasks.append(Task(start + part, *at, "forward"))
            tasks.append(Task(start + turn - part, *at, "backward"))
            tasks.append(Task(start + weight[placement.chunk(part)], *at, "weight"))
    return replace(table, tasks=tuple(task for task in tasks if task.kind in table.kinds))
