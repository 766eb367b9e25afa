"""The check `devices`: whether jax sees the devices of the machine that this process may use."""

from collections.abc import Sequence

from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, by_host, each, some
from shardtrain.doctor.child import tell
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


def look(here: RankContext) -> Facts:
    """Collect the devices of this rank, and the GPUs visible to it."""
    facts = visible_gpu_facts(here.environ)
    facts["uuids"] = uuids(facts, facts["visible"])
    # ranks that share a GPU start their child processes at the same time
    environ = {**here.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return facts | {"seen": tell(PROGRAM, environ, CHILD_SECONDS)}


def judge(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return rows for the devices that jax sees, those that it should see, and shared GPUs."""
    rows = [_seen(all_facts)]
    if idle := [one for one in all_facts if _is_idle(one.facts)]:
        rows.append(_not_used(idle))
    if short := [one for one in all_facts if _problem(one.facts)]:
        do = (
            "ask the launcher for as many as jax shall use (srun --gpus-per-task, CUDA_VISIBLE_DEVICES);"
            " a GPU that"
            " jax does not see although it is given is broken or taken: nvidia-smi on that host"
        )
        found = each((one.name, str(_problem(one.facts))) for one in short)
        rows.append(Row(check="devices", what="visible GPUs", found=found, verdict="wrong", do=do))
    rows += [row for ranks in by_host(all_facts).values() for row in _shared(ranks)]
    return rows + _busy(all_facts) + _rights(all_facts)


def text(devices: Sequence[Facts]) -> str:
    """Format a list of devices.

    >>> text([{"platform": "cpu", "kind": "cpu", "memory_bytes": None}] * 2)
    '2 x cpu'
    """
    groups: dict[str, int] = {}
    for device in devices:
        memory = f" ({bytes_text(device['memory_bytes'])} to use)" if device["memory_bytes"] else ""
        kind = device["kind"] + memory
        groups[kind] = groups.get(kind, 0) + 1
    return ", ".join(f"{number} x {kind}" for kind, number in groups.items())


def _seen(all_facts: Sequence[RankFacts]) -> Row:
    broken = [
        (one.name, one.facts["seen"]["died"]) for one in all_facts if "devices" not in one.facts["seen"]
    ]
    if broken:
        do = (
            "run it alone to see all of its error: python -c 'import jax; print(jax.devices())';"
            " JAX_PLATFORMS must"
            " name what is there, and a GPU's driver must be new enough for jax's plugin"
        )
        found = "jax does not start: " + each((name, str(died)) for name, died in broken)
        return Row(check="devices", what="seen by jax", found=found, verdict="wrong", do=do)
    found = each((one.name, text(one.facts["seen"]["devices"])) for one in all_facts)
    if len({one.facts["seen"]["devices"][0]["platform"] for one in all_facts}) > 1:
        do = "unequal islands are allowed; if they should be equal, see the row below or the host's driver"
        return Row(check="devices", what="seen by jax", found=found, verdict="note", do=do)
    return Row(check="devices", what="seen by jax", found=found)


def _gpus_seen(facts: Facts) -> int:
    return sum(device["platform"] in ("gpu", "cuda") for device in facts["seen"].get("devices", ()))


def _is_idle(facts: Facts) -> bool:
    """Return whether jax runs on the CPU although this rank may use GPUs."""
    may = facts["nodes"] > 0 and facts["visible"] != []
    return may and "devices" in facts["seen"] and _gpus_seen(facts) == 0


def _not_used(idle: Sequence[RankFacts]) -> Row:
    facts = idle[0].facts
    where = some([one.name for one in idle])
    found = f"{where}: {facts['nodes']} GPUs are there (driver {facts['driver']}), and jax runs on the CPU"
    if facts["cpu_wanted"]:
        do = "nothing if it is meant: JAX_PLATFORMS=cpu (or --cpu-devices) says so; unset it to use the GPUs"
        return Row(check="devices", what="GPUs not used", found=found, verdict="note", do=do)
    if facts["plugin"] is None:
        major = 13 if int((facts["driver"] or "0").partition(".")[0]) >= 580 else 12
        do = f'install jax\'s CUDA plugin beside it: uv pip install "jax[cuda{major}]"'
    else:
        do = (
            f"{facts['plugin']} is installed and does not work: see python -c 'import jax;"
            ' jax.devices("cuda")\''
        )
    return Row(check="devices", what="GPUs not used", found=found, verdict="wrong", do=do)


def _problem(facts: Facts) -> str | None:
    """Return a message if a rank sees another number of GPUs than it was allocated; None if none is known."""
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
    found = f"{ranks[0].host}: {len(shared)} of {len(users)} GPUs have several ranks, such as {names}"
    every = {gpu["uuid"] for one in ranks for gpu in one.facts["gpus"]}
    if len(every) >= len(ranks):
        do = (
            "give each rank its own: unset SHARDTRAIN_BIND=no, or bind by the launcher (srun"
            " --gpus-per-task=1);"
            " for one island over all of them start one rank a host"
        )
        return [Row(check="devices", what="shared GPUs", found=found, verdict="wrong", do=do)]
    do = f"they share its memory and its time: start {len(every)} ranks there, one a GPU"
    return [Row(check="devices", what="shared GPUs", found=found, verdict="warning", do=do)]


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
    do = "somebody else is on it: see nvidia-smi, and end what is left of an earlier run"
    return [Row(check="devices", what="memory taken", found=each(busy.items()), verdict="warning", do=do)]


def _rights(all_facts: Sequence[RankFacts]) -> list[Row]:
    closed = [
        (one.name, f"{one.facts['closed']} GPUs cannot be opened") for one in all_facts if one.facts["closed"]
    ]
    if not closed or any(_gpus_seen(one.facts) for one in all_facts):
        return []
    do = (
        "the batch system gave none (ask for them: --gres=gpu:N), or you are not in the group of /dev/nvidia0"
    )
    return [Row(check="devices", what="rights", found=each(closed), verdict="warning", do=do)]


CHECK = Check(
    about="devices seen by jax, against the GPUs that are there and were given",
    look=look,
    judge=judge,
    limit_seconds=CHILD_SECONDS + 60.0,
    if_it_hangs="a GPU's driver hangs: nvidia-smi, dmesg; a reboot of that host is usual",
)
