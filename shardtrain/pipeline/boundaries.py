"""Find the boundaries at which a traced program can be cut, also in another trace of the same model.

A boundary is between the first uses of two parameters of different layers, and the first dim of all values
that are computed before it and read after it is the rows of the batch. Next: `traced_cut.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from shardtrain.jaxpr.segments import Program, Signature


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """A place to cut a program.

    Args:
      params: the paths of the parameters whose first use is before it.
      states: the numbers of the model states that are used before it.
      sent: the values that cross it.
    """

    params: frozenset[str]
    states: frozenset[int]
    sent: tuple[Signature, ...]


class Boundaries:
    """The places where a model can be cut, in training and in evaluation.

    Args:
      program: a trace of the model in training.
      wide: a trace for twice the rows, which shows which dims are rows.
      evaluation: a trace of the model in evaluation.
      params: the paths of the parameters.
      states: the paths of the model states.
      num_rows: the number of rows of `program`.

    Attributes:
      found: the places, in order.
      problems: why the model cannot be cut at other places.

    Raises:
      ValueError: the operations of the program depend on the number of rows.
    """

    def __init__(
        self,
        *,
        program: Program,
        wide: Program,
        evaluation: Program,
        params: Sequence[str],
        states: Sequence[str],
        num_rows: int,
    ) -> None:
        self._program, self._evaluation = program, evaluation
        self._params, self._states, self._num_rows = params, states, num_rows
        if len(program.equations) != len(wide.equations):
            raise ValueError(
                f"the model does other operations for {num_rows} rows than for {2 * num_rows}, so it cannot"
                " be cut by tracing; let it do the same for any number"
            )
        self._wrong = self._find_without_rows(wide)
        self.problems: list[str] = []
        self.found = self._find()

    def _find(self) -> list[Boundary]:
        by_use: dict[int, list[str]] = {}
        for path, number in self._find_first_uses(self._program).items():
            by_use.setdefault(number, []).append(path)
        found, before = [], list[str]()
        for earlier, later in pairwise(sorted(by_use)):
            before += by_use[earlier]
            if _share_layer(by_use[earlier], by_use[later]):
                continue
            boundary = self._find_best(range(later, earlier, -1), frozenset(before))
            if boundary is not None:
                found.append(boundary)
            else:
                problem = self._problem(later) or "other values cross in evaluation than in training"
                self.problems.append(f"between {by_use[earlier][-1]} and {by_use[later][0]} {problem}")
        return found

    def _find_best(self, positions: Iterable[int], params: frozenset[str]) -> Boundary | None:
        """Return the place at which the fewest bytes cross, among some positions; None if there is none."""
        program = self._program
        for position in sorted(positions, key=lambda p: program.num_bytes[p]):
            if self._problem(position):
                continue
            states = frozenset(s for s, (_, end) in program.state_spans.items() if end < position)
            boundary = Boundary(params=params, states=states, sent=program.signature(position))
            again = self._locate(self._evaluation, boundary)
            if again is not None:
                # states that training does not use are placed where evaluation uses them
                spans = self._evaluation.state_spans
                more = {s for s, (_, end) in spans.items() if end < again and s not in program.state_spans}
                return replace(boundary, states=states | more)
        return None

    def _find_without_rows(self, wide: Program) -> dict[Any, str]:
        """Return value -> shape of the values of which not exactly the first dim is the rows."""
        found = {}
        for ours, theirs in zip(self._program.equations, wide.equations, strict=True):
            for v, other in zip(ours.outvars, theirs.outvars, strict=True):
                sizes = zip(v.aval.shape, other.aval.shape, strict=True)
                rows = [dim for dim, (size, wide_size) in enumerate(sizes) if size != wide_size]
                if rows != [0] or v.aval.shape[0] != self._num_rows:
                    found[v] = v.aval.str_short()
        return found

    def _problem(self, position: int) -> str:
        """Return why the program cannot be cut at a position; "" if it can."""
        for state, (begin, end) in self._program.state_spans.items():
            if begin < position <= end:
                return f"the model state {self._states[state]} is used on both sides"
        for v in self._program.crossing(position):
            if v in self._wrong:
                return f"crosses {self._wrong[v]}, an array whose first dim is not the rows of the batch"
        return ""

    def position(self, program: Program, boundary: Boundary) -> int:
        """Return the position of a boundary in another trace of the model.

        Raises:
          ValueError: the trace has no such place.
        """
        found = self._locate(program, boundary)
        if found is not None:
            return found
        values = ", ".join(map(str, boundary.sent))
        raise ValueError(
            f"the model was cut by tracing where {values} crosses, and has no such place when it is traced"
            " for other rows; let it do the same for any number, or give it `blocks` (docs/pipeline.md)"
        )

    def _locate(self, program: Program, boundary: Boundary) -> int | None:
        """Return the last position between the same parameters that the same values cross, if any."""
        uses = self._find_first_uses(program)
        earliest = max((number for path, number in uses.items() if path in boundary.params), default=-1)
        latest = min((number for path, number in uses.items() if path not in boundary.params), default=-1)
        known = self._program.state_spans.keys() | boundary.states
        for position in range(latest, earliest, -1):
            # each state is on the same side in all traces
            fits = all(
                end < position if state in boundary.states else begin >= position or state not in known
                for state, (begin, end) in program.state_spans.items()
            )
            split = any(begin < position <= end for begin, end in program.state_spans.values())
            if fits and not split and program.signature(position) == boundary.sent:
                return position
        return None

    def _find_first_uses(self, program: Program) -> dict[str, int]:
        """Return the first equation that reads each parameter."""
        uses = program.first_use.items()
        return {self._params[weight]: number for weight, number in uses if weight < len(self._params)}


def _share_layer(earlier: Sequence[str], later: Sequence[str]) -> bool:
    """Return whether some parameters belong to one layer, such as its kernel and bias."""
    return bool({_find_layer(path) for path in earlier} & {_find_layer(path) for path in later} - {""})


def _find_layer(path: str) -> str:
    """Return the path of a parameter's layer; each parameter of a list is a layer.

    >>> _find_layer("down/kernel"), _find_layer("weights/0"), _find_layer("table")
    ('down', 'weights/0', '')
    """
    parent, _, name = path.rpartition("/")
    return path if name.isdecimal() else parent
