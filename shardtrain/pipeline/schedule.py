"""The schedules we know, each a pure function from sizes to a table. No jax.

S stages, M microbatches, V chunks a stage. Each has two forms: one task a tick, for stages that run on
their own, and lock-step, for a mesh, where a tick waits for all. Next: `simulate.py`, `mesh_pipeline.py`.
"""

from collections.abc import Callable
from pathlib import Path

from shardtrain.errors.messages import near, problems_error
from shardtrain.pipeline.check import check
from shardtrain.pipeline.table import KINDS, Table, Task, needs
from shardtrain.pipeline.table_file import read_table, write_table
from shardtrain.pipeline.task_order import (
    alternating,
    backwards,
    earliest,
    forwards,
    in_lockstep,
    units,
    zero_bubble_order,
)

__all__ = [
    "KINDS",
    "SCHEDULES",
    "Table",
    "Task",
    "check",
    "forward_only",
    "gpipe",
    "interleaved",
    "live_bound",
    "make_table",
    "needs",
    "one_forward_one_backward",
    "read_table",
    "write_table",
    "zero_bubble",
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
    table = _empty("gpipe", num_stages, num_microbatches, num_chunks, lockstep)
    if lockstep:
        last = max(unit for unit, _, _ in units(table))
        return in_lockstep(table, turn=last + num_stages)
    return earliest(table, [[*forwards(table), *backwards(table)]] * num_stages)


def one_forward_one_backward(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, lockstep: bool = False
) -> Table:
    """Backwards as early as can be (Narayanan et al. 2021, Megatron-LM, section 2.2.1; PipeDream's order).

    So memory does not grow with M. One task a tick: 2 (M + S - 1) ticks; stage s holds min(M, S - s).
    Lock-step, a forward and a backward a tick: M + 2 (S - 1) ticks; stage s holds min(M, 2 (S - s) - 1), for
    an error comes back in as many ticks as the activation went.

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
    table = _empty("1f1b", num_stages, num_microbatches, num_chunks, lockstep, most_chunks=1)
    if lockstep:
        return in_lockstep(table, turn=num_stages - 1)
    return earliest(table, alternating(table, [num_stages - 1 - stage for stage in range(num_stages)]))


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int = 2, lockstep: bool = False) -> Table:
    """1F1B over several chunks a stage, depth first: a bubble V times smaller, for V times the messages.

    Groups of S microbatches pass chunk after chunk (Narayanan et al. 2021, Megatron-LM, section 2.2.2). For M
    a multiple of S: one task a tick 2 (V M + S - 1) ticks, lock-step V M + V S + S - 2. For another M the
    order is that of the next multiple, without the microbatches that are not there. In both forms stage s
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
    table = _empty("interleaved", num_stages, num_microbatches, num_chunks, lockstep, least_chunks=2)
    if lockstep:
        return in_lockstep(table, turn=table.num_parts - 1)
    ahead = [table.num_parts - 1 + num_stages - 1 - 2 * stage for stage in range(num_stages)]
    return earliest(table, alternating(table, ahead))


def zero_bubble(num_stages: int, num_microbatches: int, num_chunks: int = 1, lockstep: bool = False) -> Table:
    """1F1B whose gradients of weights fill the bubble: ZB-H1 (Qi et al. 2024, Zero Bubble, section 2.1).

    One task a tick: 3 M + 2 S - 1 - min(M, S) ticks, so 3 M + S - 1 from M = S on. No table whose first stage
    holds at most S is shorter: that stage waits until tick 2 S - 1 for its first error, with at most
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
    table = _empty("zero_bubble", num_stages, num_microbatches, num_chunks, lockstep, KINDS, most_chunks=1)
    if lockstep:
        return in_lockstep(table, turn=num_stages - 1)
    return earliest(table, [zero_bubble_order(table, stage) for stage in range(num_stages)])


def forward_only(
    num_stages: int, num_microbatches: int, num_chunks: int = 1, lockstep: bool = False
) -> Table:
    """Forwards alone, for evaluation: V M + S - 1 ticks (for M a multiple of S, or V = 1).

    Args:
      num_stages: S, 1 or more.
      num_microbatches: M, 1 or more.
      num_chunks: V, 1 or more.
      lockstep: the form; both have the same ticks.

    Raises:
      ValueError: a number below 1.

    >>> forward_only(4, 8).num_ticks
    11
    """
    table = _empty("forward_only", num_stages, num_microbatches, num_chunks, lockstep, KINDS[:1])
    return in_lockstep(table, turn=0) if lockstep else earliest(table, [[*forwards(table)]] * num_stages)


SCHEDULES: dict[str, Callable[[int, int, int, bool], Table]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
"""Name -> table of (num_stages, num_microbatches, num_chunks, lockstep), for training."""


def live_bound(table: Table) -> tuple[int, ...] | None:
    """For each stage, the most (chunk, microbatch) that a schedule lets it hold; None where none is known.

    >>> live_bound(one_forward_one_backward(4, 8))
    (4, 3, 2, 1)
    """
    stages, chunks = table.num_stages, table.num_chunks
    everything = chunks * table.num_microbatches
    bounds: dict[str, Callable[[int], int]] = {
        "gpipe": lambda stage: everything,
        "1f1b": lambda stage: 2 * (stages - stage) - 1 if table.lockstep else stages - stage,
        "interleaved": lambda stage: (chunks + 1) * stages - 2 * stage - 1,
        "zero_bubble": lambda stage: 2 * stages - 1 - stage if table.lockstep else stages,
        "forward_only": lambda stage: 1,
    }
    if table.name not in bounds:
        return None
    return tuple(min(everything, bounds[table.name](stage)) for stage in range(stages))


def make_table(
    name_or_path: str | Path, stages: int, microbatches: int, chunks: int = 1, lockstep: bool = False
) -> Table:
    """A schedule by name, or a user's own from a file; checked.

    Args:
      name_or_path: a name of `SCHEDULES`, or a path that ends in .csv, see `read_table`.
      stages: S, 1 or more.
      microbatches: M, 1 or more.
      chunks: V, parts of the model on each stage.
      lockstep: the form, see `Table`.

    Raises:
      ValueError: no such name or file, sizes that the schedule has not, or a table that cannot run.

    >>> make_table("1f1b", 4, 8).num_ticks
    22
    """
    if not str(name_or_path).endswith(".csv"):
        if name_or_path not in SCHEDULES:
            known = near(str(name_or_path), SCHEDULES)
            raise ValueError(f"schedule {known}; give one of these, or a table of your own as a path.csv")
        table = SCHEDULES[str(name_or_path)](stages, microbatches, chunks, lockstep)
        check(table, live_bound(table))
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
    if problems:
        raise problems_error(f"schedule {name_or_path} does not fit", problems)
    return table


def _empty(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    lockstep: bool,
    kinds: tuple[str, ...] = KINDS[:2],
    *,
    least_chunks: int = 1,
    most_chunks: int | None = None,
) -> Table:
    """A table without tasks, of sizes that the schedule has."""
    sizes = {"stages": num_stages, "microbatches": num_microbatches}
    problems = [f"{what} is {size}; use 1 or more" for what, size in sizes.items() if size < 1]
    if num_chunks < least_chunks:
        instead = ", or the schedule '1f1b'" if least_chunks > 1 else ""
        problems.append(f"chunks (virtual stages) is {num_chunks}; use {least_chunks} or more{instead}")
    if most_chunks is not None and num_chunks > most_chunks:
        problems.append(
            f"chunks (virtual stages) is {num_chunks}; use {most_chunks}, or the schedule 'interleaved'"
        )
    if problems:
        raise problems_error(f"schedule {name!r} cannot be made", problems)
    return Table(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        lockstep=lockstep,
        tasks=(),
        name=name,
        kinds=kinds,
    )
