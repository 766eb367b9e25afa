"""Format how islands of a plan are joined: bytes, seconds, gradient parts."""

import math

from shardtrain.combine.sync_trigger import ALWAYS
from shardtrain.plan.island_exchange import EXTRA_SHARE, candidates, own_copies
from shardtrain.plan.islands import ClusterPlan
from shardtrain.report.quantities import bytes_text, seconds_text
from shardtrain.report.tables import table_text

SENT_TERM = "the messages of the combiner, codecs and buckets included; all-reduces as rings"
EARLY_TERMS = (
    "step of the slowest island + sending",
    f"c = loss and gradients + {EXTRA_SHARE:.0%} of the step; a part that is ready after the share s of the"
    " cost is there at c - (1 - s) x c / microbatches, and sent after the one before; then the update",
)
"""The formulas of a step with gradients in one program, and in several."""


def format_join(plan: ClusterPlan) -> str:
    """Format how long a step waits until islands are joined."""
    if math.isinf(plan.link_bytes_per_second):
        return "no time, as no link is given"
    return f"{seconds_text(plan.join_seconds)} of it"


def synchronisations_text(plan: ClusterPlan) -> str:
    """Compare ways to join islands by the bytes that they send and the seconds that a step waits."""
    if len(plan.shares) == 1 or math.isinf(plan.link_bytes_per_second):
        return ""
    rows = []
    for name, each in candidates(plan.synchronisation).items():
        found = plan.estimate_join(each)
        programs = f", {plan.num_programs} programs" * (plan.num_programs > 1 and each.is_mean)
        rows.append(
            (
                f"{name}{programs}{' (planned)' * (each == plan.synchronisation)}",
                str(found.steps),
                f"{'at most ' * (each.when != ALWAYS)}{bytes_text(round(found.bytes_per_step))}",
                seconds_text(found.seconds),
                seconds_text(plan.island_seconds + found.seconds),
                f"{own_copies(each)} x parameters" if own_copies(each) else "none",
            )
        )
    header = ("--synchronisation", "steps a merge", "sent a step", "waited a step", "step", "more memory")
    title = "ways to join islands, which train differently: losses are not compared (docs/synchronisation.md)"
    return table_text(header, rows, title=title)


def early_text(plan: ClusterPlan) -> str:
    """Compare a step with gradients in one program and in several."""
    # only a mean of gradients is sent in parts, over a link whose speed is known
    if len(plan.shares) == 1 or not plan.synchronisation.is_mean or math.isinf(plan.link_bytes_per_second):
        return ""
    if (given := plan.given_programs) is not None:
        return (
            f"gradients in {given} program{'s at most' * (given > 1)}, as --gradient-parts says:"
            f" {seconds_text(plan.seconds)} a step\n"
        )
    if not plan.early:
        cost = seconds_text(EXTRA_SHARE * plan.island_seconds)
        return (
            f"gradients in one program: several (--gradient-parts) make a step {cost} longer, and sending"
            f" takes {seconds_text(plan.join_seconds)}\n"
        )
    if len(plan.early) == 1:
        return "gradients in one program (--gradient-parts): all are ready at its end only\n"
    numbers = ", ".join(str(each.num_programs) for each in plan.early)
    times = ", ".join(seconds_text(each.seconds) for each in plan.early)
    return (
        f"gradients in {numbers} programs at most (--gradient-parts): {times} a step;"
        f" planned: {plan.num_programs}\n"
    )


def explain_join(plan: ClusterPlan) -> str:
    """Format the bytes and seconds of joining islands with their formulas; empty without a link."""
    if len(plan.shares) == 1 or plan.merges is None or math.isinf(plan.link_bytes_per_second):
        return ""
    sent = plan.merges(plan.synchronisation).per_step
    rows = [
        ("sent in a step", bytes_text(round(sent)), SENT_TERM),
        ("sending", seconds_text(sent / plan.link_bytes_per_second), "sent / rate of the link of islands"),
    ]
    rows += [
        (
            f"step, gradients in {each.num_programs}",
            seconds_text(each.seconds),
            EARLY_TERMS[each.num_programs > 1],
        )
        for each in plan.early
    ]
    return table_text(("of an island", "", "from"), rows, title="islands joined")
