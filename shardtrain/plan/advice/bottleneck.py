"""Compare the measured seconds of a step with those that a plan predicted, and name the likely bottleneck.

The phases are those that a run writes to its metrics (`seconds/KIND`). Values only: no jax.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

PARTS = ("compute_seconds", "bubble_seconds", "collectives_seconds", "update_seconds", "islands_seconds")
"""The predicted parts of a step, by their names in a strategy file."""

PHASE_OF_PART = {name: "islands" if name == "islands_seconds" else "step" for name in PARTS}
"""Part -> the phase in which it is measured; the whole compiled step is one phase."""

PHASES = {
    "input": "waiting for batches",
    "step": "the compiled step: computing, and what devices of a mesh send",
    "islands": "waiting for other islands and for what they exchange",
    "stages": "waiting for other stages",
    "save": "saves",
    "other": "the host's own work",
}
"""Phase of a step -> its description. Evaluations are not part of a plan."""

SLOW = 1.2
"""A rank is a straggler if its own work takes this many times as long as the median rank's."""


@dataclass(frozen=True, kw_only=True)
class StepPhases:
    """Measured seconds of a step.

    Args:
      seconds: phase -> seconds of a step on rank 0.
      own_seconds: rank -> seconds of its own work in a step, if several islands measured it.
    """

    seconds: Mapping[str, float]
    own_seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def straggler(self) -> str | None:
        """The rank that works much longer than the median rank; None if there is none."""
        if len(self.own_seconds) < 2:
            return None
        rank = max(self.own_seconds, key=lambda each: self.own_seconds[each])
        others = [seconds for each, seconds in self.own_seconds.items() if each != rank]
        return rank if self.own_seconds[rank] > SLOW * statistics.median(others) else None


def step_phases(lines: Sequence[Mapping[str, float]]) -> StepPhases | None:
    """Return the phases of a step from lines of metrics; None if there are too few lines.

    The first line is ignored. The phase "step" is a median, as a few lines include compilations; other phases
    are means, as a few lines include saves.

    Args:
      lines: lines of `metrics.jsonl`, in order, with "step" and `seconds/KIND` since the line before.

    >>> lines = [{"step": n, "seconds/step": s, "seconds/input": 1.0} for n, s in ((2, 9), (4, 2), (6, 2))]
    >>> step_phases(lines).seconds
    {'input': 0.5, 'step': 1.0}
    """
    measured = [line for line in lines if "seconds/step" in line]
    pairs = [
        (after, after["step"] - before["step"])
        for before, after in pairwise(measured)
        if after["step"] > before["step"]
    ]
    if not pairs:
        return None
    seconds = {}
    for phase in PHASES:
        name = f"seconds/{phase}"
        if any(name in line for line, _ in pairs):
            of_lines = [line.get(name, 0.0) / steps for line, steps in pairs]
            whole = sum(line.get(name, 0.0) for line, _ in pairs) / sum(steps for _, steps in pairs)
            seconds[phase] = statistics.median(of_lines) if phase == "step" else whole
    last = pairs[-1][0]
    own = {name.partition("/")[2]: value for name, value in last.items() if name.startswith("own_seconds/")}
    return StepPhases(seconds=seconds, own_seconds=own)


def differences(measured: StepPhases, predicted: Mapping[str, float]) -> dict[str, float]:
    """Return measured less predicted seconds of each phase, the largest difference first.

    Args:
      measured: the phases of a step.
      predicted: seconds of `PARTS`. {} means that nothing was predicted: only "step" has no difference.

    >>> phases = StepPhases(seconds={"input": 0.5, "step": 1.0}, own_seconds={})
    >>> differences(phases, {"compute_seconds": 0.75, "update_seconds": 0.125})
    {'input': 0.5, 'step': 0.125}
    """
    expected = dict.fromkeys(measured.seconds, 0.0)
    for part, seconds in predicted.items():
        phase = PHASE_OF_PART[part]
        expected[phase] = expected.get(phase, 0.0) + seconds
    if not predicted:
        expected["step"] = measured.seconds.get("step", 0.0)
    found = {phase: measured.seconds.get(phase, 0.0) - seconds for phase, seconds in expected.items()}
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))
