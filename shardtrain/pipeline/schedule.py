"""The named schedules, pure functions from sizes to a table of tasks. No jax.

S stages, M microbatches, V chunks a stage. Each has two forms: one task a tick, for stages that run
independently, and lock-step, for a mesh, where each tick waits for all stages. Next: `simulate.py`,
`mesh_pipeline.py`.
"""

from collections.abc import Callable
from pathlib import Path

from shardtrain.errors.messages import near, refuse
from shardtrain.pipeline.table import KINDS, Table, check
from shardtrain.pipeline.table_file import read_table, write_table
from shardtrain.pipeline.task_order import (
    alternate,
    assign_earliest,
    assign_lockstep,
    assign_v_lockstep,
    list_backwards,
    list_forwards,
    list_units,
    make_empty_table,
    order_zero_bubble,
    order_zero_bubble_v,
)

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Table",
    "check",
    "forward_only",
    "gpipe",
    "interleaved",
    "make_table",
    "one_forward_one_backward",
    "read_table",
    "write_table",
    "zero_bubble",
    "zero_bubble_v",
]


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1, lockstep: bool = False) -> Table:
    """All forwards, then all backwards (Huang et al. 2019, GPipe, section 2.2).

    2 (V M + S - 1) ticks in both forms (where V > 1, for M a multiple of S); a stage holds V M.

    Args:
      num_stages: S, 1 or more.
      num_microbatches: M, 1 or more.
      num_chunks: V, 1 or more.
      lockstep: the form, see `Table`.

    Raises:
      ValueError: a number below 1.

    >>> gpipe(4, 8).num_ticks, gpipe(4, 8).live(0)
    (22, 8)
    """
    sizes = (num_stages, num_microbatches, num_chunks, lockstep)
    table = make_empty_table("gpipe", *sizes, live=lambda stage: num_chunks * num_microbatches)
    if lockstep:
        last = max(unit for unit, _, _ in list_units(table))
        return assign_lockstep(table, turn=last + num_stages)
    return assign_earliest(table, [[*list_forwards(table), *list_backwards(table)]] * num_stages)


def one_forward_one_backward(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, lockstep: bool = False
) -> Table:
    """1F1B: backwards as early as possible (Narayanan et al. 2021, Megatron-LM, section 2.2.1; PipeDream).

    So memory does not grow with M. One task a tick: 2 (M + S - 1) ticks; stage s holds min(M, S - s).
    Lock-step, a forward and a backward a tick: M + 2 (S - 1) ticks; stage s holds min(M, 2 (S - s) - 1), as
    cotangents take as many ticks back as activations took forward.

    Args:
      num_stages: S, 1 or more.
      num_microbatches: M, 1 or more.
      num_chunks: 1; see `interleaved` for more.
      lockstep: the form, see `Table`.

    Raises:
      ValueError: a number below 1, or more than one chunk.

    >>> [one_forward_one_backward(4, 8).live(stage) for stage in range(4)]
    [4, 3, 2, 1]
    >>> [one_forward_one_backward(4, 8, lockstep=True).live(stage) for stage in range(4)]
    [7, 5, 3, 1]
    """
    sizes = (num_stages, num_microbatches, num_chunks, lockstep)
    table = make_empty_table(
        "1f1b",
        *sizes,
        live=lambda stage: 2 * (num_stages - stage) - 1 if lockstep else num_stages - stage,
        most_chunks=1,
    )
    if lockstep:
        return assign_lockstep(table, turn=num_stages - 1)
    return assign_earliest(table, alternate(table, [num_stages - 1 - stage for stage in range(num_stages)]))


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 2, lockstep: bool = False) -> Table:
    """1F1B over several chunks a stage, depth first: a bubble V times smaller, for V times the messages.

    Groups of S microbatches pass chunk after chunk (Narayanan et al. 2021, Megatron-LM, section 2.2.2). For M
    a multiple of S: one task a tick 2 (V M + S - 1) ticks, lock-step V M + V S + S - 2. For any other M the
    order is the order of the next multiple, without the extra microbatches. In both forms stage s
    holds at most min(V M, V S + S - 2 s - 1) inputs of parts.

    Args:
      num_stages: S, 1 or more.
      num_microbatches: M, 1 or more.
      num_chunks: V, 2 or more.
      lockstep: the form, see `Table`.

    Raises:
      ValueError: a number below 1, or fewer than two chunks.

    >>> interleaved(4, 8, 2).num_ticks, interleaved(4, 8, 2, lockstep=True).num_ticks
    (38, 26)
    """
    sizes = (num_stages, num_microbatches, num_chunks, lockstep)
    table = make_empty_table(
        "interleaved",
        *sizes,
        live=lambda stage: (num_chunks + 1) * num_stages - 2 * stage - 1,
        least_chunks=2,
    )
    if lockstep:
        return assign_lockstep(table, turn=table.num_parts - 1)
    ahead = [table.num_parts - 1 + num_stages - 1 - 2 * stage for stage in range(num_stages)]
    return assign_earliest(table, alternate(table, ahead))


def zero_bubble(num_stages: int, num_microbatches: int, num_chunks: int = 1, lockstep: bool = False) -> Table:
    """1F1B whose gradients of weights fill the bubble: ZB-H1 (Qi et al. 2024, Zero Bubble, section 2.1).

    One task a tick: 3 M + 2 S - 1 - min(M, S) ticks, so 3 M + S - 1 from M = S on. No table whose first stage
    holds at most S is shorter: that stage waits until tick 2 S - 1 for its first cotangent, with at most
    min(M, S) forwards to do. Stage s is s weight tasks late, and each stage holds min(M, S). Lock-step, the
    weight tasks of a microbatch on all stages in one tick: M + 2 (S - 1) ticks, min(M, 2 S - 1 - s) held.

    Args:
      num_stages: S, 1 or more.
      num_microbatches: M, 1 or more.
      num_chunks: 1.
      lockstep: the form, see `Table`.

    Raises:
      ValueError: a number below 1, or more than one chunk.

    >>> zero_bubble(4, 8).num_ticks, zero_bubble(4, 1).num_ticks
    (27, 9)
    """
    sizes = (num_stages, num_microbatches, num_chunks, lockstep)
    table = make_empty_table(
        "zero_bubble",
        *sizes,
        KINDS,
        live=lambda stage: 2 * num_stages - 1 - stage if lockstep else num_stages,
        most_chunks=1,
    )
    if lockstep:
        return assign_lockstep(table, turn=num_stages - 1)
    return assign_earliest(table, [order_zero_bubble(table, stage) for stage in range(num_stages)])


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
    table = make_empty_table(
        "zb_v",
        *sizes,
        KINDS,
        live=lambda stage: 5 * num_stages // 2 if lockstep else 2 * num_stages,
        least_chunks=2,
        most_chunks=2,
        placement="v",
    )
    if lockstep:
        return assign_v_lockstep(table)
    return assign_earliest(table, [order_zero_bubble_v(table, stage) for stage in range(num_stages)])


def forward_only(
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    lockstep: bool = False,
    placement: str = "loop",
) -> Table:
    """Return a table of forward tasks only, for evaluation.

    V M + S - 1 ticks in the placement "loop" (for M a multiple of S, or V = 1); 2 (M + S - 1) in "v", where a
    microbatch starts every second tick, so that those on their way down and back up alternate on each stage.

    Args:
      num_stages: S, 1 or more.
      num_microbatches: M, 1 or more.
      num_chunks: V, 1 or more.
      lockstep: the form; both have the same ticks.
      placement: which part each chunk of a stage is, see `PartPlacement`.

    Raises:
      ValueError: a number below 1, or a number of chunks that the placement does not support.

    >>> forward_only(4, 8).num_ticks
    11
    """
    sizes = (num_stages, num_microbatches, num_chunks, lockstep)
    table = make_empty_table("forward_only", *sizes, KINDS[:1], live=lambda stage: 1, placement=placement)
    if placement == "v" and num_chunks == 2:
        return assign_v_lockstep(table)
    return (
        assign_lockstep(table, turn=0)
        if lockstep
        else assign_earliest(table, [[*list_forwards(table)]] * num_stages)
    )


SCHEDULES: dict[str, Callable[[int, int, int, bool], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zb_v": zero_bubble_v,
}
"""Name -> table of (num_stages, num_microbatches, num_chunks, lockstep), for training."""


def find_placement(name_or_path: str | Path, num_chunks: int) -> str:
    """Return the placement that a named schedule, or a user's table, needs.

    Args:
      name_or_path: as in `make_table`.
      num_chunks: V, parts of the model on each stage.

    Raises:
      ValueError: the schedule does not support so many chunks, or the file cannot be read.

    >>> find_placement("1f1b", 1), find_placement("zb_v", 2)
    ('loop', 'v')
    """
    if str(name_or_path).endswith(".csv"):
        return read_table(name_or_path, lockstep=True).placement  # every table can be read in lock-step
    return SCHEDULES[str(name_or_path)](1, 1, num_chunks, False).placement


def make_table(
    name_or_path: str | Path, stages: int, microbatches: int, chunks: int = 1, lockstep: bool = False
) -> Table:
    """Make the table of a named schedule, or read a user's table from a file, and check it.

    Args:
      name_or_path: a name of `SCHEDULES`, or a path that ends in .csv, see `read_table`.
      stages: S, 1 or more.
      microbatches: M, 1 or more.
      chunks: V, parts of the model on each stage.
      lockstep: the form, see `Table`.

    Raises:
      ValueError: there is no such name or file, the schedule does not support the sizes, or the table cannot
        run.

    >>> make_table("1f1b", 4, 8).num_ticks
    22
    """
    if not str(name_or_path).endswith(".csv"):
        if name_or_path not in SCHEDULES:
            known = near(str(name_or_path), SCHEDULES)
            raise ValueError(f"schedule {known}; give one of these, or a table of your own as a path.csv")
        table = SCHEDULES[str(name_or_path)](stages, microbatches, chunks, lockstep)
        check(table)
        return table
    table = read_table(name_or_path, lockstep=lockstep)
    asked = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    found = dict(zip(asked, (table.num_stages, table.num_microbatches, table.num_chunks), strict=True))
    problems = [] if "backward" in table.kinds else ["it has no backwards; add one for each forward"]
    problems += [
        f"it has {found[what]} {what}, and {asked[what]} were asked for; use {found[what]}, or another table"
        for what in asked
        if found[what] != asked[what]
    ]
    refuse(f"schedule {name_or_path} does not fit", problems)
    return table
