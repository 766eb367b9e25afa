"""The check `devices`: whether jax sees the devices of the machine that this process may use.

Device files and nvidia-smi show the GPUs of the host, in a process without jax.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, group_by_host, join_texts
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
    rows = [_check_seen(all_facts), *_check_unused(all_facts)]
    if short := [(one.name, text) for one in all_facts if (text := _describe_missing_gpus(one))]:
        fix = (
            "ask the launcher for as many as jax is to use (srun --gpus-per-task, CUDA_VISIBLE_DEVICES);"
            " an allocated GPU that jax does not see is broken or in use: run nvidia-smi on that host"
        )
        rows.append(Row("visible GPUs", join_texts(short), "wrong", fix))
    rows += [row for ranks in group_by_host(all_facts).values() for row in _check_shared(ranks)]
    visible = {
        f"{o.host} GPU {g['index']}": g for o in all_facts for g in o["gpus"] if g["uuid"] in o["uuids"]
    }
    if busy := [
        (where, f"{bytes_text(gpu['used_bytes'])} of {bytes_text(gpu['memory_bytes'])}")
        for where, gpu in visible.items()
        if gpu["used_bytes"] > BUSY_SHARE * gpu["memory_bytes"]
    ]:
        fix = "another process uses it: see nvidia-smi, and end processes left by an earlier run"
        rows.append(Row("memory taken", join_texts(busy), "warning", fix))
    closed = [(one.name, f"{one['closed']} GPUs cannot be opened") for one in all_facts if one["closed"]]
    if closed and not any(_count_gpus_seen(one) for one in all_facts):
        fix = "the batch system allocated none (--gres=gpu:N asks for N), or /dev/nvidia0 has another group"
        rows.append(Row("rights", join_texts(closed), "warning", fix))
    return rows


def _check_seen(all_facts: Sequence[RankFacts]) -> Row:
    seen = {one.name: one["seen"] for one in all_facts}
    if broken := [(name, str(seen["died"])) for name, seen in seen.items() if "devices" not in seen]:
        fix = (
            "to see all of its error: python -c 'import jax; print(jax.devices())'; JAX_PLATFORMS must name"
            " platforms that exist, and a GPU's driver must be new enough for jax's plugin"
        )
        return Row("seen by jax", f"jax does not start: {join_texts(broken)}", "wrong", fix)
    finding = join_texts((name, format_devices(seen["devices"])) for name, seen in seen.items())
    if len({seen["devices"][0]["platform"] for seen in seen.values()}) > 1:
        fix = "nothing if unequal islands are intended; otherwise see the row below or the host's driver"
        return Row("seen by jax", finding, "note", fix)
    return Row("seen by jax", finding)


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


def _check_unused(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return a row if jax runs on the CPU although ranks may use GPUs."""
    may = [one for one in all_facts if one["nodes"] and one["visible"] != [] and "devices" in one["seen"]]
    idle = [one for one in may if not _count_gpus_seen(one)]
    if not idle:
        return []
    facts, where = idle[0], some([one.name for one in idle])
    finding = f"{where}: {facts['nodes']} GPUs exist (driver {facts['driver']}), but jax runs on the CPU"
    if facts["cpu_wanted"]:
        fix = "nothing if intended: JAX_PLATFORMS=cpu (or --cpu-devices) is set; unset it to use the GPUs"
        return [Row("GPUs not used", finding, "note", fix)]
    fix = f"{facts['plugin']} is installed and does not work: python -c 'import jax; jax.devices(\"cuda\")'"
    if facts["plugin"] is None:
        major = 13 if int((facts["driver"] or "0").partition(".")[0]) >= 580 else 12
        fix = f'install jax\'s CUDA plugin beside it: uv pip install "jax[cuda{major}]"'
    return [Row("GPUs not used", finding, "wrong", fix)]


def _describe_missing_gpus(facts: Facts) -> str | None:
    """Return a message if a rank sees another number of GPUs than were allocated to it; None otherwise."""
    seen, visible = _count_gpus_seen(facts), facts["visible"]
    given, by = facts["slurm"], "Slurm"
    if visible is not None:
        given, by = len(visible), "CUDA_VISIBLE_DEVICES"
    elif given is None and facts["gpus"]:
        given, by = len(facts["gpus"]), "nvidia-smi"
    return f"{by} names {given} GPUs, jax sees {seen}" if seen and given not in (None, seen) else None


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
