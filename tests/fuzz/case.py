"""One case of the fuzzer: a model, a layout and a batch, and the words that write it.

Next: `drawing.py`, which draws cases; `checked.py`, which runs one.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

TUPLES = ("layers", "shape")
"""Options of models that are several words."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a layout and a batch.

    Args:
      kind: of the model, a name of `subjects.SUBJECTS`.
      model: options of the model.
      mesh: axis -> size.
      names: how parameters of a model without names are named: none, mlp, back, turns or axes.
      layout: options of `Layout` other than the mesh.
      remat: of `Strategy`.
      schedule: of the pipeline.
      virtual: virtual stages.
      accumulate: microbatches.
      rows: of a batch.
      samples: of the training data; fewer than `rows` leave rows of padding.
      weights: `none`, `rows` or `tokens`.
      packed: whether a row is several documents that do not see each other.
      shares: rows of islands, whose sums are added here in one process; () for one island.
      operators: draws a sharding of its own for each operator; 0 for rules alone.
      seed: of the parameters and the data.
    """

    kind: str
    model: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    names: str = "none"
    layout: Mapping[str, Any] = field(default_factory=dict)
    remat: Any = None
    schedule: str = "1f1b"
    virtual: int = 1
    accumulate: int = 1
    rows: int = 8
    samples: int = 0
    weights: str = "none"
    packed: bool = False
    shares: tuple[int, ...] = ()
    operators: int = 0
    seed: int = 0

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return prod(self.mesh.values())

    @property
    def num_samples(self) -> int:
        """Samples of the training data."""
        return self.samples or self.rows

    def __str__(self) -> str:
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value not in (each.default, {}, ()):
                words.append(f"{each.name}={_text(value)}")
        return " ".join(words)


def read_case(text: str) -> Case:
    """Read a case from its words.

    >>> case = read_case("kind=decoder mesh=data:2,fsdp:2 layout=zero:1 rows=16")
    >>> case.mesh, case.layout, case.rows
    ({'data': 2, 'fsdp': 2}, {'zero': 1}, 16)
    >>> str(case)
    'kind=decoder mesh=data:2,fsdp:2 layout=zero:1 rows=16'
    """
    found: dict[str, Any] = {}
    for word in text.split():
        name, _, value = word.partition("=")
        if name in ("model", "mesh", "layout"):
            pairs = (pair.partition(":") for pair in value.split(","))
            found[name] = {key: _words(each) if key in TUPLES else _value(each) for key, _, each in pairs}
        elif name == "shares":
            found[name] = tuple(map(int, _words(value)))
        else:
            found[name] = _value(value)
    return Case(**found)


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}:{_text(each)}" for key, each in value.items())
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).replace(",", "|")


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split("+")))


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text.replace("|", ",")
