"""Add up numbers over the stages of one pipeline, without the other pipelines. Next: `stage_step.py`."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from shardtrain.train_step.seats import Seats

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI


class StageSums:
    """Sums over the stages of one pipeline, equal on all of them; also how they decide together in waves.

    Args:
      seats: which island has which stage.
      mailbox: to the other stages of this pipeline.
      tag: MPI tag of the messages.
    """

    def __init__(self, seats: Seats, mailbox: "Mailbox", tag: int) -> None:
        self._seats, self._mailbox, self._tag = seats, mailbox, tag

    def add(self, name: str, tree: Any) -> Any:
        """Return the sums of a tree of numbers over all stages, in float64; all stages must join.

        Args:
          name: what is added up, for the message where a stage is missing.
          tree: numbers, the same structure on all stages.
        """
        leaves, structure = jax.tree.flatten(tree)
        own, stage, mailbox = np.array(leaves, np.float64), self._seats.stage, self._mailbox
        others = [other for other in range(self._seats.num_stages) if other != stage]
        for other in others:
            mailbox.send(own, other, self._tag)
        found = {stage: own}
        for other in others:
            what = f"{name} of stage {other}"
            found[other] = mailbox.receive(own.shape, own.dtype, other, self._tag, what)
        # in the order of stages: the same bits on all of them
        return jax.tree.unflatten(structure, list(np.sum([found[each] for each in sorted(found)], 0)))

    def any_wants_meeting(self, own: bool) -> bool:
        """Return whether a stage of this pipeline wants all islands to meet."""
        return self.add("the wish to meet", float(own)) > 0

    def meeting(self, answered: int) -> int:
        """Return the wave of the meeting that the first stage was told."""
        return int(self.add("the next meeting", float(answered) if self._seats.stage == 0 else 0.0))
