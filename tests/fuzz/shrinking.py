"""Make a failing case smaller, as long as it still fails."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from case import Case
from forked import FAULTS, run_case

MOST_TRIALS = 60


def shrink(
    case: Case, end: str, run: Callable[[Case], dict[str, Any]] = run_case
) -> tuple[Case, dict[str, Any]]:
    """Return the smallest case found that ends as this one does, and its end.

    Args:
      case: a case that fails.
      end: how it ends.
      run: runs a case.
    """
    assert end in FAULTS
    best, found, trials, tried = case, run(case), 0, {str(case)}
    if found["end"] not in FAULTS:
        return case, found
    progress = True
    while progress:
        progress = False
        for smaller in smaller_cases(best):
            if str(smaller) in tried or trials >= MOST_TRIALS:
                continue
            tried.add(str(smaller))
            trials += 1
            outcome = run(smaller)
            if outcome["end"] == end:
                best, found, progress = smaller, outcome, True
                break
    return best, found


def smaller_cases(case: Case) -> Iterator[Case]:
    """Yield cases with something taken away, what saves most first."""
    for axis, size in case.mesh.items():
        without = {name: n for name, n in case.mesh.items() if name != axis}
        if without:
            yield replace(case, mesh=without)
        if size > 2:
            yield replace(case, mesh={**case.mesh, axis: 2})
    for each in fields(Case):
        if each.name not in ("kind", "model", "mesh", "rows", "names", "seed", "layout"):
            value = getattr(case, each.name)
            if value != each.default:
                yield replace(case, **{each.name: each.default})
    for name in case.layout:
        yield replace(case, layout={key: value for key, value in case.layout.items() if key != name})
    layers = case.model.get("layers", ())
    for number in range(len(layers)):
        yield _with(case, layers=layers[:number] + layers[number + 1 :])
    for number, word in enumerate(layers):
        parts = word.split(".")
        for part in range(1, len(parts)):
            if not parts[part].isdigit():
                shorter = ".".join(parts[:part] + parts[part + 1 :])
                yield _with(case, layers=(*layers[:number], shorter, *layers[number + 1 :]))
    if case.model.get("num_layers", 1) > 1:
        yield _with(case, num_layers=case.model["num_layers"] - 1)
    for name in OPTIONAL:
        if name in case.model:
            yield replace(case, model={key: value for key, value in case.model.items() if key != name})
    for rows in (case.rows // 2, case.rows - case.accumulate):
        if 0 < rows < case.rows and not case.shares:
            yield replace(case, rows=rows)


OPTIONAL = (
    "loss_chunk", "dropout", "scan", "positions", "norm", "activation", "tied", "bias", "post_norm",
    "parallel", "qk_norm", "window", "soft_cap", "num_kv_heads", "lora", "tokens", "head", "pooling",
)  # fmt: skip
"""Options of models that have a default."""


def _with(case: Case, **changes: Any) -> Case:
    return replace(case, model={**case.model, **changes})
