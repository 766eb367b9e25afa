"""Estimate the gradient noise scale, and the batch size and learning rate that it suggests.

Source: McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", https://arxiv.org/abs/1812.06162:
section 2 (steps, examples and learning rate by batch) and appendix A.1 (the estimate from two batch sizes).
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

DECAY = 0.99
"""Decay of the moving averages, which are over about the last 1 / (1 - DECAY) = 100 steps."""


class GradientNoise(NamedTuple):
    """Estimates of the true gradient and of the noise of one example's gradient.

    Args:
      gradient_square: |G|^2, the squared norm of the gradient over all data.
      trace: tr(Sigma), the sum of the variances of the gradient of one example.
    """

    gradient_square: float
    trace: float

    @property
    def scale(self) -> float:
        """The simple noise scale B_simple = tr(Sigma) / |G|^2, in units of the batch.

        The estimate of |G|^2 may be below zero if it was averaged over too few steps: then it is inf.
        """
        return self.trace / self.gradient_square if self.gradient_square > 0 else math.inf

    def smooth(self, newer: "GradientNoise") -> "GradientNoise":
        """Add the estimate of one more step to the moving averages, which begin with `NO_NOISE`.

        Both averages begin at zero, which cancels in their ratio.

        >>> NO_NOISE.smooth(GradientNoise(2.0, 600.0)).smooth(GradientNoise(1.0, 300.0)).scale
        300.0
        """
        return GradientNoise(*(DECAY * old + (1 - DECAY) * new for old, new in zip(self, newer, strict=True)))


NO_NOISE = GradientNoise(0.0, 0.0)
"""The moving averages before the first step."""


def gradient_noise(
    small_batch: float, small_square: float, big_batch: float, big_square: float
) -> GradientNoise:
    """Estimate gradient and noise from squared gradient norms at two batch sizes, without bias.

    E|G_B|^2 = |G|^2 + tr(Sigma) / B, solved for both. Average the squared norms over steps first: the ratio
    of noisy estimates is biased.

    Args:
      small_batch: the smaller batch, in examples or tokens.
      small_square: mean squared norm of its gradient.
      big_batch: the larger batch, in the same unit.
      big_square: mean squared norm of its gradient, at the same parameters.

    Raises:
      ValueError: a number is out of range, or the batches are not in order.

    >>> gradient_noise(16, 1.0 + 800 / 16, 64, 1.0 + 800 / 64).scale
    800.0
    """
    if small_batch >= big_batch:
        raise ValueError(
            f"a gradient noise scale was asked for from batches of {small_batch:g} and {big_batch:g}; give"
            " two different sizes, the smaller one first"
        )
    square = (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)
    trace = (small_square - big_square) / (1 / small_batch - 1 / big_batch)
    return GradientNoise(square, trace)


def read_logged_noise(lines: Sequence[Mapping[str, float]], name: str) -> tuple[GradientNoise, float]:
    """Average the logged noise of a run with `gradient_noise_scale` over the newer half of its steps.

    Args:
      lines: lines of metrics of the run.
      name: name of the run, for the message.

    Returns:
      (the estimates of gradient and noise, the last batch in examples or tokens).

    Raises:
      ValueError: no line has the noise.
    """
    names = [f"train/gradient_{each}" for each in ("square", "trace", "batch")]
    before, found = 0.0, []
    for line in lines:
        # a line is the mean over the steps since the one before it
        if all(each in line for each in names):
            found.append((line["step"], line["step"] - before, [line[each] for each in names]))
        before = line["step"]
    if not found:
        raise ValueError(
            f"no line of metrics of {name} has the gradients' noise; train with"
            " --gradient-noise-scale, at least until the first line of metrics"
        )
    newer = [(steps, values) for step, steps, values in found if step > found[-1][0] / 2]
    num_steps = sum(steps for steps, _ in newer)
    square, trace = (sum(steps * values[i] for steps, values in newer) / num_steps for i in range(2))
    return GradientNoise(square, trace), found[-1][2][2]


def steps_factor(batch: float, noise_scale: float) -> float:
    """Return the steps to a loss, relative to the fewest steps of any batch: 1 + B_noise / B.

    >>> steps_factor(800, 800)
    2.0
    """
    return 1 + noise_scale / batch


def examples_factor(batch: float, noise_scale: float) -> float:
    """Return the examples to a loss, relative to the fewest examples of any batch: 1 + B / B_noise.

    At the critical batch B = B_noise both factors are 2: (S / S_min - 1) (E / E_min - 1) = 1.

    >>> examples_factor(200, 800)
    1.25
    """
    return 1 + batch / noise_scale


def rate_factor(batch: float, new_batch: float, noise_scale: float, exponent: float = 1.0) -> float:
    """Return the factor for a well tuned learning rate if the batch changes.

    The best rate is e_max / (1 + B_noise / B): linear in small batches, constant above the noise scale.

    Args:
      batch: the batch that the rate was tuned for.
      new_batch: the other batch.
      noise_scale: B_noise, in the same unit.
      exponent: 1 for SGD; for Adam the source found 0.5 to 1 (appendix E.2), 0.5 is the square root rule.

    >>> round(rate_factor(16, 32, 1e6), 3), round(rate_factor(16, 32, 1e6, 0.5), 3)
    (2.0, 1.414)
    """
    return (steps_factor(batch, noise_scale) / steps_factor(new_batch, noise_scale)) ** exponent
