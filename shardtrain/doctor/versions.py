"""The check `versions`: whether packages, flags, Python, system and driver are equal on all ranks."""

import sys
from collections.abc import Sequence

from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, join_texts
from shardtrain.islands.agreement import disagreement
from shardtrain.islands.mpi_library import PACKAGES as OF_MPI
from shardtrain.islands.rank_facts import flags, versions
from shardtrain.system.excerpts import some
from shardtrain.system.host import system_facts

SHOWN = ("python", "jax", "jaxlib", "flax", "mpi4py", "mpi4jax", "shardtrain")


def collect(context: RankContext) -> Facts:
    """Collect versions, flags, system and driver of this rank."""
    return {
        **versions(),
        **flags(context.environ),
        "python": sys.executable,
        **system_facts(),
    }


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for packages and flags, which must be equal, and for systems, which may differ."""
    return [
        _check_packages(all_facts),
        _check_flags(all_facts),
        _check_python(all_facts),
        _check_system(all_facts),
    ]


def _check_packages(all_facts: Sequence[RankFacts]) -> Row:
    if differences := _find_differences(all_facts, "versions/"):
        return Row("packages", differences[0], "wrong", differences[1])
    missing = [name for name in SHOWN if all_facts[0].facts[f"versions/{name}"] is None]
    # a single process needs no MPI; the check `mpi` reports it
    if set(missing) - set(OF_MPI):
        fix = "uv sync installs the packages that shardtrain needs"
        finding = f"not installed: {', '.join(missing)}"
        return Row("packages", finding, "wrong", fix)
    installed = [name for name in SHOWN if name not in missing]
    finding = ", ".join(f"{name} {all_facts[0].facts[f'versions/{name}']}" for name in installed)
    return Row("packages", finding)


def _check_flags(all_facts: Sequence[RankFacts]) -> Row:
    if differences := _find_differences(all_facts, "flags/"):
        return Row("flags", differences[0], "wrong", differences[1])
    facts = all_facts[0].facts
    xla = [f"{name[6:]}={value}" for name, value in facts.items() if name.startswith("flags/xla_")]
    finding = ", ".join(xla) if xla else "no XLA flag that changes results"
    return Row("flags", finding)


def _find_differences(all_facts: Sequence[RankFacts], prefix: str) -> tuple[str, str] | None:
    """Return the differences and their fixes, with the same text as before the first step of a run."""
    facts = [{k: v for k, v in one.facts.items() if k.startswith(prefix)} for one in all_facts]
    text = disagreement(facts, [one.name for one in all_facts])
    if text is None:
        return None
    lines = [line.strip() for line in text.splitlines()[1:]]
    finding = "; ".join(line for line in lines if not line.startswith("->"))
    return finding, "; ".join(line[3:] for line in lines if line.startswith("->"))


def _check_python(all_facts: Sequence[RankFacts]) -> Row:
    finding = join_texts((one.name, one.facts["python"]) for one in all_facts)
    if len({one.facts["python"] for one in all_facts}) > 1:
        fix = "nothing while their packages are equal; one environment on a shared file system ensures that"
        return Row("python", finding, "note", fix)
    return Row("python", finding)


def _check_system(all_facts: Sequence[RankFacts]) -> Row:
    names = ("system", "machine", "libc", "driver")
    finding = join_texts(
        (one.name, ", ".join(str(one.facts[n]) for n in names if one.facts[n])) for one in all_facts
    )
    drivers = {one.facts["driver"] for one in all_facts if one.facts["driver"]}
    if len(drivers) > 1:
        fix = f"install one GPU driver on all hosts (now {some(sorted(drivers))}): NCCL expects that"
        return Row("system", finding, "warning", fix)
    if len({tuple(one.facts[n] for n in names) for one in all_facts}) > 1:
        fix = "nothing: different hosts may round the last bits differently"
        return Row("system", finding, "note", fix)
    return Row("system", finding)


CHECK = Check(
    about="packages, flags, Python, system and driver, equal on all ranks",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=60.0,
    if_it_hangs="Python's environment is on a file system that does not answer",
)
