"""The check `mpi`: the launcher, the MPI of mpi4py, mpi4jax and mpiexec, and a test message through mpi4jax.

MPI and mpi4jax are tried in a child process, because incompatible libraries crash or hang.
"""

import re
from collections.abc import Mapping, Sequence

from shardtrain.doctor.check import (
    Check,
    Facts,
    RankContext,
    RankFacts,
    Row,
    count_text,
    group_by_host,
    join_texts,
)
from shardtrain.doctor.child import is_compatible, run_child
from shardtrain.doctor.devices import wants_gpus
from shardtrain.islands.device_memory import cuda_aware
from shardtrain.islands.launcher_variables import JOB_ID, JOB_TASKS, OTHER_LAUNCHERS, find_pmi
from shardtrain.islands.mpi_library import find_vendor, library_environment, list_not_installed
from shardtrain.launch.mpi import find_mpiexec
from shardtrain.system.untrusted_data import parse_count

CHILD_SECONDS, PROBE_SECONDS = 60.0, 90.0
THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")

PROGRAM = r"""
import json, re, warnings
from pathlib import Path
def tell(**facts): print(json.dumps(facts), flush=True)
def libraries():
    words = Path("/proc/self/maps").read_text().split()
    return sorted({word for word in words if re.search(r"/libmpi(_cray|_intel)?\.so[\d.]*$", word)})
from mpi4py import MPI
levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
tell(library=MPI.Get_library_version(), standard=".".join(map(str, MPI.Get_version())),
     threads=levels.index(MPI.Query_thread()), mpi4py_libraries=libraries())
import jax, jax.numpy as jnp
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import mpi4jax
    comm = MPI.COMM_SELF.Clone()
    tell(mpi4jax=mpi4jax.__version__, libraries=libraries(), warnings=[str(w.message) for w in caught])
x = jnp.arange(1 << 16, dtype=jnp.float32)
y = jax.jit(lambda x: mpi4jax.sendrecv(x, x, 0, 0, comm=comm))(x)
tell(moved=bool((x == y).all()))
"""
"""A child program that sends an array to itself on the CPU, through jax and MPI."""


def collect(context: RankContext) -> Facts:
    """Collect this rank's launcher, and on the first rank of each host whether its MPI libraries work."""
    facts: Facts = {
        "launcher": context.environment.launcher,
        "told": [context.environment.rank, context.environment.size],
        "problem": context.problem,
        "placement_problem": context.islands_problem,
        "pmi": find_pmi(context.environ),
        "strange": [n for n in OTHER_LAUNCHERS if n in context.environ]
        if context.environment.launcher == "none"
        else [],
        "tasks_of_job": _count_job_tasks(context.environ) if context.environment.launcher == "none" else 1,
    }
    if context.is_first_on_host and (absent := list_not_installed()):
        facts["absent"] = absent
    elif context.is_first_on_host:
        environ = {**context.environ, **library_environment(context.environ), "JAX_PLATFORMS": "cpu"}
        facts |= {"child": run_child(PROGRAM, environ, CHILD_SECONDS), "mpiexec": _find_mpiexec()}
        if wants_gpus(context.environ) and not context.quick:
            facts["cuda_aware"] = cuda_aware(timeout_seconds=PROBE_SECONDS)
    return facts


def _count_job_tasks(environ: Mapping[str, str]) -> int:
    number = environ.get(JOB_TASKS, "1") if JOB_ID in environ else "1"
    return parse_count(number) or 1


def _find_mpiexec() -> Facts:
    try:
        program = find_mpiexec()
    except (ValueError, OSError) as error:
        return {"error": str(error)}
    return {"path": program.path, "flavour": program.vendor, "version": program.version}


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for the launcher, the libraries, the mpiexec, and the test message."""
    firsts = [
        one for one in (ranks[0] for ranks in group_by_host(all_facts).values()) if "child" in one.facts
    ]
    rows = [_check_launcher(all_facts)]
    if problem := all_facts[0].facts["placement_problem"]:
        fix = "start as many ranks as the islands need, or change SHARDTRAIN_ISLAND_PROCESSES, as it says"
        rows.append(Row("islands", problem, "wrong", fix))
    if absent := [(one.host, ", ".join(one.facts["absent"])) for one in all_facts if "absent" in one.facts]:
        rows.append(_check_absent(absent, alone=all_facts[0].facts["told"][1] == 1))
    if firsts:
        rows += [
            _check_library(firsts),
            *_check_threads(firsts),
            _check_mpi4jax(firsts),
            _check_mpiexec(firsts),
        ]
    probed = [(one.host, one.facts["cuda_aware"]) for one in firsts if "cuda_aware" in one.facts]
    return rows + ([_check_device_memory(probed)] if probed else [])


def _check_launcher(all_facts: Sequence[RankFacts]) -> Row:
    facts = all_facts[0].facts
    started = {"none": "no launcher: a single process"}.get(
        facts["launcher"], f"started by {facts['launcher']}"
    )
    finding = started
    if facts["problem"]:
        fix = (
            "use the mpiexec installed beside this Python, or build mpi4py and mpi4jax for the"
            " launcher's MPI (README, Installing); with srun add --mpi=pmi2 or --mpi=pmix"
            " (srun --mpi=list lists the choices)"
        )
        return Row("launcher", facts["problem"], "wrong", fix)
    if facts["strange"]:
        fix = (
            "start with mpiexec or srun, or set PMI_RANK and PMI_SIZE for each rank: as it is, each"
            " would be alone"
        )
        finding += f"; but a launcher shardtrain does not know set {', '.join(facts['strange'])}"
        return Row("launcher", finding, "warning", fix)
    if facts["tasks_of_job"] > 1:
        fix = f"check all of them: srun -n {facts['tasks_of_job']} --mpi=pmi2 shardtrain doctor"
        finding += f", in a job of {facts['tasks_of_job']} tasks"
        return Row("launcher", finding, "note", fix)
    size = count_text(facts["told"][1], "rank")
    finding = started if facts["launcher"] == "none" else f"{started}, {facts['pmi']}; MPI agrees on {size}"
    return Row("launcher", finding)


def _check_absent(hosts: Sequence[tuple[str, str]], alone: bool) -> Row:
    """Return the row for an MPI that is not installed; a single process does not need it."""
    finding = f"not installed: {join_texts(hosts)}"
    install = "install shardtrain[mpi] (README, Installing)"
    fix = f"nothing for a single process, which needs none; for several {install}"
    if not alone:
        fix = f"{install}: launched ranks cannot communicate without it"
    return Row("library", finding, "note" if alone else "wrong", fix)


def _first_line(library: str) -> str:
    """Return the first line of an MPI version text, shortened.

    >>> _first_line("MPICH Version:      5.0.2\\nMPICH Release date: x")
    'MPICH Version: 5.0.2'
    """
    lines = library.strip("\0 \n").splitlines()
    return re.sub(r"\s+", " ", lines[0].split(", package")[0]) if lines else "?"


def _check_library(firsts: Sequence[RankFacts]) -> Row:
    """Return the row for the MPI library of mpi4py."""
    children = [(one.host, one.facts["child"]) for one in firsts]
    broken = [(host, child["died"]) for host, child in children if "library" not in child]
    if broken:
        fix = (
            "install mpi4py for the MPI of this machine: uv sync for the bundled one, or another"
            " (README, Installing)"
        )
        finding = "mpi4py does not start: " + join_texts((host, str(died)) for host, died in broken)
        return Row("library", finding, "wrong", fix)
    # it starts: show the version and the library of each host
    texts = [
        (
            host,
            f"{_first_line(child['library'])}, MPI {child['standard']},"
            f" {', '.join(child['mpi4py_libraries'])}",
        )
        for host, child in children
    ]
    if len({_first_line(child["library"]) for _, child in children}) > 1:
        fix = "give every host the same MPI: different ones cannot communicate"
        return Row("library", join_texts(texts), "wrong", fix)
    return Row("library", join_texts(texts))


def _check_threads(firsts: Sequence[RankFacts]) -> list[Row]:
    levels = [(one.host, one.facts["child"]["threads"]) for one in firsts if "threads" in one.facts["child"]]
    low = [(host, THREAD_LEVELS[level]) for host, level in levels if level < 3]
    if not low:
        return []
    fix = (
        "use an MPI built with MPI_THREAD_MULTIPLE, and unset MPI4PY_RC_THREAD_LEVEL: several threads call it"
    )
    return [Row("threads", join_texts(low), "wrong", fix)]


def _check_mpi4jax(firsts: Sequence[RankFacts]) -> Row:
    """Return the row for mpi4jax: whether it has the same MPI, and an array passed through it."""
    children = [(one.host, one.facts["child"]) for one in firsts if "library" in one.facts["child"]]
    rebuild = "build it again for this MPI: uv sync --refresh-package mpi4jax --reinstall-package mpi4jax"
    # two MPIs in one process may exchange an array by luck, but not reliably
    two = [(host, ", ".join(c["libraries"])) for host, c in children if len(c.get("libraries", ())) > 1]
    if two:
        finding = "mpi4py and mpi4jax load different MPIs: " + join_texts(two)
        return Row("mpi4jax", finding, "wrong", rebuild)
    # it does not load, or the test array did not come back as it was sent
    failed = [(host, str(c["died"] or "it came back modified")) for host, c in children if not c.get("moved")]
    if failed:
        loads = all("mpi4jax" in child for _, child in children)
        finding = ("an array sent to itself: " if loads else "it does not load: ") + join_texts(failed)
        return Row("mpi4jax", finding, "wrong", rebuild)
    texts = [
        (host, f"{child['mpi4jax']} loads the same MPI; an array passed through it")
        for host, child in children
    ]
    if warned := [(host, child["warnings"][0][:200]) for host, child in children if child["warnings"]]:
        finding = f"{join_texts(texts)}; it warns: {join_texts(warned)}"
        return Row("mpi4jax", finding, "note", "keep the versions of jax and mpi4jax that uv sync installs")
    return Row("mpi4jax", join_texts(texts) if texts else "not tried: mpi4py does not start")


def _check_mpiexec(firsts: Sequence[RankFacts]) -> Row:
    """Return the row for the mpiexec that `shardtrain launch` uses."""
    finding = join_texts(
        (one.host, m.get("error") or f"{m['path']} ({m['flavour']} {m['version']})")
        for one in firsts
        for m in (one.facts["mpiexec"],)
    )
    if any("error" in one.facts["mpiexec"] for one in firsts):
        fix = (
            "install shardtrain[mpi], which contains one, or give yours: shardtrain launch --mpiexec PATH;"
            " srun needs none"
        )
        return Row("mpiexec", finding, "warning", fix)
    other = [
        (one.host, find_vendor(one.facts["child"]["library"]))
        for one in firsts
        if "library" in one.facts["child"]
        and not is_compatible(one.facts["mpiexec"]["flavour"], find_vendor(one.facts["child"]["library"]))
    ]
    if other:
        fix = (
            f"start ranks with the mpiexec of mpi4py's MPI ({other[0][1]}); with this one each rank would"
            " be alone"
        )
        return Row("mpiexec", finding, "warning", fix)
    return Row("mpiexec", finding)


def _check_device_memory(probed: Sequence[tuple[str, bool]]) -> Row:
    finding = join_texts(
        (host, "accepts device memory" if able else "does not accept device memory") for host, able in probed
    )
    if all(able for _, able in probed):
        return Row("CUDA-aware", finding)
    fix = (
        "nothing: arrays are copied through host memory; an MPI and mpi4jax built for CUDA would save a copy"
    )
    return Row("CUDA-aware", finding, "note", fix)


CHECK = Check(
    about="MPI's vendor, ABI, threads, launcher, PMI, and an array sent through mpi4jax",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=CHILD_SECONDS + PROBE_SECONDS + 30.0,
    if_it_hangs="a child process could not be ended: look for processes in state D on that host",
)
