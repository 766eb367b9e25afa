"""The account of samples: who computed which slots of each step, derived from the epochs alone.

A step belongs to the newest epoch that begins at it or before it, because an epoch begins at the first step
that the epoch before did not commit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from shardtrain.elastic.epoch import Epoch


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """A committed step.

    Args:
      step: number of the step; with several steps between exchanges, of the first one since the last.
      epoch: epoch of its sum.
      groups: member -> groups of its slots: it sums each group, and then adds these sums. There are several
        only if a step was repeated.
      repeats: the epoch that had begun the step; None if it was not repeated.
      why: what changed with the epoch.
    """

    step: int
    epoch: int
    groups: dict[str, tuple[tuple[int, ...], ...]]
    repeats: int | None
    why: str

    @property
    def slots(self) -> dict[str, tuple[int, ...]]:
        """Member -> its slots, in the order in which it summed them."""
        return {name: tuple(chain.from_iterable(groups)) for name, groups in self.groups.items()}


def list_ledger(
    epochs: Sequence[Epoch], num_steps: int, first: int = 0, plain: Mapping[int, int] = {}
) -> list[LedgerLine]:
    """Return the lines of committed steps.

    Args:
      epochs: all epochs of a run, in order.
      num_steps: number of steps that are committed.
      first: the first step to list.
      plain: see `History.plain`; these steps have no lines.

    Raises:
      ValueError: an epoch is missing.
    """
    lines = []
    for epoch, steps in zip(epochs, find_steps(epochs, num_steps, plain), strict=True):
        step = max(first, steps.start)
        while step < steps.stop:
            repeats = epoch.number - 1 if epoch.repeats and step == epoch.step else None
            groups = {name: _group_slots(epochs, epoch, step, name) for name in epoch.names}
            line = LedgerLine(step=step, epoch=epoch.number, groups=groups, repeats=repeats, why=epoch.why)
            lines.append(line)
            step = epoch.find_next(step)
    return lines


def find_steps(epochs: Sequence[Epoch], num_steps: int, plain: Mapping[int, int] = {}) -> list[range]:
    """Return the steps that each epoch committed; what came after a checkpoint that all died after is void.

    Args:
      epochs: all epochs of a run, in order.
      num_steps: number of steps that are committed.
      plain: see `History.plain`.

    Raises:
      ValueError: an epoch is missing.

    >>> from shardtrain.elastic.epoch import Peer, found_epoch
    >>> steps = find_steps([found_epoch(number, Peer(name="a", address=""), 5, 1) for number in (1, 2)], 9)
    >>> [list(each) for each in steps]
    [[], [5, 6, 7, 8]]
    >>> find_steps([found_epoch(1, Peer(name="a", address=""), 5, 1)], 9, plain={1: 7})
    [range(5, 7)]
    """
    if [epoch.number for epoch in epochs] != list(range(1, len(epochs) + 1)):
        raise ValueError(f"a ledger needs all epochs from 1, not {[epoch.number for epoch in epochs]}")
    begun = [*(epoch.step for epoch in epochs), num_steps]
    # what came before an epoch ends at its first step, or where the run was continued without islands
    ends = [min(step, plain.get(number, step)) for number, step in enumerate(begun)][1:]
    ends = list(accumulate(reversed(ends), min))[::-1]
    return [range(epoch.step, end) for epoch, end in zip(epochs, ends, strict=True)]


def count_batches(epochs: Sequence[Epoch], num_steps: int, plain: Mapping[int, int] = {}) -> int:
    """Return the number of batches that steps have read.

    Args:
      epochs: all epochs of a run, in order.
      num_steps: number of steps.
      plain: see `History.plain`; each of these steps has read one batch.

    Raises:
      ValueError: an epoch is missing.
    """
    number = num_steps
    for epoch, steps in zip(epochs, find_steps(epochs, num_steps, plain), strict=True):
        if steps and (last := epoch.find_batches(steps[-1])) is not None:
            number += last.stop - epoch.first_batch - len(steps)
    return number


def _group_slots(
    epochs: Sequence[Epoch], epoch: Epoch, step: int, name: str, most: int | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return the first slots of a member: what it kept of epochs before, and what it computed in this one."""
    kept = dict(zip(epoch.names, epoch.kept, strict=False)).get(name, 0) if step == epoch.step else 0
    groups = _group_slots(epochs, epochs[epoch.number - 2], step, name, kept) if kept else ()
    new = epoch.slots_of(step).get(name, ())[kept:most]
    return (*groups, new) if new else groups


def is_valid_checkpoint(epochs: Sequence[Epoch], step: int, number: int) -> bool:
    """Return whether a checkpoint is of the run as it went on, and not of a chief that was left behind.

    Args:
      epochs: all epochs of a run, in order.
      step: number of steps applied in the checkpoint.
      number: the epoch in its name.
    """
    return epochs[number - 1].step <= step <= min([epoch.step for epoch in epochs[number:]], default=step)
