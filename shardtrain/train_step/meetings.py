"""After which steps all islands meet: only then can they vote, save, evaluate or stop together."""

from collections.abc import Sequence

from shardtrain.combine.synchronisation import Synchronisation


class Meetings:
    """After which steps all islands meet.

    They meet wherever they merge, or average gradients. In waves they do so only where something is to be
    done together, or where one of them has called a meeting.

    Args:
      synchronisation: how islands are synchronised.
      last_step: the last step of the run.
      saves_every: steps between saves; None: these are not planned by steps.
      others_every: steps between other things that are done together, such as evaluations.

    Attributes:
      is_wanted: this island wants a meeting as soon as possible.
      called: the step of a meeting that was called; -1: none was.
      repeated: the steps of the meetings of an earlier run, which is repeated.

    >>> waves = Synchronisation(on="deltas", every=4, distance=2)
    >>> meetings = Meetings(waves, last_step=30, saves_every=10)
    >>> [step for step in range(1, 31) if meetings.at(step)]
    [12, 20, 30]
    >>> meetings.called = 16
    >>> meetings.at(16)
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
        self.is_wanted, self.called = False, -1
        self.repeated: frozenset[int] = frozenset()

    def at(self, step: int) -> bool:
        """Return whether all islands meet after a step, as is planned or was called."""
        return step == self.called or self.is_planned(step)

    def is_planned(self, step: int) -> bool:
        """Return whether all islands know from the beginning that they meet after a step."""
        every, saves_every = self._synchronisation.every, self._saves_every
        is_synchronous = self._synchronisation.is_synchronous(step)
        if step == self._last_step or step in self.repeated or is_synchronous:
            return True
        if self._synchronisation.distance is None:
            return step % every == 0 or (saves_every is not None and step % saves_every == 0)
        # at the end of the wave in which something falls due
        periods = [saves_every, *self._others_every]
        return step % every == 0 and any(step // n > (step - every) // n for n in periods if n)
