"""The check `mpi`: the launcher, the MPI of mpi4py, mpi4jax and mpiexec, and a test message through mpi4jax.

MPI and mpi4jax are tried in a child process, because incompatible libraries crash or hang.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, first_ranks, merge_rows
from shardtrain.doctor.devices import find_visible, wants_cpu
from shardtrain.doctor.start import is_compatible, run_child
from shardtrain.islands.launcher_variables import JOB_ID, JOB_TASKS, OTHER_LAUNCHERS, find_pmi
from shardtrain.islands.mpi_library import cuda_aware, find_vendor, library_environment, list_not_installed
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
    rows = [_check_launcher(all_facts[0])]
    if problem := all_facts[0]["placement_problem"]:
        fix = "start as many ranks as the islands need, or change SHARDTRAIN_ISLAND_PROCESSES, as it says"
        rows.append(Row("islands", problem, "wrong", fix))
    hosts = first_ranks(all_facts)
    rows += merge_rows(hosts, _judge_host)
    if len({_version_text(one) for one in hosts if "library" in one.get("child", ())}) > 1:
        fix = "give every host the same MPI: different ones cannot communicate"
        rows = [replace(row, status="wrong", fix=fix) if row.item == "library" else row for row in rows]
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


def _judge_host(one: RankFacts) -> Iterator[Row]:
    if "absent" in one:
        finding, fix = (
            f"not installed: {', '.join(one['absent'])}",
            "install shardtrain[mpi] (README, Installing)",
        )
        if one["told"][1] == 1:
            fix = f"nothing for a single process, which needs none; for several {fix}"
            yield Row("library", finding, "note", fix)
        else:
            fix += ": launched ranks cannot communicate without it"
            yield Row("library", finding, "wrong", fix)
    if "child" not in one:
        return
    child, mpiexec = one["child"], one["mpiexec"]
    if "library" in child:
        paths = ", ".join(child["mpi4py_libraries"])
        yield Row("library", f"{_version_text(one)}, MPI {child['standard']}, {paths}")
        yield _judge_mpi4jax(child)
        if child["threads"] < 3:
            fix = (
                "use an MPI built with MPI_THREAD_MULTIPLE, and unset MPI4PY_RC_THREAD_LEVEL: threads call it"
            )
            yield Row("threads", THREAD_LEVELS[child["threads"]], "wrong", fix)
    else:
        fix = "install mpi4py for this machine's MPI: uv sync for the bundled one, or README, Installing"
        yield Row("library", f"mpi4py does not start: {child['died']}", "wrong", fix)
        yield Row("mpi4jax", "not tried: mpi4py does not start")
    vendor = find_vendor(child.get("library", ""))
    if "error" in mpiexec:
        fix = "install shardtrain[mpi], which has one, or launch with --mpiexec PATH; srun needs none"
        yield Row("mpiexec", mpiexec["error"], "warning", fix)
    else:
        row = Row("mpiexec", "{path} ({flavour} {version})".format(**mpiexec))
        fix = f"use the mpiexec of mpi4py's MPI ({vendor}); with this one each rank would be alone"
        fits = is_compatible(mpiexec["flavour"], vendor)
        yield row if fits else replace(row, status="warning", fix=fix)
    if one.get("cuda_aware") is False:
        fix = "nothing: arrays pass through host memory; an MPI and mpi4jax built for CUDA would save a copy"
        yield Row("CUDA-aware", "does not accept device memory", "note", fix)
    elif "cuda_aware" in one:
        yield Row("CUDA-aware", "accepts device memory")


def _version_text(one: RankFacts) -> str:
    """Return the first line of the version, such as "MPICH Version:      5.0.2, package ...", shortened."""
    first = one["child"]["library"].strip("\0 \n").partition("\n")[0]
    return " ".join(first.partition(", package")[0].split())


def _judge_mpi4jax(child: Facts) -> Row:
    """Return the row for mpi4jax: whether it has the same MPI, and an array passed through it."""
    rebuild = "build it again for this MPI: uv sync --refresh-package mpi4jax --reinstall-package mpi4jax"
    # two MPIs in one process may exchange an array by luck, but not reliably
    if len(libraries := child.get("libraries", ())) > 1:
        finding = f"mpi4py and mpi4jax load different MPIs: {', '.join(libraries)}"
        return Row("mpi4jax", finding, "wrong", rebuild)
    # it does not load, or the test array did not come back as it was sent
    if not child.get("moved"):
        what = "an array sent to itself" if "mpi4jax" in child else "it does not load"
        return Row("mpi4jax", f"{what}: {child['died'] or 'it came back modified'}", "wrong", rebuild)
    finding = f"{child['mpi4jax']} loads the same MPI; an array passed through it"
    if child["warnings"]:
        fix = "keep the versions of jax and mpi4jax that uv sync installs"
        return Row("mpi4jax", f"{finding}; it warns: {child['warnings'][0][:200]}", "note", fix)
    return Row("mpi4jax", finding)
