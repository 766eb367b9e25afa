"""The run of one island: its own fields of the strategy, simplified, and scaled to the number of replicas.

Next: `prepared_run.py`, which sets it up.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import jax

from shardtrain.islands.membership import Islands
from shardtrain.islands.sections import island_numbers
from shardtrain.optim.scaling import scale_run
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
    strategy = _simplify(_own_strategy(run.strategy, islands, output), islands, output)
    run = _apply_measured_shares(replace(run, strategy=strategy), islands, output)
    return _scale(run, islands, output)


def _own_strategy(strategy: Strategy, islands: Islands | None, output: RunConsole) -> Strategy:
    """Return the strategy of this island; report sections for devices that no island has.

    Raises:
      ValueError: a section is for an island that there is not.
    """
    kind = jax.local_devices()[0].device_kind
    own = (0, kind) if islands is None else (islands.placement.island, kind)
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
    return strategy.select_island(*own)


def _simplify(strategy: Strategy, islands: Islands | None, output: RunConsole) -> Strategy:
    """Return the strategy with waves of one step, in which nobody may be ahead, as every step."""
    # batches in flight do not see each other's updates, in waves of one step neither
    is_flushed = strategy.pipeline.in_flight == 1
    found = strategy.synchronisation.simplified if is_flushed else strategy.synchronisation
    if found.distance is not None and (islands is None or islands.placement.num_islands == 1):
        output.note(
            f"WARNING: waves are of islands, and there is one: its replicas merge every {found.every}"
            " steps (launch several: shardtrain launch --islands N)"
        )
    if found is not strategy.synchronisation:
        output.note("waves of one step in which no island may be ahead: gradients are combined in every step")
    return replace(strategy, synchronisation=found)


class IslandDevices(NamedTuple):
    """The devices of an island.

    Args:
      kind: of its devices.
      number: of them.
      dtype: in which it computes; None: that of the model.
    """

    kind: str
    number: int
    dtype: str | None = None


def format_measured_shares(run: Run, islands: Sequence[IslandDevices]) -> str | None:
    """Return why the rows of these islands follow their speed though the run does not ask for it; None: no.

    They do where islands differ and the split of a batch changes nothing but rounding, and where the rows
    that fit the memory of each island can be measured.

    Args:
      run: as an island trains it.
      islands: the devices of each.
    """
    strategy, differ = run.strategy, len({(each.kind, each.number) for each in islands}) > 1
    splits_alike = strategy.synchronisation.is_mean and len({each.dtype for each in islands}) == 1
    if not differ or strategy.across.shares is not None or strategy.across.axis != "data":
        return None
    if not splits_alike or run.batch_unit == "tokens" or run.batch_growth:
        return None
    each = "; ".join(f"{one.number} x {one.kind}" for one in islands)
    return (
        f"islands differ ({each}): their rows follow the measured speed (--shares auto), within what fits"
        " their memory; weights, such as"
        f" --shares {','.join(str(one.number) for one in islands)}, keep them as they are"
    )


def _apply_measured_shares(run: Run, islands: Islands | None, output: RunConsole) -> Run:
    """Return the run with `shares` and `share_limits` "auto" where that is the default; say so."""
    if islands is None:
        return run
    own = IslandDevices(jax.local_devices()[0].device_kind, jax.device_count(), run.strategy.compute_dtype)
    every = [IslandDevices(*each) for each in islands.all_gather_islands("devices of islands", own)]
    text = format_measured_shares(run, every)
    if text is None:
        return run
    output.note(text)
    across = run.strategy.across
    limits = "auto" if across.share_limits is None else across.share_limits
    across = replace(across, shares="auto", share_limits=limits)
    return replace(run, strategy=replace(run.strategy, across=across))


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
    name = by if isinstance(by, str) else "own"
    scaled, notes = scale_run(run, run.scaling, sum(replicas), name, inside)
    for line in notes:
        output.note(line)
    if len(replicas) == 1 and run.strategy.synchronisation.inside == "sum":
        raise ValueError("inside is 'sum', but there is one island, and nothing to add up; use mean")
    return scaled
