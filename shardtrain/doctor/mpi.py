"""The check `mpi`: the launcher, the MPI of mpi4py, mpi4jax and mpiexec, and a test message through mpi4jax.

MPI and mpi4jax are tried in a child process, because incompatible libraries crash or hang.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, group_by_host, join_texts
from shardtrain.doctor.devices import find_visible, wants_cpu
from shardtrain.doctor.start import is_compatible, run_child
from shardtrain.islands.device_memory import cuda_aware
from shardtrain.islands.launcher_variables import JOB_ID, JOB_TASKS, OTHER_LAUNCHERS, find_pmi
from shardtrain.islands.mpi_library import find_vendor, library_environment, list_not_installed
from shardtrain.launch.mpi import find_mpiexec
from shardtrain.system.host import list_gpu_files
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
    environ, started = context.environ, context.environment
    is_alone = started.launcher == "none"
    facts: Facts = {
        "launcher": started.launcher,
        "told": [started.rank, started.size],
        "problem": context.problem,
        "placement_problem": context.islands_problem,
        "pmi": find_pmi(environ),
        "strange": [name for name in OTHER_LAUNCHERS if name in environ and is_alone],
        "tasks_of_job": parse_count(environ.get(JOB_TASKS, "")) if is_alone and JOB_ID in environ else 1,
    }
    if not context.is_first_on_host:
        return facts
    if absent := list_not_installed():
        return facts | {"absent": absent}
    facts["child"] = run_child(
        PROGRAM, {**environ, **library_environment(environ), "JAX_PLATFORMS": "cpu"}, CHILD_SECONDS
    )
    try:
        program = find_mpiexec()
        facts["mpiexec"] = {"path": program.path, "flavour": program.vendor, "version": program.version}
    except (ValueError, OSError) as error:
        facts["mpiexec"] = {"error": str(error)}
    uses_gpus = list_gpu_files() and find_visible(environ) != [] and not wants_cpu(environ)
    if uses_gpus and not context.quick:
        facts["cuda_aware"] = cuda_aware(timeout_seconds=PROBE_SECONDS)
    return facts


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for the launcher, the libraries, the mpiexec, and the test message."""
    firsts = [ranks[0] for ranks in group_by_host(all_facts).values() if "child" in ranks[0]]
    rows = [_check_launcher(all_facts[0])]
    if problem := all_facts[0]["placement_problem"]:
        fix = "start as many ranks as the islands need, or change SHARDTRAIN_ISLAND_PROCESSES, as it says"
        rows.append(Row("islands", problem, "wrong", fix))
    if absent := [(one.host, ", ".join(one["absent"])) for one in all_facts if "absent" in one]:
        finding = f"not installed: {join_texts(absent)}"
        fix = "install shardtrain[mpi] (README, Installing)"
        if all_facts[0]["told"][1] == 1:
            fix = f"nothing for a single process, which needs none; for several {fix}"
            rows.append(Row("library", finding, "note", fix))
        else:
            fix += ": launched ranks cannot communicate without it"
            rows.append(Row("library", finding, "wrong", fix))
    if firsts:
        rows += [*_check_library(firsts), _check_mpi4jax(firsts), _check_mpiexec(firsts)]
    words = {True: "accepts device memory", False: "does not accept device memory"}
    if probed := [(one.host, words[one["cuda_aware"]]) for one in firsts if "cuda_aware" in one]:
        fix = "nothing: arrays pass through host memory; an MPI and mpi4jax built for CUDA would save a copy"
        row, lacks = Row("CUDA-aware", join_texts(probed)), any(text == words[False] for _, text in probed)
        rows.append(replace(row, status="note", fix=fix) if lacks else row)
    return rows


def _check_launcher(facts: RankFacts) -> Row:
    if facts["problem"]:
        fix = (
            "use the mpiexec installed beside this Python, or build mpi4py and mpi4jax for the"
            " launcher's MPI (README, Installing); with srun add --mpi=pmi2 or --mpi=pmix"
            " (srun --mpi=list lists the choices)"
        )
        return Row("launcher", facts["problem"], "wrong", fix)
    if facts["launcher"] != "none":
        ranks = "1 rank" if facts["told"][1] == 1 else f"{facts['told'][1]} ranks"
        return Row("launcher", f"started by {facts['launcher']}, {facts['pmi']}; MPI agrees on {ranks}")
    finding, tasks = "no launcher: a single process", facts["tasks_of_job"] or 1
    if facts["strange"]:
        finding += f"; but a launcher shardtrain does not know set {', '.join(facts['strange'])}"
        fix = "start with mpiexec or srun, or set PMI_RANK and PMI_SIZE; as it is, each rank would be alone"
        return Row("launcher", finding, "warning", fix)
    fix = f"check all of them: srun -n {tasks} --mpi=pmi2 shardtrain doctor"
    job = Row("launcher", f"{finding}, in a job of {tasks} tasks", "note", fix)
    return job if tasks > 1 else Row("launcher", finding)


def _check_library(firsts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for the MPI library of mpi4py, and its threads."""
    children = [(one.host, one["child"]) for one in firsts]
    if broken := [(host, str(child["died"])) for host, child in children if "library" not in child]:
        fix = "install mpi4py for this machine's MPI: uv sync for the bundled one, or README, Installing"
        return [Row("library", f"mpi4py does not start: {join_texts(broken)}", "wrong", fix)]
    # the first line without white space: "MPICH Version:      5.0.2, package ..."
    version = {
        host: " ".join(child["library"].strip("\0 \n").partition("\n")[0].split(", package")[0].split())
        for host, child in children
    }
    finding = join_texts(
        (host, f"{version[host]}, MPI {child['standard']}, {', '.join(child['mpi4py_libraries'])}")
        for host, child in children
    )
    rows = [Row("library", finding)]
    if len(set(version.values())) > 1:
        fix = "give every host the same MPI: different ones cannot communicate"
        rows = [Row("library", finding, "wrong", fix)]
    if low := [(host, THREAD_LEVELS[child["threads"]]) for host, child in children if child["threads"] < 3]:
        fix = "use an MPI built with MPI_THREAD_MULTIPLE, and unset MPI4PY_RC_THREAD_LEVEL: threads call it"
        rows.append(Row("threads", join_texts(low), "wrong", fix))
    return rows


def _check_mpi4jax(firsts: Sequence[RankFacts]) -> Row:
    """Return the row for mpi4jax: whether it has the same MPI, and an array passed through it."""
    children = [(one.host, one["child"]) for one in firsts if "library" in one["child"]]
    rebuild = "build it again for this MPI: uv sync --refresh-package mpi4jax --reinstall-package mpi4jax"
    # two MPIs in one process may exchange an array by luck, but not reliably
    if two := [(host, ", ".join(c["libraries"])) for host, c in children if len(c.get("libraries", ())) > 1]:
        return Row("mpi4jax", f"mpi4py and mpi4jax load different MPIs: {join_texts(two)}", "wrong", rebuild)
    # it does not load, or the test array did not come back as it was sent
    failed = [(host, str(c["died"] or "it came back modified")) for host, c in children if not c.get("moved")]
    if failed:
        loads = all("mpi4jax" in child for _, child in children)
        what = "an array sent to itself" if loads else "it does not load"
        return Row("mpi4jax", f"{what}: {join_texts(failed)}", "wrong", rebuild)
    finding = join_texts(
        (host, f"{child['mpi4jax']} loads the same MPI; an array passed through it")
        for host, child in children
    )
    if warned := [(host, child["warnings"][0][:200]) for host, child in children if child["warnings"]]:
        fix = "keep the versions of jax and mpi4jax that uv sync installs"
        return Row("mpi4jax", f"{finding}; it warns: {join_texts(warned)}", "note", fix)
    return Row("mpi4jax", finding or "not tried: mpi4py does not start")


def _check_mpiexec(firsts: Sequence[RankFacts]) -> Row:
    """Return the row for the mpiexec that `shardtrain launch` uses."""
    found = [(one.host, one["mpiexec"], one["child"].get("library")) for one in firsts]
    finding = join_texts(
        (host, program.get("error") or "{path} ({flavour} {version})".format(**program))
        for host, program, _ in found
    )
    if any("error" in program for _, program, _ in found):
        fix = "install shardtrain[mpi], which has one, or launch with --mpiexec PATH; srun needs none"
        return Row("mpiexec", finding, "warning", fix)
    for _, program, library in found:
        if library is not None and not is_compatible(program["flavour"], vendor := find_vendor(library)):
            fix = f"use the mpiexec of mpi4py's MPI ({vendor}); with this one each rank would be alone"
            return Row("mpiexec", finding, "warning", fix)
    return Row("mpiexec", finding)
