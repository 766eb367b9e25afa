"""The check `links`: bandwidth and latency between pairs of devices, and between pairs of ranks over MPI.

Pairs without a common rank are measured at the same time, as in a run.
"""

import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any

from shardtrain.doctor.check import (
    Check,
    Facts,
    RankContext,
    RankFacts,
    Row,
    count_text,
    rate_text,
    time_text,
)
from shardtrain.doctor.rates import best, find_outliers, spread_text
from shardtrain.system.excerpts import some

MESSAGE_BYTES = {"cpu": 4 * 2**20}
DEVICE_BYTES = 64 * 2**20
BRIDGE_BYTES, PING_BYTES = 8 * 2**20, 8
NUM_PINGS, NUM_MESSAGES = 50, 5
MOST_PAIRS, MOST_ROUNDS = 8, 16
OUTLIER_SHARE = 0.5
SLOW_BYTES_PER_SECOND = 0.3e9
EXAMPLE_PARAMETERS = 100_000_000


def collect(context: RankContext) -> Facts:
    """Measure pairs of this rank's devices, then pairs of ranks, then a sum over all ranks by mpi4jax."""
    import jax

    devices = jax.local_devices()
    num_bytes = MESSAGE_BYTES.get(devices[0].platform, DEVICE_BYTES)
    facts: Facts = {
        "platform": devices[0].platform,
        "pairs": {
            f"{a} - {b}": measure_permute(devices, a, b, num_bytes) for a, b in sample_pairs(len(devices))
        },
        "all_reduce": measure_all_reduce(devices, num_bytes) if len(devices) > 1 else None,
    }
    context.control.all_gather("devices are measured")
    if context.comm is None:
        return facts
    facts["partners"] = _measure_rank_pairs(context)
    facts["bridge"] = _measure_bridge(context)
    return facts


def sample_pairs(num_devices: int) -> list[tuple[int, int]]:
    """Choose pairs of devices: all, or neighbours and opposites if there are many.

    >>> sample_pairs(3), len(sample_pairs(8)), len(sample_pairs(64))
    ([(0, 1), (0, 2), (1, 2)], 8, 8)
    """
    every = list(combinations(range(num_devices), 2))
    if len(every) <= MOST_PAIRS:
        return every
    half = MOST_PAIRS // 2
    starts = [i * num_devices // half for i in range(half)]
    near = [(i, (i + 1) % num_devices) for i in starts]
    far = [(i, (i + num_devices // 2) % num_devices) for i in range(half)]
    return list(dict.fromkeys((min(pair), max(pair)) for pair in near + far))


def measure_permute(devices: Sequence[Any], a: int, b: int, num_bytes: int) -> float:
    """Measure the bytes per second that each of two devices sends to the other."""
    import jax

    return num_bytes / best(
        _run_on_mesh(
            [devices[a], devices[b]], num_bytes, lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)])
        )
    )


def measure_all_reduce(devices: Sequence[Any], num_bytes: int) -> float:
    """Measure the bytes per second of a sum over all devices, relative to one device's array."""
    import jax

    return num_bytes / best(_run_on_mesh(devices, num_bytes, lambda x: jax.lax.psum(x, "data")))


def _run_on_mesh(devices: Sequence[Any], num_bytes: int, body: Any):
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices), ("data",))
    spec = PartitionSpec("data")
    values = np.ones((len(devices), num_bytes // 4), np.float32)
    x = jax.device_put(values, NamedSharding(mesh, spec))
    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return lambda: jax.block_until_ready(step(x))


def schedule_rounds(size: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs of ranks that contain each pair once.

    >>> schedule_rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    >>> sorted(pair for one in schedule_rounds(6) for pair in one) == list(combinations(range(6), 2))
    True
    """
    # an odd number of ranks gets an empty slot; its partner pauses in that round
    num_slots = size + size % 2
    circle = list(range(num_slots))
    schedule = []
    for _ in range(num_slots - 1):
        pairs = [(circle[i], circle[num_slots - 1 - i]) for i in range(num_slots // 2)]
        schedule.append(sorted((min(p), max(p)) for p in pairs if max(p) < size))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return schedule


def _measure_rank_pairs(context: RankContext) -> dict[str, list[float]]:
    """Measure partner -> (seconds of a small message one way, bytes per second of a large one)."""
    # a communicator of its own, so that no other message interferes
    comm = context.comm.Dup()
    measured = {}
    for pairs in schedule_rounds(comm.size)[:MOST_ROUNDS]:
        comm.Barrier()
        for pair in pairs:
            if comm.rank in pair:
                other = pair[1] if comm.rank == pair[0] else pair[0]
                measured[str(other)] = _measure_exchange(comm, other)
    comm.Free()
    return {other: figures for other, figures in measured.items() if int(other) > context.rank}


def _measure_exchange(comm: Any, other: int) -> list[float]:
    figures = []
    for num_bytes, repeats in ((PING_BYTES, NUM_PINGS), (BRIDGE_BYTES, NUM_MESSAGES)):
        sent, got = bytearray(num_bytes), bytearray(num_bytes)
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            comm.Sendrecv(sent, other, 0, got, other, 0)
            seconds.append(time.perf_counter() - began)
        figures.append(min(seconds[1:]))
    return [figures[0], BRIDGE_BYTES / figures[1]]


def _measure_bridge(context: RankContext) -> float:
    """Measure the bytes per second of an mpi4jax sum over all ranks, relative to one rank's array."""
    import jax
    import numpy as np

    from shardtrain.islands.bridge import MpiGroup

    group = MpiGroup(context.comm)
    x = jax.device_put(np.ones(BRIDGE_BYTES // 4, np.float32), jax.local_devices(backend="cpu")[0])
    add = jax.jit(group.all_reduce)
    # every rank repeats it the same number of times, whatever its clock shows
    seconds = []
    for _ in range(NUM_MESSAGES + 1):
        context.comm.Barrier()
        began = time.perf_counter()
        jax.block_until_ready(add(x))
        seconds.append(time.perf_counter() - began)
    return BRIDGE_BYTES / min(seconds[1:])


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for devices inside ranks, pairs of ranks, and the sum over all ranks."""
    rows = _check_devices(all_facts)
    names = {one.rank: one for one in all_facts}
    pairs = {
        (one.rank, int(other)): figures
        for one in all_facts
        for other, figures in one.facts.get("partners", {}).items()
        if int(other) in names
    }
    for where, same in (("one host", True), ("two hosts", False)):
        chosen = {p: f for p, f in pairs.items() if (names[p[0]].host == names[p[1]].host) == same}
        if chosen:
            rows.append(_check_pairs(chosen, names, where))
    if bridges := {one.name: one.facts["bridge"] for one in all_facts if "bridge" in one.facts}:
        rate = min(bridges.values())
        seconds = 4 * EXAMPLE_PARAMETERS / rate
        finding = (
            f"{rate_text(rate)} of gradients; {time_text(seconds)} a step for 100 million parameters in"
            " float32"
        )
        rows.append(Row("sum over ranks", finding))
    return rows


def _check_devices(all_facts: Sequence[RankFacts]) -> list[Row]:
    rates = {f"{one.name} {pair}": rate for one in all_facts for pair, rate in one.facts["pairs"].items()}
    if not rates:
        return []
    sums = [one.facts["all_reduce"] for one in all_facts if one.facts["all_reduce"]]
    text = f"{count_text(len(rates), 'pair')}: {spread_text(rates.values(), 'B')}"
    text += f"; sums over all: {spread_text(sums, 'B')}"
    if any(one.facts["platform"] == "cpu" for one in all_facts):
        finding = f"{text} (simulated devices: memory of the host)"
        return [Row("devices", finding)]
    if slow := find_outliers(rates, OUTLIER_SHARE):
        named = some([f"{pair} {rate_text(rate)}" for pair, rate in slow.items()])
        fix = "nvidia-smi topo -m shows the connections: place tensor and fsdp on devices joined by NVLink"
        return [Row("devices", f"{text}; slow: {named}", "warning", fix)]
    return [Row("devices", text)]


def _check_pairs(pairs: dict[tuple[int, int], list[float]], names: dict[int, RankFacts], where: str) -> Row:
    rates = {pair: figures[1] for pair, figures in pairs.items()}
    pings = [figures[0] for figures in pairs.values()]
    item = f"ranks on {where}"
    text = (
        f"{count_text(len(pairs), 'pair')}: 8 B in {times_text(pings)},"
        f" 8 MiB both ways at {spread_text(rates.values(), 'B')}"
    )
    # a pair that is slow among its equals points to a cable or port
    if slow := find_outliers(rates, OUTLIER_SHARE):
        shown = [
            f"{' - '.join(names[i].name for i in pair)} {rate_text(rate)}" for pair, rate in slow.items()
        ]
        fix = _find_common_rank(list(slow), names) or "check the cables and ports between these hosts"
        return Row(item, f"{text}; slow: {some(shown)}", "warning", fix)
    middle = median(rates.values())
    # all pairs alike, but slow for a network: MPI may have taken another one
    if where == "two hosts" and middle < SLOW_BYTES_PER_SECOND:
        seconds = 4 * EXAMPLE_PARAMETERS / middle
        fix = (
            f"100 million gradients take {seconds:.0f} s a step: check that MPI uses the fast network"
            " (MPICH: UCX_NET_DEVICES, FI_PROVIDER; Open MPI: --mca btl_tcp_if_include), or send less:"
            " --combine int8+mean, --local-steps"
        )
        return Row(item, text, "warning", fix)
    return Row(item, text)


def times_text(seconds: Sequence[float]) -> str:
    """Format the smallest and the largest duration.

    >>> times_text([2e-6]), times_text([2e-6, 3e-5])
    ('2.0 us', '2.0 us to 30.0 us')
    """
    return " to ".join(dict.fromkeys((time_text(min(seconds)), time_text(max(seconds)))))


def _find_common_rank(slow: Sequence[tuple[int, int]], names: dict[int, RankFacts]) -> str:
    """Return the rank or host that all of several slow pairs share; "" if there is none."""
    shared = set.intersection(*(set(pair) for pair in slow))
    if len(slow) > 1 and shared:
        one = names[shared.pop()]
        return f"all slow pairs have {one.name}: check the network card, cable and load of {one.host}"
    return ""


CHECK = Check(
    about="bandwidth and latency between devices and between ranks",
    collect=collect,
    evaluate=evaluate,
    limit_seconds=180.0,
    if_it_hangs=(
        "messages do not pass: see ports and mpi; MPI may have chosen a network that hosts do not share"
        " (MPICH: UCX_NET_DEVICES or FI_PROVIDER=tcp; Open MPI: --mca btl_tcp_if_include)"
    ),
    measures=True,
)
