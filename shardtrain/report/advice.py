"""Format the advice of `shardtrain advise`: save intervals, batch sizes, revocable hosts."""

import math
from collections.abc import Sequence

from shardtrain.plan.advice.checkpoint_interval import daly_interval, estimate_seconds, young_interval
from shardtrain.plan.advice.noise_scale import examples_factor, rate_factor, steps_factor
from shardtrain.plan.advice.revocable import (
    MOST_EVENTS,
    Outcome,
    RevocableRun,
    best_hosts,
    compute_outcome,
    simulate_outcome,
)
from shardtrain.report.quantities import duration_text
from shardtrain.report.tables import table_text


def interval_text(
    save_seconds: float,
    failure_seconds: float,
    restart_seconds: float,
    work_seconds: float,
    step_seconds: float | None,
) -> str:
    """Format how often to save by both formulas, and how long a run then takes.

    Args:
      save_seconds: seconds of a save.
      failure_seconds: mean time between failures of the run.
      restart_seconds: seconds from a failure until the run works again.
      work_seconds: seconds of the run without saves and failures.
      step_seconds: seconds of a step; None leaves out the interval in steps.
    """
    intervals = {
        "Young 1974, first order": young_interval(save_seconds, failure_seconds),
        "Daly 2006, higher order": daly_interval(save_seconds, failure_seconds),
    }
    rows = []
    for name, longest in intervals.items():
        # a save follows a step, and none follows the end of the work
        interval = min(max(longest, step_seconds or 0.0), work_seconds)
        takes = estimate_seconds(work_seconds, interval, save_seconds, failure_seconds, restart_seconds)
        steps = "" if step_seconds is None else f"{max(round(interval / step_seconds), 1)}"
        lost = "never ends" if math.isinf(takes) else f"{takes / work_seconds - 1:.1%}"
        every = duration_text(interval) if interval < work_seconds else "once, at the end"
        rows.append((name, every, steps, duration_text(takes), lost))
    text = table_text(("formula", "save every", "steps", "the run takes", "more than without"), rows)
    shortest = min(intervals.values())
    if step_seconds is not None and step_seconds > shortest:
        text += (
            f"a step takes {duration_text(step_seconds)}, longer than an interval of"
            f" {duration_text(shortest)}: more than one save a step is not possible\n"
        )
    return text


def noise_text(scale: float, batch: float, rate: float | None, exponent: float) -> str:
    """Format batches and learning rates that a gradient noise scale suggests.

    Args:
      scale: B_noise, in the unit of the batch.
      batch: the current batch.
      rate: its tuned learning rate; None shows rates as factors.
      exponent: exponent of the learning rate, see `rate_factor`.
    """
    if math.isinf(scale) or scale <= 0:
        return (
            f"the estimate of the noise scale is {scale:g}: too few steps were averaged, or the gradient is"
            " all noise; average more steps\n"
        )
    rows = []
    for each in sorted({batch, *(scale * factor for factor in (0.25, 0.5, 1, 2, 4))}):
        factor = rate_factor(batch, each, scale, exponent)
        shown = f"x {factor:.3g}" if rate is None else f"{rate * factor:.3g}"
        mark = "now" if each == batch else "critical" if each == scale else ""
        steps, examples = steps_factor(each, scale), examples_factor(each, scale)
        rows.append((f"{each:.4g}", f"{steps:.3g}", f"{examples:.3g}", shown, mark))
    title = f"gradient noise scale {scale:.4g}: the critical batch, in the unit of the batch"
    header = ("batch", "steps / fewest", "examples / fewest", "learning rate", "")
    return table_text(header, rows, title=title)


def revocable_text(run: RevocableRun, counts: Sequence[int], runs: int, seed: int) -> str:
    """Format expected time and cost for several numbers of hosts, and a simulation of the given number.

    Args:
      run: the run on its own number of hosts.
      counts: other numbers of hosts.
      runs: number of runs to simulate.
      seed: seed of the simulation.
    """
    rows = [
        (f"{count}", *_outcome_cells(outcome))
        for count, outcome in best_hosts(run, sorted({run.hosts, *counts}))
    ]
    if compute_outcome(run).revocations * runs <= MOST_EVENTS:
        rows.append((f"{run.hosts}, simulated", *_outcome_cells(simulate_outcome(run, runs, seed))))
    life = duration_text(run.host_life_seconds)
    title = f"hosts that are revoked after {life} on average; the others {run.others}\n"
    return title + table_text(("hosts", "time", "revocations", "cost"), rows)


def _outcome_cells(outcome: Outcome) -> tuple[str, str, str]:
    if math.isinf(outcome.seconds):
        return "never ends", "", ""
    return duration_text(outcome.seconds), f"{outcome.revocations:.1f}", f"{outcome.cost:.4g}"
