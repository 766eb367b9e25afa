"""The check `devices`: whether jax sees the devices of the machine that this process may use.

Device files and nvidia-smi show the GPUs of the host, in a process without jax.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata

from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, group_by_host, join_texts
from shardtrain.doctor.child import run_child
from shardtrain.islands.binding import parse_devices
from shardtrain.islands.launcher_variables import NODE_GPUS, STEP_GPUS
from shardtrain.report.quantities import bytes_text
from shardtrain.system.excerpts import some
from shardtrain.system.host import driver, list_gpu_files
from shardtrain.system.untrusted_data import parse_count

QUERY = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version")
SMI_SECONDS = 20.0


def collect_gpus(environ: Mapping[str, str]) -> Facts:
    """Collect the GPUs that this process may use.

    Returns:
      `nodes` and `closed`: numbers of GPUs whose device file can and cannot be opened; `gpus`: the list of
      nvidia-smi; `visible`: see `find_visible`; `slurm`: number of GPUs from Slurm, or None; `driver`;
      `plugin`: the CUDA plugin of jax and its version; `smi_error`; `cpu_wanted`: whether jax is set to use
      the CPU.
    """
    files = list_gpu_files()
    openable = [path for path in files if os.access(path, os.R_OK | os.W_OK)]
    gpus, error = _run_nvidia_smi() if files else ([], None)
    return {
        "nodes": len(openable),
        "closed": len(files) - len(openable),
        "gpus": gpus,
        "smi_error": error,
        "visible": find_visible(environ),
        "slurm": count_slurm_gpus(environ),
        "driver": driver(),
        "plugin": find_plugin(),
        "cpu_wanted": environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu",
    }


def wants_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether there is a GPU, and jax is not set to use the CPU."""
    has_gpu = bool(list_gpu_files()) and find_visible(environ) != []
    return has_gpu and environ.get("JAX_PLATFORMS", "").split(",")[0] != "cpu"


def find_visible(environ: Mapping[str, str]) -> list[str] | None:
    """Return the valid entries of `CUDA_VISIBLE_DEVICES`; None if it is not set."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else parse_devices(text)


def count_slurm_gpus(environ: Mapping[str, str]) -> int | None:
    """Return the number of GPUs that Slurm allocated on this host; None if unknown.

    >>> count_slurm_gpus({"SLURM_STEP_GPUS": "0,1"}), count_slurm_gpus({"SLURM_GPUS_ON_NODE": "4"})
    (2, 4)
    >>> count_slurm_gpus({}) is None
    True
    """
    if step := environ.get(STEP_GPUS):
        return len(step.split(","))
    match = re.search(r"(\d+)$", environ.get(NODE_GPUS, ""))
    return parse_count(match[1]) if match else None


def read_gpus(text: str) -> list[Facts]:
    """Parse the CSV output of nvidia-smi.

    >>> read_gpus("0, GPU-1, NVIDIA L4, 23034, 5, 550.54\\n")[0]["used_bytes"]
    5242880
    """
    gpus = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(QUERY):
            index, uuid, name, total, used, _ = cells
            sizes = {"memory_bytes": _parse_mebibytes(total), "used_bytes": _parse_mebibytes(used)}
            gpus.append({"index": index, "uuid": uuid, "name": name, **sizes})
    return gpus


def _parse_mebibytes(cell: str) -> int:
    return (parse_count(cell) or 0) * 2**20


def _run_nvidia_smi() -> tuple[list[Facts], str | None]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], "there is no nvidia-smi"
    command = [program, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return [], f"nvidia-smi did not end within {SMI_SECONDS:.0f} s"
    if done.returncode:
        return [], (done.stdout + done.stderr).strip().splitlines()[-1][:200]
    return read_gpus(done.stdout), None


def find_plugin() -> str | None:
    """Return the installed CUDA plugin of jax and its version; None without one."""
    for name in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return None


def find_uuids(facts: Mapping, names: Sequence[str] | None) -> list[str]:
    """Return the UUIDs of visible GPUs, which are the same in every container."""
    gpus = facts["gpus"]
    if names is None:
        return [gpu["uuid"] for gpu in gpus]
    by_word = {gpu["index"]: gpu["uuid"] for gpu in gpus}
    listed = [
        by_word.get(word) or next((g["uuid"] for g in gpus if g["uuid"].startswith(word)), "")
        for word in names
    ]
    return [uuid for uuid in listed if uuid]


CHILD_SECONDS = 90.0
BUSY_SHARE = 0.1
"""Used fraction of a GPU's memory above which another process must be using it."""

PROGRAM = """
import json, jax
devices = jax.local_devices()
def size(device):
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")
seen = [{"platform": d.platform, "kind": d.device_kind, "memory_bytes": size(d)} for d in devices]
print(json.dumps({"devices": seen}))
"""


def collect(context: RankContext) -> Facts:
    """Collect the devices of this rank, and the GPUs visible to it."""
    facts = collect_gpus(context.environ)
    facts["uuids"] = find_uuids(facts, facts["visible"])
    # ranks that share a GPU start their child processes at the same time
    environ = {**context.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return facts | {"seen": run_child(PROGRAM, environ, CHILD_SECONDS)}


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for devices that jax sees, devices that it should see, and shared GPUs."""
    rows = [_check_visible(all_facts)]
    if idle := [one for one in all_facts if _is_idle(one.facts)]:
        rows.append(_check_unused(idle))
    if short := [one for one in all_facts if _describe_missing_gpus(one.facts)]:
        fix = (
            "ask the launcher for as many as jax is to use (srun --gpus-per-task, CUDA_VISIBLE_DEVICES);"
            " an allocated GPU that jax does not see is broken or in use: run nvidia-smi on that host"
        )
        finding = join_texts((one.name, str(_describe_missing_gpus(one.facts))) for one in short)
        rows.append(Row("visible GPUs", finding, "wrong", fix))
    rows += [row for ranks in group_by_host(all_facts).values() for row in _check_shared(ranks)]
    return rows + _check_busy(all_facts) + _check_rights(all_facts)


def format_devices(devices: Sequence[Facts]) -> str:
    """Format a list of devices.

    >>> format_devices([{"platform": "cpu", "kind": "cpu", "memory_bytes": None}] * 2)
    '2 x cpu'
    """
    groups: dict[str, int] = {}
    for device in devices:
        memory = f" ({bytes_text(device['memory_bytes'])} usable)" if device["memory_bytes"] else ""
        kind = device["kind"] + memory
        groups[kind] = groups.get(kind, 0) + 1
    return ", ".join(f"{number} x {kind}" for kind, number in groups.items())


def _check_visible(all_facts: Sequence[RankFacts]) -> Row:
    broken = [
        (one.name, one.facts["seen"]["died"]) for one in all_facts if "devices" not in one.facts["seen"]
    ]
    if broken:
        fix = (
            "run it alone to see all of its error: python -c 'import jax; print(jax.devices())';"
            " JAX_PLATFORMS must"
            " name platforms that exist, and a GPU's driver must be new enough for jax's plugin"
        )
        finding = "jax does not start: " + join_texts((name, str(died)) for name, died in broken)
        return Row("seen by jax", finding, "wrong", fix)
    finding = join_texts((one.name, format_devices(one.facts["seen"]["devices"])) for one in all_facts)
    if len({one.facts["seen"]["devices"][0]["platform"] for one in all_facts}) > 1:
        fix = "nothing if unequal islands are intended; otherwise see the row below or the host's driver"
        return Row("seen by jax", finding, "note", fix)
    return Row("seen by jax", finding)


def _count_gpus_seen(facts: Facts) -> int:
    return sum(device["platform"] in ("gpu", "cuda") for device in facts["seen"].get("devices", ()))


def _is_idle(facts: Facts) -> bool:
    """Return whether jax runs on the CPU although this rank may use GPUs."""
    may = facts["nodes"] > 0 and facts["visible"] != []
    return may and "devices" in facts["seen"] and _count_gpus_seen(facts) == 0


def _check_unused(idle: Sequence[RankFacts]) -> Row:
    facts = idle[0].facts
    where = some([one.name for one in idle])
    finding = f"{where}: {facts['nodes']} GPUs exist (driver {facts['driver']}), but jax runs on the CPU"
    if facts["cpu_wanted"]:
        fix = "nothing if intended: JAX_PLATFORMS=cpu (or --cpu-devices) is set; unset it to use the GPUs"
        return Row("GPUs not used", finding, "note", fix)
    if facts["plugin"] is None:
        major = 13 if int((facts["driver"] or "0").partition(".")[0]) >= 580 else 12
        fix = f'install jax\'s CUDA plugin beside it: uv pip install "jax[cuda{major}]"'
    else:
        fix = (
            f"{facts['plugin']} is installed and does not work: see python -c 'import jax;"
            ' jax.devices("cuda")\''
        )
    return Row("GPUs not used", finding, "wrong", fix)


def _describe_missing_gpus(facts: Facts) -> str | None:
    """Return a message if a rank sees another number of GPUs than were allocated to it; None otherwise."""
    seen = _count_gpus_seen(facts)
    if not seen:
        return None
    given = len(facts["visible"]) if facts["visible"] is not None else facts["slurm"]
    by = "CUDA_VISIBLE_DEVICES" if facts["visible"] is not None else "Slurm"
    if given is None and facts["gpus"]:
        given, by = len(facts["gpus"]), "nvidia-smi"
    return f"{by} names {given} GPUs, jax sees {seen}" if given is not None and given != seen else None


def _check_shared(ranks: Sequence[RankFacts]) -> list[Row]:
    """Return rows for ranks of a host that use the same GPU."""
    users: dict[str, list[str]] = {}
    for one in ranks:
        for uuid in one.facts["uuids"] if _count_gpus_seen(one.facts) else ():
            users.setdefault(uuid, []).append(one.name)
    shared = {uuid: names for uuid, names in users.items() if len(names) > 1}
    if not shared:
        return []
    names = some(next(iter(shared.values())))
    finding = f"{ranks[0].host}: {len(shared)} of {len(users)} GPUs have several ranks, such as {names}"
    every = {gpu["uuid"] for one in ranks for gpu in one.facts["gpus"]}
    if len(every) >= len(ranks):
        fix = (
            "give each rank its own: unset SHARDTRAIN_BIND=no, or bind by the launcher (srun"
            " --gpus-per-task=1);"
            " for one island over all of them start one rank a host"
        )
        return [Row("shared GPUs", finding, "wrong", fix)]
    fix = f"they share its memory and its time: start {len(every)} ranks there, one a GPU"
    return [Row("shared GPUs", finding, "warning", fix)]


def _check_busy(all_facts: Sequence[RankFacts]) -> list[Row]:
    busy = {
        f"{one.host} GPU {gpu['index']}": f"{bytes_text(gpu['used_bytes'])} of"
        f" {bytes_text(gpu['memory_bytes'])}"
        for one in all_facts
        for gpu in one.facts["gpus"]
        if gpu["uuid"] in one.facts["uuids"] and gpu["used_bytes"] > BUSY_SHARE * gpu["memory_bytes"]
    }
    if not busy:
        return []
    fix = "another process uses it: see nvidia-smi, and end processes left by an earlier run"
    return [Row("memory taken", join_texts(busy.items()), "warning", fix)]


def _check_rights(all_facts: Sequence[RankFacts]) -> list[Row]:
    closed = [
        (one.name, f"{one.facts['closed']} GPUs cannot be opened") for one in all_facts if one.facts["closed"]
    ]
    if not closed or any(_count_gpus_seen(one.facts) for one in all_facts):
        return []
    fix = (
        "the batch system allocated none (ask for them: --gres=gpu:N), or you are not in the group of"
        " /dev/nvidia0"
    )
    return [Row("rights", join_texts(closed), "warning", fix)]


CHECK = Check(
    about="devices seen by jax, compared with the GPUs that exist and were allocated",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=CHILD_SECONDS + 60.0,
    if_it_hangs="a GPU's driver hangs: nvidia-smi, dmesg; a reboot of that host is usual",
)
