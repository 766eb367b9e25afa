"""Advice as the text that `shardtrain advise` prints."""

import math
from collections.abc import Sequence

from shardtrain.plan.advice.checkpoint_interval import daly_interval, expected_seconds, young_interval
from shardtrain.plan.advice.clusters import (
    ClusterSpeed,
    Progress,
    after_examples,
    after_seconds,
    until_progress,
)
from shardtrain.plan.advice.efficiency import (
    bandwidth_to_hide,
    most_devices,
    most_overhead,
    servers_to_hide,
    speedup,
)
from shardtrain.plan.advice.noise_scale import examples_factor, rate_factor, steps_factor
from shardtrain.plan.advice.revocable import (
    MOST_EVENTS,
    Outcome,
    RevocableRun,
    best_hosts,
    expected_outcome,
    simulated_outcome,
)
from shardtrain.plan.devices import GB
from shardtrain.report.quantities import count_text, duration_text
from shardtrain.report.tables import table_text


def devices_text(overhead_ratio: float, efficiency: float, devices: int) -> str:
    """Format how many devices an overhead allows, and what some devices would give.

    Args:
      overhead_ratio: seconds of overhead over seconds of computation on one device.
      efficiency: that is wanted.
      devices: for which speedup and largest overhead are shown.
    """
    most = most_devices(overhead_ratio, efficiency)
    faster = speedup(overhead_ratio, devices)
    return (
        f"efficiency {efficiency:.0%} with overhead {overhead_ratio:.3g} of computation:"
        f" {'any number of' if math.isinf(most) else f'at most {most:.0f}'} devices\n"
        f"{devices} devices: {faster:.3g} times as fast as one, efficiency {faster / devices:.0%};"
        f" {efficiency:.0%} needs an overhead of at most {most_overhead(efficiency, devices):.3g}\n"
    )


def synchronisation_text(
    parameter_bytes: float, members: int, compute_seconds: float, link_gb_per_second: float | None
) -> str:
    """Format what hides the synchronisation of gradients behind computation.

    Args:
      parameter_bytes: as they are sent.
      members: replicas.
      compute_seconds: of a step.
      link_gb_per_second: of a parameter server; None: servers are not asked for.
    """
    ring = bandwidth_to_hide(parameter_bytes, members, compute_seconds) / GB
    text = f"a ring of {members} replicas hides its all-reduce with {ring:.3g} GB/s from each\n"
    if link_gb_per_second is None:
        return text
    servers = servers_to_hide(parameter_bytes, members, link_gb_per_second * GB, compute_seconds)
    return text + f"parameter servers of {link_gb_per_second:g} GB/s each: {servers}\n"


def interval_text(
    save_seconds: float,
    failure_seconds: float,
    restart_seconds: float,
    work_seconds: float,
    step_seconds: float | None,
) -> str:
    """Format how often to save by both formulas, and what a run then takes.

    Args:
      save_seconds: of a save.
      failure_seconds: mean time between failures of the run.
      restart_seconds: from a failure until the run works again.
      work_seconds: of the run without saves and failures.
      step_seconds: of a step; None: the interval is not said in steps.
    """
    intervals = {
        "Young 1974, first order": young_interval(save_seconds, failure_seconds),
        "Daly 2006, higher order": daly_interval(save_seconds, failure_seconds),
    }
    rows = []
    for name, longest in intervals.items():
        # a save is after a step, and none is after the end of the work
        interval = min(max(longest, step_seconds or 0.0), work_seconds)
        takes = expected_seconds(work_seconds, interval, save_seconds, failure_seconds, restart_seconds)
        steps = "" if step_seconds is None else f"{max(round(interval / step_seconds), 1)}"
        lost = "never ends" if math.isinf(takes) else f"{takes / work_seconds - 1:.1%}"
        every = duration_text(interval) if interval < work_seconds else "once, at the end"
        rows.append((name, every, steps, duration_text(takes), lost))
    text = table_text(("formula", "save every", "steps", "the run takes", "more than without"), rows)
    shortest = min(intervals.values())
    if step_seconds is not None and step_seconds > shortest:
        text += (
            f"a step takes {duration_text(step_seconds)}, longer than an interval of"
            f" {duration_text(shortest)}: a save after every step is as often as can be\n"
        )
    return text


def noise_text(scale: float, batch: float, rate: float | None, exponent: float) -> str:
    """Format what a gradient noise scale says of batches and learning rates.

    Args:
      scale: B_noise, in the unit of the batch.
      batch: the batch that is used now.
      rate: its learning rate, if it is well tuned; None: rates are shown as factors.
      exponent: of the learning rate, see `rate_factor`.
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
    """Format expected time and cost for several numbers of hosts, beside the simulation of the given one.

    Args:
      run: the run on its own number of hosts.
      counts: other numbers of hosts.
      runs: how many runs to simulate.
      seed: of the simulation.
    """
    rows = [
        (f"{count}", *_outcome_cells(outcome))
        for count, outcome in best_hosts(run, sorted({run.hosts, *counts}))
    ]
    if expected_outcome(run).revocations * runs <= MOST_EVENTS:
        rows.append((f"{run.hosts}, simulated", *_outcome_cells(simulated_outcome(run, runs, seed))))
    life = duration_text(run.host_life_seconds)
    title = f"hosts that are revoked after {life} on average; the others {run.others}\n"
    return title + table_text(("hosts", "time", "revocations", "cost"), rows)


def _outcome_cells(outcome: Outcome) -> tuple[str, str, str]:
    if math.isinf(outcome.seconds):
        return "never ends", "", ""
    return duration_text(outcome.seconds), f"{outcome.revocations:.1f}", f"{outcome.cost:.4g}"


def clusters_text(clusters: Sequence[ClusterSpeed], noise_scale: float, seconds: float) -> str:
    """Format how clusters compare at equal examples, at equal time and at an equal loss.

    Args:
      clusters: the clusters.
      noise_scale: B_noise, in the unit of their batches.
      seconds: the time; the examples are those of the first cluster in this time.
    """
    first = after_seconds(clusters[0], noise_scale, seconds)
    parts = (
        (f"equal time: {duration_text(seconds)}", lambda each: after_seconds(each, noise_scale, seconds)),
        (
            f"equal examples: {count_text(first.examples)}",
            lambda each: after_examples(each, noise_scale, first.examples),
        ),
        (
            f"equal loss: that of {clusters[0].name} in this time",
            lambda each: until_progress(each, noise_scale, first.progress),
        ),
    )
    header = ("cluster", "time", "examples", "progress", "cost")
    return "".join(
        table_text(
            header,
            [(each.name, *_progress_cells(of(each), first)) for each in clusters],
            title=title,
        )
        for title, of in parts
    )


def _progress_cells(done: Progress, first: Progress) -> tuple[str, str, str, str]:
    """Return cells of a row; progress relative to the first cluster at equal time."""
    share = done.progress / first.progress
    return duration_text(done.seconds), count_text(done.examples), f"{share:.0%}", f"{done.cost:.4g}"
