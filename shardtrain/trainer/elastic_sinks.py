"""The metrics of a run whose islands come and go: the chief writes them, others keep the newest.

Next: `elastic_run.py`.
"""

from collections import deque
from collections.abc import Callable, Mapping

from shardtrain.report.sinks.sink import Sinks
from shardtrain.trainer.elastic_run import ElasticRun

KEPT_LINES = 64
"""Lines of metrics that an island keeps, to write them if the chief is lost before it has."""


class ElasticSinks:
    """A sink of which only the chief writes; others keep the newest lines, to write them if it is lost.

    Args:
      elastic: this island.
      step: steps done when it joined.
      open_sinks: (steps done) -> the sinks, with no later lines, and the step of the last line.
    """

    def __init__(
        self, elastic: ElasticRun, step: int, open_sinks: Callable[[int], tuple[Sinks, int | None]]
    ) -> None:
        self._elastic, self._open, self._step = elastic, open_sinks, step
        self._lines: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=KEPT_LINES)
        self._sinks: Sinks | None = None
        self.last_step: int | None = None
        if elastic.may_write():
            # this island has founded the run: what it did not restore is gone
            self._sinks, self.last_step = open_sinks(step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._lines.append((step, values))
        if not self._elastic.may_write():
            return
        if self._sinks is None:
            # what earlier chiefs have written is of steps that this island has done too
            self._sinks, self.last_step = self._open(step)
        while self._lines:
            step, values = self._lines.popleft()
            if self.last_step is None or step > self.last_step:
                self._sinks.write(step, values)
                self.last_step = step

    def close(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
