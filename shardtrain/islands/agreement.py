"""What all islands must have in common before the first step, and a diff of what they have not.

Owns the facts and the text; how they reach the other ranks is the caller's (`share`), so nothing
here knows MPI. Islands that run different programs would wait for each other without end.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib import metadata
from typing import Any

FREE = ("run_dir", "data.paths", "strategy.layout", "strategy.accumulate")
"""Fields of a run that may differ between islands, with all that is in them: they say where an island
keeps its files and how it cuts its share of the work. The data is compared by its fingerprint."""

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
    "mpi4py",
    "mpi4jax",
    "shardtrain",
)

JAX_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_prng_impl",
    "jax_enable_custom_prng",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_allow_f16_reductions",
    "jax_softmax_custom_jvp",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_debug_infs",
)
"""Options of jax that change results, or where a program stops."""

VARIABLES = ("NVIDIA_TF32_OVERRIDE",)
"""Variables of the environment, beside XLA_FLAGS, that change results."""

FREE_XLA_FLAGS = re.compile(r"xla_force_host_platform_device_count|.*(dump|cache|profile)")
"""Flags of XLA that change no result: how many devices are simulated, where it writes what."""

CHANGES = {
    "versions": "install the same versions on every host, from one lock file",
    "flags": "give every island the same XLA_FLAGS and JAX_ variables",
    "run": "start every island with the same run file and the same options",
    "data": "give every island a copy of the same data",
    "program": "their code differs: bring the run file, the model and shardtrain to one version",
}
"""Kind of fact -> what to do about it; any other kind is a tree of arrays."""

_TREE_CHANGE = "they build different models: bring the model's file and its options to one version"

_PLAIN_NAMES = ("versions", "flags", "run")
"""Kinds whose facts are known by their names alone."""

_WHERE_PRESENT = ("program",)
"""Kinds in which a fact is compared only between those that have it."""

_MOST_NAMES, _MOST_CHARACTERS = 4, 60


def facts(
    description: Mapping[str, Any],
    *,
    trees: Mapping[str, Any] | None = None,
    fingerprint: str | None = None,
    program: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """All facts of this rank, as flat data that JSON can hold: `kind/name` -> number, text, list or None.

    Args:
      description: the run, from `config.describe`.
      trees: kind -> pytree of arrays or shapes, such as {"parameters": specs.abstract.params}.
      fingerprint: of the data; without one the data's paths have to agree.
      program: from `program_fact`.
    """
    found = {**versions(), **flags(os.environ), **run_facts(description, fingerprint)}
    for kind, tree in (trees or {}).items():
        found |= tree_facts(kind, tree)
    # as it arrives at the others, so that a tuple here is not another value than a list there
    return json.loads(json.dumps(found | dict(program or {})))


def versions() -> dict[str, str | None]:
    """Versions of Python (its minor version) and of the packages that compute; None: not installed."""
    found: dict[str, str | None] = {"versions/python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[f"versions/{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[f"versions/{package}"] = None
    return found


def flags(environ: Mapping[str, str]) -> dict[str, Any]:
    """What changes results from outside: flags of XLA one by one, options of jax, variables.

    >>> found = flags({"XLA_FLAGS": "--xla_dump_to=/x --xla_cpu_enable_fast_math=true"})
    >>> [name for name in found if "xla" in name]
    ['flags/xla_cpu_enable_fast_math']
    """
    import jax

    xla = {}
    for word in environ.get("XLA_FLAGS", "").split():
        # XLA takes the last of two, and a flag without a value as true
        name, equals, value = word.lstrip("-").partition("=")
        if not FREE_XLA_FLAGS.match(name):
            xla[f"flags/{name}"] = value if equals else "true"
    return {
        **dict(sorted(xla.items())),
        **{f"flags/{name}": _plain(getattr(jax.config, name, None)) for name in JAX_OPTIONS},
        **{f"flags/{name}": environ.get(name) for name in VARIABLES},
    }


def run_facts(description: Mapping[str, Any], fingerprint: str | None) -> dict[str, Any]:
    """The fields of a run that must not differ, and its data.

    >>> run_facts({"batch": 32, "run_dir": "runs/a", "data.paths": ["x"]}, "f1a0")
    {'run/batch': 32, 'data/fingerprint': 'f1a0'}
    """
    free = FREE if fingerprint is not None else tuple(name for name in FREE if not name.startswith("data"))
    kept = {
        f"run/{name}": value
        for name, value in description.items()
        if not any(name == field or name.startswith(f"{field}.") for field in free)
    }
    return {**kept, "data/fingerprint": fingerprint}


def tree_facts(kind: str, tree: Any) -> dict[str, str]:
    """Dtype and shape of each array of a tree, by path.

    >>> import numpy as np
    >>> tree_facts("parameters", {"up": np.zeros((4, 8), np.float32)})
    {'parameters/up': 'float32 (4, 8)'}
    """
    import jax

    return {
        f"{kind}/{jax.tree_util.keystr(path, simple=True, separator='/')}": f"{x.dtype} {tuple(x.shape)}"
        for path, x in jax.tree.leaves_with_path(tree)
    }


def program_fact(lowered: str, **depends: Any) -> dict[str, str]:
    """The hash of a lowered program, to be compared with those that should have the same one.

    Args:
      lowered: `jax.jit(...).lower(...).as_text()`.
      depends: on what the program rightly depends, such as mesh, rows, microbatches, platform: where
        one of these differs, nothing is compared.

    >>> list(program_fact("module @jit_step {}", mesh="data=2", rows=16))
    ['program/step on mesh data=2, rows 16']
    """
    where = ", ".join(f"{name} {value}" for name, value in sorted(depends.items()))
    return {f"program/step on {where}" if where else "program/step": program_hash(lowered)}


def program_hash(lowered: str) -> str:
    """A hash of a lowered program's text that is the same in every process that lowers this program.

    Python callbacks and MPI communicators stand in it by their addresses, which are taken out.
    """
    lines = (_without_addresses(line) for line in lowered.splitlines())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _without_addresses(line: str) -> str:
    if "custom_call" not in line:
        return line
    return re.sub(r"\b(0x[0-9a-fA-F]{6,}|[0-9]{9,})\b", "address", line)


def _plain(value: Any) -> Any:
    """An option of jax as JSON has it; some are enumerations."""
    value = value.value if isinstance(value, Enum) else value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def check_agreement(
    share: Callable[[str, Any, float], Sequence[Any]],
    name: str,
    mine: Mapping[str, Any],
    timeout_seconds: float = 60.0,
) -> None:
    """Compare the facts of all ranks; they all end with the same error.

    Args:
      share: (name, value, timeout in seconds) -> the values of all ranks, by rank.
      name: of this rank, for people: "island 0 (host a)".
      mine: the facts of this rank, from `facts`.
      timeout_seconds: how long to wait for the others.

    Raises:
      ValueError: the diff.
    """
    gathered = share("agreement", {"name": name, "facts": dict(mine)}, timeout_seconds)
    text = disagreement([each["facts"] for each in gathered], [each["name"] for each in gathered])
    if text is not None:
        raise ValueError(text)


def disagreement(
    facts_by_rank: Sequence[Mapping[str, Any]], names: Sequence[str], most_lines: int = 8
) -> str | None:
    """A diff of the facts, which names the ranks, or None where all agree.

    Args:
      facts_by_rank: `kind/name` -> value, of each rank.
      names: of the ranks, for people.
      most_lines: facts of a kind that are shown; the others are counted.

    >>> print(disagreement([{"run/batch": 32}, {"run/batch": 64}, {"run/batch": 32}], ["a", "b", "c"]))
    islands do not agree, so nothing was started:
      batch: 32 on a, c; 64 on b
      -> start every island with the same run file and the same options
    """
    assert len(facts_by_rank) == len(names), (len(facts_by_rank), len(names))
    by_rank = [_entries(facts) for facts in facts_by_rank]
    lines: dict[str, list[str]] = {}
    for fact in dict.fromkeys(fact for facts in by_rank for fact in facts):
        kind, _, name = fact.partition("/")
        groups = _groups(fact, by_rank, names, everywhere=kind not in _WHERE_PRESENT)
        if len(groups) > 1:
            shown = name if kind in _PLAIN_NAMES else fact
            lines.setdefault(kind, []).append(f"{shown}: {_groups_text(groups)}")
    if not lines:
        return None
    text = ["islands do not agree, so nothing was started:"]
    for kind, found in lines.items():
        text += found[:most_lines]
        if len(found) > most_lines:
            text.append(f"and {len(found) - most_lines} more of {kind}")
        text.append(f"-> {CHANGES.get(kind, _TREE_CHANGE)}")
    return "\n  ".join(text)


def _entries(facts: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Facts as text; a table is compared entry by entry."""
    flat: dict[str, str] = {}
    for name, value in facts.items():
        flat |= (
            _entries(value, f"{prefix}{name}/")
            if isinstance(value, Mapping)
            else {prefix + name: repr(value)}
        )
    return flat


def _groups(
    fact: str, by_rank: Sequence[Mapping[str, str]], names: Sequence[str], *, everywhere: bool
) -> dict[str, list[str]]:
    """Value -> ranks that have it: most ranks first, at equal numbers that of the first rank."""
    groups: dict[str, list[str]] = {}
    for facts, name in zip(by_rank, names, strict=True):
        if fact in facts or everywhere:
            groups.setdefault(facts.get(fact, "(not there)"), []).append(name)
    return dict(sorted(groups.items(), key=lambda item: -len(item[1])))


def _groups_text(groups: Mapping[str, Sequence[str]]) -> str:
    values = _cut(list(groups))
    bare = [value.strip("'") for value in values]
    values = bare if len(set(bare)) == len(values) else values
    return "; ".join(
        f"{value} on {_names_text(names)}" for value, names in zip(values, groups.values(), strict=True)
    )


def _names_text(names: Sequence[str]) -> str:
    """
    >>> _names_text(["island 0 (host a)", "island 1 (host b)"])
    'island 0 (host a), island 1 (host b)'
    >>> _names_text("abcdef")
    'a, b, c and 3 more'
    """
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


def _cut(texts: Sequence[str]) -> list[str]:
    """Long texts from shortly before their first difference on."""
    if max(map(len, texts)) <= _MOST_CHARACTERS:
        return list(texts)
    columns = enumerate(zip(*texts, strict=False))
    same = next((i for i, column in columns if len(set(column)) > 1), min(map(len, texts)))
    start = max(same - 10, 0)
    end = start + _MOST_CHARACTERS
    return [f"{'...' if start else ''}{text[start:end]}{'...' if len(text) > end else ''}" for text in texts]
