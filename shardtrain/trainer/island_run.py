"""Derive the run of one island: apply its section of the strategy, and scale it to the number of replicas.

Islands that come and go train it with slots instead of microbatches.

Next: `prepared_run.py`, which sets it up.
"""

import math
from dataclasses import replace
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import NamedTuple

import jax

from shardtrain.errors.messages import needs_library
from shardtrain.islands.cluster import island_numbers
from shardtrain.optim.optimizer import Optimizer
from shardtrain.optim.scaling import Scaling, scale_run
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.train_step.elastic_exchange import find_exchange_problems, split_codec
from shardtrain.trainer.combinations import check_combinations
from shardtrain.trainer.config import Run
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.strategy import Strategy


def make_island_run(run: Run, coordination: Coordination, output: RunConsole) -> Run:
    """Return the run as this island trains it.

    Args:
      run: the run as the user gave it.
      coordination: the exchange with the other islands.
      output: receives notes and warnings.

    Raises:
      ValueError: a section of the strategy is for no island, or replicas cannot be combined as it says.
    """
    strategy = _own_strategy(run.strategy, coordination, output)
    # batches in flight do not see each other's updates, in waves of one step neither
    is_flushed = strategy.pipeline.in_flight == 1
    found = strategy.synchronisation.simplified if is_flushed else strategy.synchronisation
    if found.distance is not None and coordination.num_islands == 1:
        output.note(
            f"WARNING: waves are of islands, and there is one: its replicas merge every {found.every}"
            " steps (launch several: shardtrain launch --islands N)"
        )
    if found is not strategy.synchronisation:
        output.note("waves of one step in which no island may be ahead: gradients are combined in every step")
    strategy = replace(strategy, synchronisation=found)
    run = _apply_measured_shares(replace(run, strategy=strategy), coordination, output)
    return _scale(run, coordination, output)


def _own_strategy(strategy: Strategy, coordination: Coordination, output: RunConsole) -> Strategy:
    """Return the strategy of this island; report sections for devices that no island has.

    Raises:
      ValueError: a section is for an island that does not exist.
    """
    own = (coordination.island, jax.local_devices()[0].device_kind)
    every = coordination.all_gather_islands("device kinds", own)
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


class IslandDevices(NamedTuple):
    """The devices of an island.

    Args:
      kind: the kind of its devices.
      number: the number of devices.
      dtype: the dtype in which it computes; None means the model's own.
    """

    kind: str
    number: int
    dtype: str | None = None


def _apply_measured_shares(run: Run, coordination: Coordination, output: RunConsole) -> Run:
    """Return the run with `shares` and `share_limits` "auto" where that is the default; say so.

    Shares are measured by default if islands differ, the split of a batch changes nothing but rounding, and
    the rows that fit the memory of each island can be measured.
    """
    strategy, across = run.strategy, run.strategy.across
    own = IslandDevices(jax.local_devices()[0].device_kind, jax.device_count(), strategy.compute_dtype)
    every = coordination.all_gather_islands("devices of islands", own)
    islands = [IslandDevices(*each) for each in every]
    differ = len({(each.kind, each.number) for each in islands}) > 1
    splits_alike = strategy.synchronisation.is_mean and len({each.dtype for each in islands}) == 1
    if not differ or across.shares is not None or across.axis != "data":
        return run
    if not splits_alike or run.batch_unit == "tokens" or run.batch_growth:
        return run
    each = "; ".join(f"{one.number} x {one.kind}" for one in islands)
    output.note(
        f"islands differ ({each}): their rows follow the measured speed (--shares auto), within what fits"
        " their memory; weights, such as"
        f" --shares {','.join(str(one.number) for one in islands)}, keep them as they are"
    )
    limits = "auto" if across.share_limits is None else across.share_limits
    across = replace(across, shares="auto", share_limits=limits)
    return replace(run, strategy=replace(strategy, across=across))


def _scale(run: Run, coordination: Coordination, output: RunConsole) -> Run:
    """Return the run scaled to the number of replicas, see `scaling.scale_run`.

    Raises:
      ValueError: there is one island, and its gradients are to be a sum over islands.
    """
    sizes = axis_sizes(run.strategy.layout.mesh, jax.device_count())
    own = math.prod(sizes[axis] for axis in run.strategy.layout.batch_axes)
    replicas = coordination.all_gather_islands("replicas", own)
    if run.strategy.across.axis == "pipeline":
        replicas = replicas[:: run.strategy.across.partitions or len(replicas)]
    by = run.strategy.synchronisation.by
    # what is averaged before a combiner gets it: an island's devices, or on one island all axes but data
    inside = max(replicas) if len(replicas) > 1 else max(own // sizes["data"], 1)
    name = by if isinstance(by, str) else "own"
    # the rate of islands that come and go is scaled in each step
    scaling = replace(run.scaling, rate="none") if run.elastic.grows else run.scaling
    scaled, notes = scale_run(run, scaling, sum(replicas), name, inside)
    for line in notes:
        output.note(line)
    is_alone = len(replicas) == 1 and run.strategy.across.axis == "data"
    if is_alone and run.strategy.synchronisation.inside == "sum":
        raise ValueError("inside is 'sum', but there is one island, and nothing to add up; use mean")
    return scaled


def _find_batch_problems(run: Run) -> list[str]:
    """Return what of the batch and the learning rate of a step does not go together."""
    problems, (rate, by) = [], (run.scaling.rate, split_codec(run.strategy.synchronisation)[1])
    if not run.elastic.grows:
        follows = f"--scaling.rate {rate}, which follows the members; use --elastic.batch members, or none"
        return [follows] if rate != "none" else []
    if by.on_deltas:
        problems.append(
            "--elastic.batch members with local steps, each of which has one batch; use --elastic.batch fixed"
        )
    if run.scaling != replace(Scaling(), rate=rate):
        problems.append(
            "--scaling.batch, --scaling.steps or scaling.warmup with --elastic.batch members, which scales"
            " each step by its members; leave them out"
        )
    if rate != "none" and not by.is_mean:
        problems.append(
            f"--scaling.rate {rate} with --combine {by.by}, which needs no other rate while the batch of a"
            " member stays; use --scaling.rate none"
        )
    if rate != "none" and isinstance(run.optimizer, Optimizer) and run.optimizer.ema is not None:
        problems.append(
            f"--scaling.rate {rate} with optimizer.ema, which averages parameters before the rate is scaled;"
            " use --scaling.rate none, or no ema"
        )
    if rate != "none" and not isinstance(run.optimizer, Optimizer):
        problems.append(
            f"--scaling.rate {rate} with an optimizer in Python, whose rate cannot be scaled from outside;"
            " use an Optimizer(name=...), or --scaling.rate none"
        )
    return problems


def _find_stage_problems(run: Run, num_stages: int) -> list[str]:
    """Return why islands cannot be pipelines of several processes, each a stage."""
    across, problems = run.strategy.across, []
    if across.axis != "pipeline":
        return []
    if num_stages == 1:
        problems.append(
            "--across pipeline, and this island is one process; start its stages together: shardtrain launch"
            " --elastic 1..4 --islands 2 --processes-per-island 2 -- train RUN"
        )
    elif across.partitions not in (None, num_stages):
        problems.append(
            f"--partitions {across.partitions}, and this island has {num_stages} processes, each a stage; use"
            f" {num_stages}, or leave it out"
        )
    _, by = split_codec(run.strategy.synchronisation)
    if by.on_deltas:
        problems.append("local steps with --across pipeline; use --synchronisation every-step")
    elif not by.is_mean:
        problems.append(f"--combine {by.by} with --across pipeline; use --combine mean")
    if run.scaling.rate != "none":
        problems.append(f"--scaling.rate {run.scaling.rate} with --across pipeline; use none")
    return problems


def prepare_elastic(run: Run, found: int | None = None, num_islands: int = 1) -> Run:
    """Return a run as islands that come and go train it: slots are its microbatches.

    If an island is a pipeline of several processes, each slot is some of its microbatches.

    Args:
      run: the run.
      found: number of slots of the run that its folder holds, which it takes unless it has a number; or None.
      num_islands: number of islands of MPI that were launched together, each a stage.

    Raises:
      ValueError: lists every option that it cannot have.
    """
    strategy = run.strategy
    problems = find_exchange_problems(strategy.synchronisation) + _find_batch_problems(run)
    problems += _find_stage_problems(run, num_islands)
    if run.steps % (every := strategy.synchronisation.every):
        problems.append(
            f"--steps {run.steps}, of which --local-steps {every} would leave some that are not exchanged;"
            f" use {run.steps // every * every or every}"
        )
    in_stages = strategy.across.axis == "pipeline"
    microbatches = 1 if in_stages else strategy.accumulate
    slots = run.elastic.slots or found
    if slots == found and found and not max(run.elastic.sharers, microbatches) <= found <= run.batch:
        problems.append(
            f"the run in this folder has {found} slots, the parts of a batch that islands share, so at most"
            f" {found} islands (here {run.elastic.sharers}), at most {found} microbatches (here"
            f" {microbatches}) and at least {found} rows in a batch (here {run.batch}); change these, or use"
            " another --run-dir"
        )
    check_combinations(run, "elastic", problems)
    if num_islands > 1 and not in_stages:
        raise ValueError(
            f"--elastic is given, and {num_islands} islands of MPI were started together; start each island"
            " alone: shardtrain launch --elastic 1..4 --islands 2 -- train RUN, with --processes-per-island 2"
            " if its mesh has several processes"
        )
    if find_spec("cryptography") is None:
        raise ValueError(needs_library("connections of islands are", "cryptography", "elastic"))
    # a slot is a replica, unless gradients are only added up
    replicas = None if split_codec(strategy.synchronisation)[1].is_mean else run.elastic.sharers
    elastic = replace(run.elastic, slots=slots or replicas)
    # each slot passes through the stages by itself
    slots = elastic.choose_slots(run.batch, microbatches, 1 if in_stages else 2)
    # a pipeline needs microbatches to keep its stages busy
    accumulate = -(-strategy.accumulate // slots) * slots if in_stages else 1
    return replace(
        run, elastic=replace(elastic, slots=slots), strategy=replace(strategy, accumulate=accumulate)
    )
