"""Compare clusters by what they have learned, not by examples alone: at equal examples, at equal time.

A step of batch B is worth 1 / (1 + B_noise / B) of a step with the true gradient (McCandlish et al. 2018,
section 2.3), so the cluster with most examples a second is not always the first to reach a loss.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shardtrain.plan.advice.checks import check_positive
from shardtrain.plan.advice.noise_scale import steps_factor


@dataclass(frozen=True, kw_only=True)
class ClusterSpeed:
    """A cluster by what it computes.

    Args:
      name: for the answer.
      batch: of a step on the whole cluster, in examples or tokens.
      step_seconds: of a step.
      price_per_hour: of the whole cluster.

    Raises:
      ValueError: lists every number out of range.
    """

    name: str
    batch: float
    step_seconds: float
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        check_positive(
            f"cluster {self.name}",
            {"batch": self.batch, "step_seconds": self.step_seconds},
            {"price_per_hour": self.price_per_hour},
        )


class Progress(NamedTuple):
    """What a cluster has done.

    Args:
      examples: in the unit of the batch.
      seconds: spent.
      progress: in steps with the true gradient: equal progress is an equal loss.
      cost: in the unit of the price.
    """

    examples: float
    seconds: float
    progress: float
    cost: float


def after_seconds(cluster: ClusterSpeed, noise_scale: float, seconds: float) -> Progress:
    """Return what a cluster has done after a time.

    >>> after_seconds(ClusterSpeed(name="a", batch=100, step_seconds=0.5), 100, 10.0).progress
    10.0
    """
    check_positive("progress", {"seconds": seconds})
    steps = seconds / cluster.step_seconds
    progress = steps / steps_factor(cluster.batch, noise_scale)
    return Progress(steps * cluster.batch, seconds, progress, seconds / 3600 * cluster.price_per_hour)


def after_examples(cluster: ClusterSpeed, noise_scale: float, examples: float) -> Progress:
    """Return what a cluster has done after a number of examples."""
    check_positive("progress", {"examples": examples})
    return after_seconds(cluster, noise_scale, examples / cluster.batch * cluster.step_seconds)


def until_progress(cluster: ClusterSpeed, noise_scale: float, progress: float) -> Progress:
    """Return what a cluster needs for some progress: the same loss on every cluster.

    >>> until_progress(ClusterSpeed(name="a", batch=100, step_seconds=0.5), 100, 10.0).seconds
    10.0
    """
    check_positive("progress", {"progress": progress})
    seconds = progress * steps_factor(cluster.batch, noise_scale) * cluster.step_seconds
    return after_seconds(cluster, noise_scale, seconds)
