"""The run of one island: its own fields of the strategy, simplified, and scaled to the number of replicas.

Next: `prepared_run.py`, which sets it up.
"""

import math
from dataclasses import replace
from fnmatch import fnmatchcase

import jax

from shardtrain.islands.membership import Islands
from shardtrain.islands.sections import island_numbers
from shardtrain.optim.scaling import scaled
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.trainer.config import Run
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.strategy import Strategy


def run_of_island(run: Run, islands: Islands | None, output: RunConsole) -> Run:
    """Return the run as this island trains it.

    Args:
      run: the run as the user gave it.
      islands: the islands of the run; None for a run of one island.
      output: receives notes and warnings.

    Raises:
      ValueError: a section of the strategy is for no island, or replicas cannot be combined as it says.
    """
    strategy = _simplified(_own_strategy(run.strategy, islands, output), islands, output)
    return _scale(replace(run, strategy=strategy), islands, output)


def _own_strategy(strategy: Strategy, islands: Islands | None, output: RunConsole) -> Strategy:
    """Return the strategy of this island; report sections for devices that no island has.

    Raises:
      ValueError: a section is for an island that there is not.
    """
    kind = jax.local_devices()[0].device_kind
    own = (0, kind) if islands is None else (islands.seat.island, kind)
    every = [own] if islands is None else islands.all_gather_islands("device kinds", own)
    for name in strategy.islands:
        numbers = island_numbers(name)
        if numbers is not None and max(numbers) >= len(every):
            raise ValueError(
                f"the strategy has a section for islands {name}, and the highest number here is"
                f" {len(every) - 1}, as they count from 0; give other numbers, or launch more islands"
            )
        if numbers is None and not any(fnmatchcase(kind.lower(), name.lower()) for _, kind in every):
            kinds = ", ".join(sorted({kind for _, kind in every}))
            output.note(
                f"WARNING: no island has devices {name!r}, a section of the strategy; they are {kinds}"
            )
    return strategy.of_island(*own)


def _simplified(strategy: Strategy, islands: Islands | None, output: RunConsole) -> Strategy:
    """Return the strategy with waves of one step, in which nobody may be ahead, as every step."""
    # batches in flight do not see each other's updates, in waves of one step neither
    is_flushed = strategy.pipeline.in_flight == 1
    found = strategy.synchronisation.simplified if is_flushed else strategy.synchronisation
    if found.distance is not None and (islands is None or islands.seat.num_islands == 1):
        output.note(
            f"WARNING: waves are of islands, and there is one: its replicas merge every {found.every}"
            " steps (launch several: shardtrain launch --islands N)"
        )
    if found is not strategy.synchronisation:
        output.note("waves of one step in which no island may be ahead: gradients are combined in every step")
    return replace(strategy, synchronisation=found)


def _scale(run: Run, islands: Islands | None, output: RunConsole) -> Run:
    """Return the run scaled to the number of replicas, see `scaling.scaled`.

    Raises:
      ValueError: there is one island, and its gradients are to be a sum over islands.
    """
    sizes = axis_sizes(run.strategy.layout.mesh, jax.device_count())
    own = math.prod(sizes[axis] for axis in run.strategy.layout.batch_axes)
    replicas = [own] if islands is None else islands.all_gather_islands("replicas", own)
    if run.strategy.across.axis == "pipeline":
        replicas = replicas[:: run.strategy.across.partitions or len(replicas)]
    by = run.strategy.synchronisation.by
    # what is averaged before a combiner gets it: an island's devices, or on one island all axes but data
    inside = max(replicas) if len(replicas) > 1 else max(own // sizes["data"], 1)
    found = scaled(run, run.scaling, sum(replicas), by if isinstance(by, str) else "own", inside)
    for line in found.notes:
        output.note(line)
    if len(replicas) == 1 and run.strategy.synchronisation.inside == "sum":
        raise ValueError("inside is 'sum', but there is one island, and nothing to add up; use mean")
    return found.run
