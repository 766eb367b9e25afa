"""The check `versions`: whether packages, flags, Python, system and driver are equal on all ranks."""

import sys
from collections.abc import Sequence
from dataclasses import replace

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, merge_rows
from shardtrain.islands.agreement import disagreement, flags, versions
from shardtrain.islands.mpi_library import PACKAGES as OF_MPI
from shardtrain.system.excerpts import some
from shardtrain.system.host import system_facts

SHOWN = ("python", "jax", "jaxlib", "flax", "mpi4py", "mpi4jax", "shardtrain")
SYSTEM = ("system", "machine", "libc", "driver")


def collect(context: RankContext) -> Facts:
    """Collect versions, flags, system and driver of this rank."""
    return {**versions(), **flags(context.environ), "python": sys.executable, **system_facts()}


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for packages and flags, which must be equal, and for systems, which may differ."""
    first = all_facts[0]
    missing = [name for name in SHOWN if first[f"versions/{name}"] is None]
    packages = Row("packages", ", ".join(f"{n} {first[f'versions/{n}']}" for n in SHOWN if n not in missing))
    # a single process needs no MPI; the check `mpi` reports it
    if set(missing) - set(OF_MPI):
        fix = "uv sync installs the packages that shardtrain needs"
        packages = Row("packages", f"not installed: {', '.join(missing)}", "wrong", fix)
    xla = [f"{name[6:]}={value}" for name, value in first.items() if name.startswith("flags/xla_")]
    rows = [
        _find_differences(all_facts, "versions") or packages,
        _find_differences(all_facts, "flags")
        or Row("flags", ", ".join(xla) or "no XLA flag that changes results"),
    ]
    rows += merge_rows(all_facts, _judge)
    if len({one["python"] for one in all_facts}) > 1:
        fix = "nothing while their packages are equal; one environment on a shared file system ensures that"
        rows[2] = replace(rows[2], status="note", fix=fix)
    drivers = {one["driver"] for one in all_facts if one["driver"]}
    if len(drivers) > 1:
        fix = f"install one GPU driver on all hosts (now {some(sorted(drivers))}): NCCL expects that"
        rows[3] = replace(rows[3], status="warning", fix=fix)
    elif len({tuple(one[n] for n in SYSTEM) for one in all_facts}) > 1:
        fix = "nothing: different hosts may round the last bits differently"
        rows[3] = replace(rows[3], status="note", fix=fix)
    return rows


def _judge(one: RankFacts) -> list[Row]:
    return [Row("python", one["python"]), Row("system", ", ".join(one[n] for n in SYSTEM if one[n]))]


def _find_differences(all_facts: Sequence[RankFacts], kind: str) -> Row | None:
    """Return the differences and their fixes, with the same text as before the first step of a run."""
    facts = [{k: v for k, v in one.items() if k.startswith(f"{kind}/")} for one in all_facts]
    text = disagreement(facts, [one.name for one in all_facts])
    if text is None:
        return None
    lines = [line.strip() for line in text.splitlines()[1:]]
    finding = "; ".join(line for line in lines if not line.startswith("->"))
    fix = "; ".join(line[3:] for line in lines if line.startswith("->"))
    return Row({"versions": "packages"}.get(kind, kind), finding, "wrong", fix)
