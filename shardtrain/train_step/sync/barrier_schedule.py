"""Decide after which steps all islands wait for each other, to vote, save, evaluate or stop."""

from collections.abc import Sequence

from shardtrain.combine.synchronisation import Synchronisation


class BarrierSchedule:
    """The steps after which islands synchronise to vote, save, evaluate or stop.

    Every merge and every average of gradients is a barrier. Waves have a barrier only if all islands must do
    something, or if one of them requests it.

    Args:
      synchronisation: how islands are synchronised.
      last_step: the last step of the run.
      saves_every: steps between saves; None if saves are not planned by steps.
      others_every: steps between other actions of all islands, such as evaluations.

    Attributes:
      is_requested: whether this island requests a barrier as soon as possible.
      requested_step: the step of a requested barrier; -1 if none was requested.
      replayed: the steps of the barriers of an earlier run that is replayed.

    >>> waves = Synchronisation(on="deltas", every=4, distance=2)
    >>> barriers = BarrierSchedule(waves, last_step=30, saves_every=10)
    >>> [step for step in range(1, 31) if barriers.is_due(step)]
    [12, 20, 30]
    >>> barriers.requested_step = 16
    >>> barriers.is_due(16)
    True
    """

    def __init__(
        self,
        synchronisation: Synchronisation,
        last_step: int,
        saves_every: int | None = None,
        others_every: Sequence[int] = (),
    ) -> None:
        self._synchronisation, self._last_step = synchronisation, last_step
        self._saves_every, self._others_every = saves_every, tuple(others_every)
        self.is_requested, self.requested_step = False, -1
        self.replayed: frozenset[int] = frozenset()

    def is_due(self, step: int) -> bool:
        """Return whether there is a barrier after a step, planned or requested."""
        return step == self.requested_step or self.is_planned(step)

    def is_planned(self, step: int) -> bool:
        """Return whether the barrier after a step is known from the beginning."""
        every, saves_every = self._synchronisation.every, self._saves_every
        is_synchronous = self._synchronisation.is_synchronous(step)
        if step == self._last_step or step in self.replayed or is_synchronous:
            return True
        if self._synchronisation.distance is None:
            return step % every == 0 or (saves_every is not None and step % saves_every == 0)
        # at the end of a wave in which something becomes due
        periods = [saves_every, *self._others_every]
        return step % every == 0 and any(step // n > (step - every) // n for n in periods if n)
