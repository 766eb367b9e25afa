"""How many rows of a batch fit the memory of this island, by the compiled program of its step.

Next: `row_shares.py`, which gives the rest to the other islands.
"""

import math
import resource
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from shardtrain.data import Loader
from shardtrain.errors.messages import problems_error
from shardtrain.report.quantities import bytes_text
from shardtrain.system.cgroup import limits
from shardtrain.train_step.delta_island_step import DeltaIslandStep
from shardtrain.train_step.island_step import GradientIslandStep, IslandStep
from shardtrain.train_step.state import State
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.row_shares import RowShares


class Fit(NamedTuple):
    """What fits the memory of an island.

    Args:
      rows: the most rows; None: the memory is not known, or everything fits.
      least_bytes: memory of a device for the fewest rows.
      memory_bytes: memory of a device.
    """

    rows: int | None
    least_bytes: int = 0
    memory_bytes: int = 0


def fit_rows(program_bytes: Callable[[int], int], rows: int, multiple: int, memory_bytes: int) -> Fit:
    """Return how many rows fit, by a line through the memory of two programs.

    Args:
      program_bytes: rows -> memory of a device for the program of that many; it is compiled.
      rows: that the island has at first: that program is needed anyway.
      multiple: what the island's mesh splits without padding.
      memory_bytes: of a device.

    >>> fit_rows(lambda rows: 100 + 10 * rows, 8, 2, 245)
    Fit(rows=14, least_bytes=120, memory_bytes=245)
    >>> fit_rows(lambda rows: 100 + 10 * rows, 8, 2, 110).rows
    0
    """
    other = rows if rows > multiple else 2 * multiple
    least, more = program_bytes(multiple), program_bytes(other)
    if least > memory_bytes:
        return Fit(0, least, memory_bytes)
    row_bytes = (more - least) / (other - multiple)
    if row_bytes <= 0:
        return Fit(None, least, memory_bytes)
    fits = multiple + math.floor((memory_bytes - least) / row_bytes)
    return Fit(fits // multiple * multiple, least, memory_bytes)


def device_memory_bytes(coordination: Coordination) -> int | None:
    """Return the memory that a device of this process may use; None: it is not known.

    Of processors that is the control group's limit, in equal parts for the processes and devices of the host,
    less what the process has already. All ranks call it.
    """
    device = jax.local_devices()[0]
    islands = coordination.islands
    hosts = [""] if islands is None else coordination.all_gather("hosts of memory", islands.environment.host)
    if (known := (device.memory_stats() or {}).get("bytes_limit")) is not None:
        return known
    limit = limits()["memory_bytes"]
    if limit is None or device.platform != "cpu":
        return None
    of_process = limit // hosts.count("" if islands is None else islands.environment.host)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(of_process - used, 0) // jax.local_device_count()


def fit_to_memory(
    coordination: Coordination,
    shares: RowShares,
    loader: Loader,
    step: IslandStep,
    wanted: State,
    batch: Any,
    note: Callable[[str], None],
) -> Loader:
    """Limit the rows of islands to what fits their memory, and return the loader of those that remain.

    Args:
      coordination: the exchange with the other islands.
      shares: the rows of each island, which are limited.
      loader: of this island's rows.
      step: the step of this island.
      wanted: the shapes of its state.
      batch: a first batch of this island.
      note: receives a line if an island has a limit.

    Raises:
      ValueError: see `find_fit` and `RowShares.limit`.
    """
    assert isinstance(step, GradientIslandStep | DeltaIslandStep)
    fit = find_fit(coordination, step, wanted, batch, shares.multiple)
    text = shares.limit_rows([each.rows for each in fit], loader.batches.num_rows(None))
    if text is None:
        return loader
    note(text)
    return loader.with_shards(shares.shards())


def find_fit(
    coordination: Coordination,
    step: GradientIslandStep | DeltaIslandStep,
    state: State,
    batch: Any,
    multiple: int,
) -> list[Fit]:
    """Return what fits each island; all ranks call it.

    Args:
      coordination: the exchange with the other islands.
      step: the step of this island.
      state: the shapes of its state.
      batch: a batch of this island.
      multiple: what its mesh splits without padding.

    Raises:
      ValueError: lists every island that cannot hold the fewest rows.
    """

    def program_bytes(rows: int) -> int:
        def of_rows(x: jax.Array) -> jax.ShapeDtypeStruct:
            shape = (x.shape[0], rows // x.shape[0], *x.shape[2:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)

        memory: Any = step.lowered(state, jax.tree.map(of_rows, batch))[0].compile().memory_analysis()
        arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return arguments + memory.temp_size_in_bytes

    memory_bytes, own = device_memory_bytes(coordination), Fit(None)
    if memory_bytes is not None:
        leaf = jax.tree.leaves(batch)[0]
        own = fit_rows(program_bytes, leaf.shape[0] * leaf.shape[1], multiple, memory_bytes)
    assert coordination.islands is not None
    found = [Fit(*each) for each in coordination.islands.all_gather_islands("rows that fit", own)]
    problems = [
        f"island {island} has {bytes_text(each.memory_bytes)} a device, and the fewest rows need"
        f" {bytes_text(each.least_bytes)}; use more devices or --zero 3 there, --remat full, a smaller"
        " model, or leave it out"
        for island, each in enumerate(found)
        if each.rows == 0
    ]
    if problems:
        raise problems_error("the model does not fit every island", problems)
    return found
