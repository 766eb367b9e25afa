"""Collect the facts of a rank that must be equal on all islands, compare them, and show a diff of others.

Islands that run different programs would wait for each other for ever. The caller passes an `all_gather`, so
nothing here depends on MPI. The facts are flat JSON data: versions, flags, run, data, program.
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


FREE = (
    *("run_dir", "data.paths", "data.tokenizer", "data.parts", "loading", "replay"),
    *("strategy.layout", "strategy.accumulate", "strategy.remat", "strategy.compute_dtype"),
    "strategy.predicted",
)
"""Fields of a run, with their subfields, that may differ between islands: paths of files, and how an island
splits its share of the work. The data is compared by its fingerprint."""

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
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
"""Environment variables that change results, in addition to XLA_FLAGS."""

FREE_XLA_FLAGS = re.compile(r"xla_force_host_platform_device_count|.*(dump|cache|profile)")
"""XLA flags that do not change results: the number of simulated devices, and output paths."""


def facts(
    description: Mapping[str, Any],
    *,
    trees: Mapping[str, Any] | None = None,
    fingerprint: str | None = None,
    program: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return all facts of this rank, flat, for JSON: `kind/name` -> number, text, list or None.

    Args:
      description: the run, from `config.describe`.
      trees: kind -> pytree of arrays or shapes, such as {"parameters": specs.abstract.params}.
      fingerprint: the fingerprint of the data; None compares the paths of the data instead.
      program: from `program_fact`.
    """
    found = {**versions(), **flags(os.environ), **run_facts(description, fingerprint)}
    for kind, tree in (trees or {}).items():
        found |= tree_facts(kind, tree)
    # in the form in which the other ranks receive it: a tuple must equal a list
    return json.loads(json.dumps(found | dict(program or {})))


def versions() -> dict[str, str | None]:
    """Return the versions of Python (major.minor) and of packages; None for one that is not installed."""
    found: dict[str, str | None] = {"versions/python": ".".join(platform.python_version_tuple()[:2])}
    for package in PACKAGES:
        try:
            found[f"versions/{package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[f"versions/{package}"] = None
    return found


def flags(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the flags of XLA, options of jax and variables that change results.

    >>> found = flags({"XLA_FLAGS": "--xla_dump_to=/x --xla_cpu_enable_fast_math=true"})
    >>> [name for name in found if "xla" in name]
    ['flags/xla_cpu_enable_fast_math']
    """
    import jax

    xla = {}
    for word in environ.get("XLA_FLAGS", "").split():
        # for XLA the last of two equal flags counts, and a flag without a value is true
        name, equals, value = word.lstrip("-").partition("=")
        if not FREE_XLA_FLAGS.match(name):
            xla[f"flags/{name}"] = value if equals else "true"
    return {
        **dict(sorted(xla.items())),
        **{f"flags/{name}": _plain(getattr(jax.config, name, None)) for name in JAX_OPTIONS},
        **{f"flags/{name}": environ.get(name) for name in VARIABLES},
    }


def run_facts(description: Mapping[str, Any], fingerprint: str | None) -> dict[str, Any]:
    """Return the fields of a run that must be equal, and the fingerprint of its data.

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
    """Return dtype and shape of each array of a tree, by path.

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
    """Return the hash of a lowered program, under a name that equal programs share.

    Args:
      lowered: `jax.jit(...).lower(...).as_text()`.
      depends: values on which the program depends, such as mesh, rows, microbatches and platform; programs
        are compared only if all of them are equal.

    >>> list(program_fact("module @jit_step {}", mesh="data=2", rows=16))
    ['program/step on mesh data=2, rows 16']
    """
    where = ", ".join(f"{name} {value}" for name, value in sorted(depends.items()))
    return {f"program/step on {where}" if where else "program/step": program_hash(lowered)}


def program_hash(lowered: str) -> str:
    """Hash the text of a lowered program, with the same result in every process that lowers it.

    Addresses of Python callbacks and MPI communicators are removed from the text first.
    """
    lines = (_remove_addresses(line) for line in lowered.splitlines())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _remove_addresses(line: str) -> str:
    if "custom_call" not in line:
        return line
    return re.sub(r"\b(0x[0-9a-fA-F]{6,}|[0-9]{9,})\b", "address", line)


def _plain(value: Any) -> Any:
    """Return an option of jax as a JSON value; some are enumerations."""
    value = value.value if isinstance(value, Enum) else value
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
