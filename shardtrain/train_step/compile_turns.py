"""When the stages of a pipeline compile: all at the same time, and replicas of a stage after the first one.

Replicas of a stage that share a host share its folder of compiled programs, and its cores: what the first one
has compiled the others load. Next: `stage_programs.py`.
"""

from collections.abc import Callable
from typing import Any

from shardtrain.train_step.island_merge import AllGather


class CompileTurns:
    """Calls what compiles programs; the first time, by name, in turns.

    Args:
      all_gather: gathers a value of every rank, by name.
      num_replicas: pipelines; one has nobody to wait for.
      waits: whether this island loads what the first pipeline has compiled.

    >>> seen = []
    >>> turns = CompileTurns(lambda name, value: seen.append(name) or [], num_replicas=2, waits=True)
    >>> [turns.call("update", lambda x: seen.append("called") or x, number) for number in (1, 2)]
    [1, 2]
    >>> seen
    ['update of the first pipeline is compiled', 'called', 'called']
    """

    def __init__(self, all_gather: AllGather, num_replicas: int, waits: bool) -> None:
        self._all_gather, self._num_replicas, self._waits = all_gather, num_replicas, waits
        self._done: set[str] = set()

    def call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function returns; all islands call it at the same place."""
        first = name not in self._done and self._num_replicas > 1
        self._done.add(name)
        if first and self._waits:
            self._all_gather(f"{name} of the first pipeline is compiled", None)
        found = function(*arguments)
        if first and not self._waits:
            self._all_gather(f"{name} of the first pipeline is compiled", None)
        return found

    def once(self, name: str, function: Callable[[], Any]) -> None:
        """Call a function the first time only."""
        if name not in self._done:
            self.call(name, function)
