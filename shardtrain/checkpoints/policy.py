"""Decide when to save a checkpoint and which ones to keep. No jax.

`checkpointer.py` saves them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardtrain.errors.field_types import too_small, wrong_types
from shardtrain.errors.messages import refuse


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """When to save checkpoints, and which to keep.

    Args:
        every_steps: save after every step that is a multiple of this number. None means no such saves.
        every_minutes: save when the last save is this many minutes ago. None disables saves by time.
        keep: number of newest checkpoints to keep.
        keep_every: never delete checkpoints of steps that are multiples of this number. None disables it.
        fast: a folder on a disk of this host, such as a RAM disk: saves go there first, and are copied to the
            run folder in the background. None saves directly to the run folder.
        best: a held-out metric, such as heldout/loss: the checkpoint with its best value is kept too, and an
            evaluation that is better than all earlier ones is saved. None disables both.
        best_is: whether the lowest or the highest value of the metric `best` is the best.
        trained_only: save only the trained parameters of a run that starts from another checkpoint; the
            frozen ones are read from that checkpoint whenever the run resumes.

    Raises:
        ValueError: lists every value of a wrong type or out of range.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    keep: int = 3
    keep_every: int | None = None
    fast: Path | None = None
    best: str | None = None
    best_is: Literal["lowest", "highest"] = "lowest"
    trained_only: bool = False

    def __post_init__(self) -> None:
        problems = wrong_types(self) + too_small(self, every_steps=1, keep=1, keep_every=1)
        if self.every_minutes is not None and self.every_minutes <= 0:
            problems.append(f"every_minutes is {self.every_minutes}; use None, or more than 0")
        if self.best is not None and not self.best.startswith("heldout/"):
            use = "a held-out metric as it is logged: heldout/loss, heldout/NAME, heldout/SET/NAME"
            problems.append(f"best is {self.best}; use None, or {use}")
        refuse("checkpoints cannot be saved like this", problems)


def is_due(policy: CheckpointPolicy, step: int, seconds_since_last: float) -> bool:
    """Return whether to save after this step; one process decides for all, because clocks differ.

    Args:
        policy: the policy.
        step: steps done, from 1.
        seconds_since_last: seconds since the last save, or the run, began.

    Examples:
        >>> is_due(CheckpointPolicy(every_steps=10, every_minutes=5), 20, 0.0)
        True
        >>> is_due(CheckpointPolicy(every_steps=10, every_minutes=5), 21, 299.0)
        False
    """
    by_steps = policy.every_steps is not None and step % policy.every_steps == 0
    by_time = policy.every_minutes is not None and seconds_since_last >= 60 * policy.every_minutes
    return by_steps or by_time


def select_steps_to_delete(policy: CheckpointPolicy, steps: Iterable[int]) -> list[int]:
    """Return the steps of the complete checkpoints to delete, oldest first; never the newest.

    Args:
        policy: the policy.
        steps: the steps of all complete checkpoints.

    Examples:
        >>> select_steps_to_delete(CheckpointPolicy(keep=2, keep_every=100), [90, 100, 110, 120, 130])
        [90, 110]
    """
    older = sorted(set(steps))[: -policy.keep]
    return [step for step in older if policy.keep_every is None or step % policy.keep_every]
