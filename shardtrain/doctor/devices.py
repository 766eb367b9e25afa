"""The check `devices`: whether jax sees the devices of the machine that this process may use."""

from collections.abc import Sequence

from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, by_host, each, some
from shardtrain.doctor.child import run_child
from shardtrain.doctor.visible_gpus import uuids, visible_gpu_facts
from shardtrain.report.quantities import bytes_text

CHILD_SECONDS = 90.0
BUSY_SHARE = 0.1
"""Fraction of a GPU's memory in use above which another process must be using it."""

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
    facts = visible_gpu_facts(context.environ)
    facts["uuids"] = uuids(facts, facts["visible"])
    # ranks that share a GPU start their child processes at the same time
    environ = {**context.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return facts | {"seen": run_child(PROGRAM, environ, CHILD_SECONDS)}


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return rows for the devices that jax sees, those that it should see, and shared GPUs."""
    rows = [_seen(all_facts)]
    if idle := [one for one in all_facts if _is_idle(one.facts)]:
        rows.append(_not_used(idle))
    if short := [one for one in all_facts if _problem(one.facts)]:
        fix = (
            "ask the launcher for as many as jax is to use (srun --gpus-per-task, CUDA_VISIBLE_DEVICES);"
            " an allocated GPU that jax does not see is broken or in use: run nvidia-smi on that host"
        )
        finding = each((one.name, str(_problem(one.facts))) for one in short)
        rows.append(Row(check="devices", item="visible GPUs", finding=finding, status="wrong", fix=fix))
    rows += [row for ranks in by_host(all_facts).values() for row in _shared(ranks)]
    return rows + _busy(all_facts) + _rights(all_facts)


def text(devices: Sequence[Facts]) -> str:
    """Format a list of devices.

    >>> text([{"platform": "cpu", "kind": "cpu", "memory_bytes": None}] * 2)
    '2 x cpu'
    """
    groups: dict[str, int] = {}
    for device in devices:
        memory = f" ({bytes_text(device['memory_bytes'])} usable)" if device["memory_bytes"] else ""
        kind = device["kind"] + memory
        groups[kind] = groups.get(kind, 0) + 1
    return ", ".join(f"{number} x {kind}" for kind, number in groups.items())


def _seen(all_facts: Sequence[RankFacts]) -> Row:
    broken = [
        (one.name, one.facts["seen"]["died"]) for one in all_facts if "devices" not in one.facts["seen"]
    ]
    if broken:
        fix = (
            "run it alone to see all of its error: python -c 'import jax; print(jax.devices())';"
            " JAX_PLATFORMS must"
            " name platforms that exist, and a GPU's driver must be new enough for jax's plugin"
        )
        finding = "jax does not start: " + each((name, str(died)) for name, died in broken)
        return Row(check="devices", item="seen by jax", finding=finding, status="wrong", fix=fix)
    finding = each((one.name, text(one.facts["seen"]["devices"])) for one in all_facts)
    if len({one.facts["seen"]["devices"][0]["platform"] for one in all_facts}) > 1:
        fix = "nothing if unequal islands are intended; otherwise see the row below or the host's driver"
        return Row(check="devices", item="seen by jax", finding=finding, status="note", fix=fix)
    return Row(check="devices", item="seen by jax", finding=finding)


def _gpus_seen(facts: Facts) -> int:
    return sum(device["platform"] in ("gpu", "cuda") for device in facts["seen"].get("devices", ()))


def _is_idle(facts: Facts) -> bool:
    """Return whether jax runs on the CPU although this rank may use GPUs."""
    may = facts["nodes"] > 0 and facts["visible"] != []
    return may and "devices" in facts["seen"] and _gpus_seen(facts) == 0


def _not_used(idle: Sequence[RankFacts]) -> Row:
    facts = idle[0].facts
    where = some([one.name for one in idle])
    finding = f"{where}: {facts['nodes']} GPUs exist (driver {facts['driver']}), but jax runs on the CPU"
    if facts["cpu_wanted"]:
        fix = "nothing if intended: JAX_PLATFORMS=cpu (or --cpu-devices) is set; unset it to use the GPUs"
        return Row(check="devices", item="GPUs not used", finding=finding, status="note", fix=fix)
    if facts["plugin"] is None:
        major = 13 if int((facts["driver"] or "0").partition(".")[0]) >= 580 else 12
        fix = f'install jax\'s CUDA plugin beside it: uv pip install "jax[cuda{major}]"'
    else:
        fix = (
            f"{facts['plugin']} is installed and does not work: see python -c 'import jax;"
            ' jax.devices("cuda")\''
        )
    return Row(check="devices", item="GPUs not used", finding=finding, status="wrong", fix=fix)


def _problem(facts: Facts) -> str | None:
    """Return a message if a rank sees another number of GPUs than were allocated to it; None otherwise."""
    seen = _gpus_seen(facts)
    if not seen:
        return None
    given = len(facts["visible"]) if facts["visible"] is not None else facts["slurm"]
    by = "CUDA_VISIBLE_DEVICES" if facts["visible"] is not None else "Slurm"
    if given is None and facts["gpus"]:
        given, by = len(facts["gpus"]), "nvidia-smi"
    return f"{by} names {given} GPUs, jax sees {seen}" if given is not None and given != seen else None


def _shared(ranks: Sequence[RankFacts]) -> list[Row]:
    """Return rows for ranks of a host that use the same GPU."""
    users: dict[str, list[str]] = {}
    for one in ranks:
        for uuid in one.facts["uuids"] if _gpus_seen(one.facts) else ():
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
        return [Row(check="devices", item="shared GPUs", finding=finding, status="wrong", fix=fix)]
    fix = f"they share its memory and its time: start {len(every)} ranks there, one a GPU"
    return [Row(check="devices", item="shared GPUs", finding=finding, status="warning", fix=fix)]


def _busy(all_facts: Sequence[RankFacts]) -> list[Row]:
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
    return [Row(check="devices", item="memory taken", finding=each(busy.items()), status="warning", fix=fix)]


def _rights(all_facts: Sequence[RankFacts]) -> list[Row]:
    closed = [
        (one.name, f"{one.facts['closed']} GPUs cannot be opened") for one in all_facts if one.facts["closed"]
    ]
    if not closed or any(_gpus_seen(one.facts) for one in all_facts):
        return []
    fix = (
        "the batch system allocated none (ask for them: --gres=gpu:N), or you are not in the group of"
        " /dev/nvidia0"
    )
    return [Row(check="devices", item="rights", finding=each(closed), status="warning", fix=fix)]


CHECK = Check(
    about="devices seen by jax, compared with the GPUs that exist and were allocated",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=CHILD_SECONDS + 60.0,
    if_it_hangs="a GPU's driver hangs: nvidia-smi, dmesg; a reboot of that host is usual",
)
