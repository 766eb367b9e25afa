"""Collect the facts of a rank that must be equal on all islands: versions, flags, run, data, program.

The facts are flat JSON data; `agreement.py` compares them before the first step.
"""

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from enum import Enum
from importlib import metadata
from typing import Any

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
