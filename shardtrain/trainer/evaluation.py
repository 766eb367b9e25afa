"""Evaluation on held-out data: the same rows each time, sharded over islands, as means by name.

Every metric of the loss appears here as `heldout/NAME`, beside its `train/NAME`; that of a held-out set with
a name as `heldout/SET/NAME`. Next: `train_step/step.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from itertools import islice
from typing import Any

import jax

from shardtrain.data import Batch
from shardtrain.optim.optimizer_state import evaluated_params
from shardtrain.report.metrics import Mean
from shardtrain.train_step.island_step import IslandStep
from shardtrain.train_step.offload import on_device
from shardtrain.train_step.stage_step import StageStep
from shardtrain.train_step.state import State
from shardtrain.train_step.step import make_evaluate
from shardtrain.trainer.config import Run
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.row_shares import RowShares
from shardtrain.trainer.setup import FIRST_POSITION, RunSetup
from shardtrain.trainer.sources import make_batches

Evaluate = Callable[[State], dict[str, float]]
"""state -> held-out values by name."""


def evaluated_every(run: Run) -> int | None:
    """Return the steps between evaluations, at which replicas meet: in between, nothing common changes."""
    local_steps = run.strategy.synchronisation.every
    return run.evaluate_every and -(-run.evaluate_every // local_steps) * local_steps


def make_evaluation(
    run: Run,
    setup: RunSetup,
    coordination: Coordination,
    heldout: Mapping[str, Any],
    island_step: IslandStep | None,
    share_limits: Sequence[int] | None = None,
    explain: Callable[[Batch], Sequence[str]] | None = None,
) -> Evaluate:
    """Make the function that evaluates a state on held-out data.

    Args:
      run: says how many batches, and which parameters.
      setup: the setup of this island.
      coordination: the exchange with the other islands.
      heldout: name of a held-out set ("" for a single one) -> samples by number; {} without held-out data.
      island_step: the step of several islands; None for a run of one island.
      share_limits: the most that each island gets of a batch, as training has it; None: those of the run.
      explain: returns what is wrong with a batch, on the host, whose loss is not a number; None: it is not
        known.

    Returns:
      state -> held-out values by name; {} without held-out data. All islands call it at the same time. It
      raises a ValueError where a set has no loss, as nothing in it counts or the loss is not a number.
    """
    if not heldout:
        return lambda state: {}
    in_stages = isinstance(island_step, StageStep)
    evaluate = island_step.evaluate if in_stages else make_evaluate(setup.model, run.loss, setup.placement)
    # a pipeline needs microbatches to keep more than one stage busy
    microbatches = run.strategy.accumulate if in_stages or setup.placement.stages else 1
    # rows are shared as in training; the held-out data is passed through once, in its own order
    of_sets = {name: make_batches(run, source, epochs=1, shuffle=False) for name, source in heldout.items()}
    row_counts = sorted({count for batches in of_sets.values() for count in batches.row_counts})
    shares = RowShares(coordination, row_counts, run, setup.mesh, microbatches)
    if share_limits is not None:
        shares.limit(share_limits)
    loaders = {heldout_prefix(name): shares.loader(batches) for name, batches in of_sets.items()}
    select = make_select_params(run, setup)

    def values(state: State) -> dict[str, float]:
        state = state._replace(params=select(state))
        if coordination.transfer is not None:
            # what an island has for the exchange with the others is no part of the evaluation's program
            state = state._replace(combine_state=(), local=(), outer_state=())
        # start all batches of all sets before waiting for the first result
        metrics, positions = {}, {}
        for prefix, loader in loaders.items():
            metrics[prefix], positions[prefix], position = [], [], None
            with closing(loader.iterate()) as placed:
                for number, (batch, after) in enumerate(islice(placed, run.evaluate_batches)):
                    first_row = loader.shard(position).start
                    metrics[prefix].append(evaluate(state, batch, number, first_row))
                    positions[prefix].append(position or FIRST_POSITION)
                    position = after
        metrics = jax.device_get(metrics)
        # islands add up sums and counts, so the mean is that of all rows, however they are split
        sums = {
            f"{prefix}{name}": (mean.sum, mean.count)
            for prefix, of_batches in metrics.items()
            for name, mean in _merge(of_batches).items()
        }
        sums = coordination.sum_over_islands("evaluation", sums)
        means = {name: Mean(sum=total, count=count) for name, (total, count) in sums.items()}
        for name, prefix in zip(heldout, loaders, strict=True):
            loss = means.get(f"{prefix}loss", Mean()).value
            if loss is None:
                raise ValueError(nothing_counts(name, len(metrics[prefix])))
            if math.isnan(loss):
                bad = [i for i, x in enumerate(metrics[prefix]) if math.isnan(x["loss_sum"])]
                batches, own = loaders[prefix].batches, positions[prefix]
                why = explain(batches.load(own[bad[0]])) if bad and explain else []
                raise ValueError(not_a_number(name, bad, len(own), why))
        return {name: mean.value for name, mean in means.items() if mean.value is not None}

    return values


def heldout_prefix(name: str) -> str:
    """Return the beginning of the names of a held-out set's metrics.

    >>> heldout_prefix(""), heldout_prefix("code")
    ('heldout/', 'heldout/code/')
    """
    return f"heldout/{name}/" if name else "heldout/"


def heldout_text(name: str) -> str:
    """Return how messages call a held-out set.

    >>> heldout_text(""), heldout_text("code")
    ('the held-out data', "the held-out data 'code'")
    """
    return f"the held-out data {name!r}" if name else "the held-out data"


def nothing_counts(name: str, num_batches: int) -> str:
    """Return the message about a held-out set of which no row or token counts."""
    return (
        f"{heldout_text(name)} has no loss: every weight in its first {num_batches} batches is 0; give data"
        " with rows or tokens that count, evaluate more batches, or hold nothing out"
    )


def not_a_number(name: str, bad: Sequence[int], num_batches: int, why: Sequence[str]) -> str:
    """Return the message about a held-out set whose loss is NaN.

    Args:
      name: of the set.
      bad: numbers of the batches of this process whose loss is NaN.
      num_batches: how many it has evaluated.
      why: what is wrong with the first of them.
    """
    where = (
        f"in {len(bad)} of {num_batches} batches, the first of them number {bad[0]}" if bad else "elsewhere"
    )
    text = "; ".join(why) or (
        "its tokens and labels are in the model's range, so the model gives no numbers for it: look for"
        " inputs that are none, for parameters that are too large, or for a compute dtype of too little range"
    )
    return f"{heldout_text(name)} has a loss that is not a number (NaN), {where}: {text}"


def _merge(of_batches: Sequence[Mapping[str, Any]]) -> dict[str, Mean]:
    """Merge the sums and counts of batches by name."""
    means: dict[str, Mean] = {}
    for metrics in of_batches:
        pairs = {"loss": (metrics["loss_sum"], metrics["count"])}
        pairs |= {name: pair for name, pair in metrics.items() if name not in ("loss_sum", "count")}
        for name, (total, count) in pairs.items():
            means[name] = means.get(name, Mean()) + Mean(sum=float(total), count=float(count))
    return means


def make_select_params(run: Run, setup: RunSetup) -> Callable[[State], Any]:
    """Make the function that returns the parameters to evaluate and sample from, see `Run.evaluate_with`.

    They are placed as those that are trained.
    """
    if run.evaluate_with is None:
        return lambda state: state.params
    stored = setup.placement.state.opt_state
    select = jax.jit(
        lambda opt_state, params: evaluated_params(run.evaluate_with, on_device(opt_state, stored), params),
        out_shardings=setup.placement.state.params,
    )
    return lambda state: select(state.opt_state, state.params)
