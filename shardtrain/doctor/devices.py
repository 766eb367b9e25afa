"""The check `devices`: whether jax sees the devices of the machine that this process may use.

Device files and nvidia-smi show the GPUs of the host, in a process without jax.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, group_by_host, merge_rows
from shardtrain.doctor.start import run_child
from shardtrain.islands.binding import parse_devices
from shardtrain.islands.launcher_variables import NODE_GPUS, STEP_GPUS
from shardtrain.report.quantities import bytes_text
from shardtrain.system.excerpts import some
from shardtrain.system.host import driver, list_gpu_files
from shardtrain.system.untrusted_data import parse_count

QUERY = "--query-gpu=index,uuid,memory.total,memory.used"
SMI_SECONDS = 20.0
CHILD_SECONDS = 90.0
BUSY_SHARE = 0.1
"""Used fraction of a GPU's memory above which another process must be using it."""

TRY_CUDA = "see python -c 'import jax; jax.devices(\"cuda\")'"
PROGRAM = """
import json, jax
def describe(device):
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {"platform": device.platform, "kind": device.device_kind, "memory_bytes": memory}
print(json.dumps({"devices": [describe(device) for device in jax.local_devices()]}))
"""


def collect(context: RankContext) -> Facts:
    """Collect the devices of this rank, and the GPUs visible to it."""
    facts = collect_gpus(context.environ)
    # ranks that share a GPU start their child processes at the same time
    environ = {**context.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    uuids = find_uuids(facts["gpus"], facts["visible"])
    return facts | {"uuids": uuids, "seen": run_child(PROGRAM, environ, CHILD_SECONDS)}


def collect_gpus(environ: Mapping[str, str]) -> Facts:
    """Collect the GPUs that this process may use.

    Returns:
      `nodes` and `closed`: numbers of GPUs whose device file can and cannot be opened; `gpus`: the list of
      nvidia-smi; `visible`: see `find_visible`; `slurm`: number of GPUs from Slurm, or None; `driver`;
      `plugin`: the CUDA plugin of jax and its version; `cpu_wanted`: whether jax is set to use the CPU.
    """
    files = list_gpu_files()
    nodes = sum(os.access(path, os.R_OK | os.W_OK) for path in files)
    plugins = (one for one in metadata.distributions() if re.fullmatch(r"jax-cuda\d+-plugin", one.name or ""))
    return {
        "nodes": nodes,
        "closed": len(files) - nodes,
        "gpus": _run_nvidia_smi() if files else [],
        "visible": find_visible(environ),
        "slurm": count_slurm_gpus(environ),
        "driver": driver(),
        "plugin": next((f"{one.name} {one.version}" for one in plugins), None),
        "cpu_wanted": wants_cpu(environ),
    }


def wants_cpu(environ: Mapping[str, str]) -> bool:
    """Return whether jax is set to use the CPU."""
    return environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu"


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


def _run_nvidia_smi() -> list[Facts]:
    """Return the GPUs of nvidia-smi; none where it is missing, fails or hangs: jax itself is asked too."""
    command = [shutil.which("nvidia-smi") or "", QUERY, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return read_gpus(done.stdout)


def read_gpus(text: str) -> list[Facts]:
    """Parse the CSV output of nvidia-smi.

    >>> read_gpus("0, GPU-1, 23034, 5\\n")
    [{'index': '0', 'uuid': 'GPU-1', 'memory_bytes': 24152899584, 'used_bytes': 5242880}]
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    sizes = [[(parse_count(cell) or 0) * 2**20 for cell in row[2:]] for row in rows]
    names = ("index", "uuid", "memory_bytes", "used_bytes")
    pairs = zip(rows, sizes, strict=True)
    return [dict(zip(names, row[:2] + size, strict=True)) for row, size in pairs if len(row) == len(names)]


def find_uuids(gpus: Sequence[Facts], names: Sequence[str] | None) -> list[str]:
    """Return the UUIDs of visible GPUs, which are the same in every container."""
    if names is None:
        return [gpu["uuid"] for gpu in gpus]
    found = ((g["uuid"] for g in gpus if g["index"] == name or g["uuid"].startswith(name)) for name in names)
    return [uuid for uuids in found for uuid in list(uuids)[:1]]


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for devices that jax sees, devices that it should see, and shared GPUs."""
    rows = merge_rows(all_facts, _judge)
    platforms = {each["platform"] for one in all_facts for each in one["seen"].get("devices", ())[:1]}
    if len(platforms) > 1 and rows[0].status == "ok":
        fix = "nothing if unequal islands are intended; otherwise see the row below or the host's driver"
        rows[0] = replace(rows[0], status="note", fix=fix)
    return rows + [row for ranks in group_by_host(all_facts).values() for row in _check_shared(ranks)]


def _judge(one: RankFacts) -> Iterator[Row]:
    devices, visible, plugin = one["seen"].get("devices"), one["visible"], one["plugin"]
    num_seen = _count_gpus_seen(one)
    if devices is None:
        fix = (
            "to see all of its error: python -c 'import jax; print(jax.devices())'; JAX_PLATFORMS must name"
            " platforms that exist, and a GPU's driver must be new enough for jax's plugin"
        )
        yield Row("seen by jax", f"jax does not start: {one['seen']['died']}", "wrong", fix)
    else:
        yield Row("seen by jax", format_devices(devices))
    if devices and not num_seen and one["nodes"] and visible != []:
        finding = f"{one['nodes']} GPUs exist (driver {one['driver']}), but jax runs on the CPU"
        status, fix = "wrong", f"{plugin} is installed and does not work: {TRY_CUDA}"
        if one["cpu_wanted"]:
            status, fix = "note", "nothing if intended: JAX_PLATFORMS=cpu is set; unset it to use the GPUs"
        elif plugin is None:
            major = 13 if int((one["driver"] or "0").partition(".")[0]) >= 580 else 12
            fix = f'install jax\'s CUDA plugin beside it: uv pip install "jax[cuda{major}]"'
        yield Row("GPUs not used", finding, status, fix)
    given, by = one["slurm"], "Slurm"
    if visible is not None:
        given, by = len(visible), "CUDA_VISIBLE_DEVICES"
    elif given is None and one["gpus"]:
        given, by = len(one["gpus"]), "nvidia-smi"
    if num_seen and given not in (None, num_seen):
        fix = (
            "ask the launcher for as many as jax is to use (srun --gpus-per-task, CUDA_VISIBLE_DEVICES);"
            " an allocated GPU that jax does not see is broken or in use: run nvidia-smi on that host"
        )
        yield Row("visible GPUs", f"{by} names {given} GPUs, jax sees {num_seen}", "wrong", fix)
    own = [gpu for gpu in one["gpus"] if gpu["uuid"] in one["uuids"]]
    if taken := [gpu for gpu in own if gpu["used_bytes"] > BUSY_SHARE * gpu["memory_bytes"]]:
        fix = "another process uses it: see nvidia-smi, and end processes left by an earlier run"
        sizes = [f"{bytes_text(gpu['used_bytes'])} of {bytes_text(gpu['memory_bytes'])}" for gpu in taken]
        texts = [f"GPU {gpu['index']}: {size}" for gpu, size in zip(taken, sizes, strict=True)]
        yield Row("memory taken", ", ".join(texts), "warning", fix)
    if one["closed"] and not num_seen:
        fix = "the batch system allocated none (--gres=gpu:N asks for N), or /dev/nvidia0 has another group"
        yield Row("rights", f"{one['closed']} GPUs cannot be opened", "warning", fix)


def format_devices(devices: Sequence[Facts]) -> str:
    """Format a list of devices.

    >>> format_devices([{"platform": "cpu", "kind": "cpu", "memory_bytes": None}] * 2)
    '2 x cpu'
    """
    sizes = [f" ({bytes_text(one['memory_bytes'])} usable)" if one["memory_bytes"] else "" for one in devices]
    kinds = Counter(one["kind"] + size for one, size in zip(devices, sizes, strict=True))
    return ", ".join(f"{number} x {kind}" for kind, number in kinds.items())


def _count_gpus_seen(facts: Facts) -> int:
    return sum(device["platform"] in ("gpu", "cuda") for device in facts["seen"].get("devices", ()))


def _check_shared(ranks: Sequence[RankFacts]) -> list[Row]:
    """Return rows for ranks of a host that use the same GPU."""
    users: dict[str, list[str]] = {}
    for one in ranks:
        for uuid in one["uuids"] if _count_gpus_seen(one) else ():
            users.setdefault(uuid, []).append(one.name)
    shared = [some(names) for names in users.values() if len(names) > 1]
    if not shared:
        return []
    finding = f"{ranks[0].host}: {len(shared)} of {len(users)} GPUs have several ranks, such as {shared[0]}"
    every = {gpu["uuid"] for one in ranks for gpu in one["gpus"]}
    if len(every) < len(ranks):
        fix = f"they share its memory and its time: start {len(every)} ranks there, one a GPU"
        return [Row("shared GPUs", finding, "warning", fix)]
    fix = (
        "give each rank its own: unset SHARDTRAIN_BIND=no, or bind by the launcher (srun"
        " --gpus-per-task=1); for one island over all of them start one rank a host"
    )
    return [Row("shared GPUs", finding, "wrong", fix)]
