"""Compare measured with predicted seconds of a step, in one line."""

from collections.abc import Mapping, Sequence

from shardtrain.plan.advice.bottleneck import PHASES, differences, step_phases
from shardtrain.report.quantities import seconds_text


def speed_text(lines: Sequence[Mapping[str, float]], predicted: Mapping[str, float]) -> str | None:
    """Format measured and predicted seconds of a step, and the phase that makes most of the difference.

    Args:
      lines: lines of the metrics of a run.
      predicted: seconds of a step by part, see `bottleneck.PARTS`; {} without a prediction.

    Returns:
      One line without a newline; None if fewer than two lines were measured.
    """
    measured = step_phases(lines)
    if measured is None:
        return None
    text = f"measured {seconds_text(measured.total)} a step"
    phase, seconds = next(iter(differences(measured, predicted).items()))
    if predicted:
        expected = sum(predicted.values())
        ratio = f" ({measured.total / expected:.2f} times)" if expected else ""
        text += f", predicted {seconds_text(expected)}{ratio}; most of the difference: "
    else:
        text += ", no prediction; longest work outside the step: "
    more = "" if seconds >= 0 else "less "
    text += f"{more}{phase} {seconds_text(abs(seconds))} ({PHASES[phase]})"
    if measured.straggler is not None:
        own = measured.own_seconds[measured.straggler]
        text += f"; rank {measured.straggler} works longest, {seconds_text(own)} a step"
    return text
