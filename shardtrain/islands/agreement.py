"""Compare the facts of all ranks before the first step, and show a diff of facts that differ.

Islands that run different programs would wait for each other for ever. The caller passes an `all_gather`, so
nothing here depends on MPI. The facts are in `rank_facts.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardtrain.system.excerpts import some

CHANGES = {
    "versions": "install the same versions on every host, from one lock file",
    "flags": "give every island the same XLA_FLAGS and JAX_ variables",
    "run": "start every island with the same run file and the same options",
    "data": "give every island a copy of the same data",
    "program": "their code differs: bring the run file, the model and shardtrain to one version",
}
"""Kind of fact -> the change to make; any other kind is a tree of arrays."""

_TREE_CHANGE = "they build different models: bring the model's file and its options to one version"

_PLAIN_NAMES = ("versions", "flags", "run")
"""Kinds whose facts are shown without the kind."""

_WHERE_PRESENT = ("program",)
"""Kinds whose facts are compared only between the ranks that have them."""

_MOST_NAMES, _MOST_CHARACTERS = 4, 60


def check_agreement(
    all_gather: Callable[[str, Any, float], Sequence[Any]],
    name: str,
    mine: Mapping[str, Any],
    timeout_seconds: float = 60.0,
) -> None:
    """Compare the facts of all ranks; raise the same error on all of them.

    Args:
      all_gather: (name, value, timeout in seconds) -> the values of all ranks, by rank.
      name: the name of this rank, in messages: "island 0 (host a)".
      mine: the facts of this rank, from `facts`.
      timeout_seconds: time limit of the all-gather.

    Raises:
      ValueError: the diff.
    """
    gathered = all_gather("agreement", {"name": name, "facts": dict(mine)}, timeout_seconds)
    text = disagreement([each["facts"] for each in gathered], [each["name"] for each in gathered])
    if text is not None:
        raise ValueError(text)


def disagreement(
    facts_by_rank: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    most_lines: int = 8,
    title: str = "islands do not agree, so nothing was started:",
) -> str | None:
    """Return a diff of the facts, with the names of the ranks; None if all agree.

    Args:
      facts_by_rank: `kind/name` -> value, of each rank.
      names: the names of the ranks, in messages.
      most_lines: largest number of facts of a kind to show; the others are counted.
      title: first line of the text.

    >>> print(disagreement([{"run/batch": 32}, {"run/batch": 64}, {"run/batch": 32}], ["a", "b", "c"]))
    islands do not agree, so nothing was started:
      batch: 32 on a, c; 64 on b
      -> start every island with the same run file and the same options
    """
    assert len(facts_by_rank) == len(names), (len(facts_by_rank), len(names))
    by_rank = [_flatten(facts) for facts in facts_by_rank]
    lines: dict[str, list[str]] = {}
    # group the ranks by their value of each fact: several groups disagree
    for fact in dict.fromkeys(fact for facts in by_rank for fact in facts):
        kind, _, name = fact.partition("/")
        groups = _group_by_value(fact, by_rank, names, everywhere=kind not in _WHERE_PRESENT)
        if len(groups) > 1:
            shown = name if kind in _PLAIN_NAMES else fact
            lines.setdefault(kind, []).append(f"{shown}: {_groups_text(groups)}")
    if not lines:
        return None
    text = [title]
    # one section for each kind of fact, with the change to make
    for kind, found in lines.items():
        text += found[:most_lines]
        if len(found) > most_lines:
            text.append(f"and {len(found) - most_lines} more of {kind}")
        text.append(f"-> {CHANGES.get(kind, _TREE_CHANGE)}")
    return "\n  ".join(text)


def _flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten facts to text; mappings are compared entry by entry."""
    flat: dict[str, str] = {}
    for name, value in facts.items():
        flat |= (
            _flatten(value, f"{prefix}{name}/")
            if isinstance(value, Mapping)
            else {prefix + name: repr(value)}
        )
    return flat


def _group_by_value(
    fact: str, by_rank: Sequence[Mapping[str, str]], names: Sequence[str], *, everywhere: bool
) -> dict[str, list[str]]:
    """Group ranks by value: the largest group first; of equal groups that of the first rank."""
    groups: dict[str, list[str]] = {}
    for facts, name in zip(by_rank, names, strict=True):
        if fact in facts or everywhere:
            groups.setdefault(facts.get(fact, "(not there)"), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _groups_text(groups: Mapping[str, Sequence[str]]) -> str:
    values = _shorten(list(groups))
    bare = [value.strip("'") for value in values]
    values = bare if len(set(bare)) == len(values) else values
    return "; ".join(
        f"{value} on {some(names, _MOST_NAMES)}" for value, names in zip(values, groups.values(), strict=True)
    )


def _shorten(texts: Sequence[str]) -> list[str]:
    """Shorten long texts to the part around their first difference."""
    if max(map(len, texts)) <= _MOST_CHARACTERS:
        return list(texts)
    columns = enumerate(zip(*texts, strict=False))
    same = next((i for i, column in columns if len(set(column)) > 1), min(map(len, texts)))
    start = max(same - 10, 0)
    end = start + _MOST_CHARACTERS
    return [f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}" for text in texts]
