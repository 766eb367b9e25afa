"""The check `links`: bandwidth and latency between pairs of devices, and between pairs of ranks over MPI.

Pairs without a common rank are measured at the same time, as in a run.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, rate_text, time_text
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
    pairs = sample_pairs(len(devices))
    facts: Facts = {
        "platform": devices[0].platform,
        "pairs": {f"{a} - {b}": measure_permute([devices[a], devices[b]], num_bytes) for a, b in pairs},
    }
    context.control.all_gather("devices are measured")
    if context.comm is None:
        return facts
    facts["partners"] = _measure_rank_pairs(context)
    facts["bridge"] = _measure_bridge(context)
    return facts


def sample_pairs(num_devices: int) -> list[tuple[int, int]]:
    """Choose pairs of devices: all, or a few at even distances if there are many.

    >>> sample_pairs(3), len(sample_pairs(8)), len(sample_pairs(64))
    ([(0, 1), (0, 2), (1, 2)], 7, 8)
    """
    every = list(combinations(range(num_devices), 2))
    return every[:: -(-len(every) // MOST_PAIRS) or 1]


def measure_permute(devices: Sequence[Any], num_bytes: int) -> float:
    """Measure the bytes per second that each of two devices sends to the other."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh, spec = Mesh(np.array(devices), ("data",)), PartitionSpec("data")
    x = jax.device_put(np.ones((2, num_bytes // 4), np.float32), NamedSharding(mesh, spec))
    swap = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]),
        mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    step = jax.jit(swap)
    return num_bytes / best(lambda: jax.block_until_ready(step(x)))


def _measure_rank_pairs(context: RankContext) -> dict[str, list[float]]:
    """Measure partner -> (seconds of a small message one way, bytes per second of a large one)."""
    # a communicator of its own, so that no other message interferes
    comm, rank = context.comm.Dup(), context.rank
    measured = {}
    # in each round every rank has another partner, and over all rounds each pair is measured once
    for flipped in range(1, min(1 << (comm.size - 1).bit_length(), MOST_ROUNDS + 1)):
        comm.Barrier()
        other = rank ^ flipped
        if other < comm.size:
            figures = _measure_exchange(comm, other)
            measured |= {str(other): figures} if rank < other else {}
    comm.Free()
    return measured


def _measure_exchange(comm: Any, other: int) -> list[float]:
    def measure(num_bytes: int, repeats: int) -> float:
        sent, got = bytearray(num_bytes), bytearray(num_bytes)
        return _fastest(lambda: comm.Sendrecv(sent, other, 0, got, other, 0), repeats)

    return [measure(PING_BYTES, NUM_PINGS), BRIDGE_BYTES / measure(BRIDGE_BYTES, NUM_MESSAGES)]


def _fastest(call: Callable[[], Any], repeats: int, before: Callable[[], Any] = lambda: None) -> float:
    """Return the seconds of the fastest call after the first: every rank repeats it equally often."""
    seconds = []
    for _ in range(repeats + 1):
        before()
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def _measure_bridge(context: RankContext) -> float:
    """Measure the bytes per second of an mpi4jax sum over all ranks, relative to one rank's array."""
    import jax
    import numpy as np

    from shardtrain.islands.bridge import MpiGroup

    group = MpiGroup(context.comm)
    x = jax.device_put(np.ones(BRIDGE_BYTES // 4, np.float32), jax.local_devices(backend="cpu")[0])
    add = jax.jit(group.all_reduce)
    run = lambda: jax.block_until_ready(add(x))  # noqa: E731
    return BRIDGE_BYTES / _fastest(run, NUM_MESSAGES, before=context.comm.Barrier)


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return the rows for devices inside ranks, pairs of ranks, and the sum over all ranks."""
    rows = _check_devices(all_facts)
    ranks = {one.rank: one for one in all_facts}
    pairs = {
        (one.rank, int(other)): figures
        for one in all_facts
        for other, figures in one.get("partners", {}).items()
        if int(other) in ranks
    }
    for where, is_same in (("one host", True), ("two hosts", False)):
        chosen = {p: f for p, f in pairs.items() if (ranks[p[0]].host == ranks[p[1]].host) == is_same}
        rows += [_check_pairs(chosen, ranks, where)] if chosen else []
    if bridges := [one["bridge"] for one in all_facts if "bridge" in one]:
        rate, seconds = min(bridges), time_text(4 * EXAMPLE_PARAMETERS / min(bridges))
        finding = f"{rate_text(rate)} of gradients; {seconds} a step for 100 million parameters in float32"
        rows.append(Row("sum over ranks", finding))
    return rows


def _check_devices(all_facts: Sequence[RankFacts]) -> list[Row]:
    rates = {f"{one.name} {pair}": rate for one in all_facts for pair, rate in one["pairs"].items()}
    if not rates:
        return []
    finding = f"{_pairs_text(len(rates))}: {spread_text(rates.values(), 'B')}"
    if any(one["platform"] == "cpu" for one in all_facts):
        return [Row("devices", f"{finding} (simulated devices: memory of the host)")]
    if slow := find_outliers(rates, OUTLIER_SHARE):
        named = some([f"{pair} {rate_text(rate)}" for pair, rate in slow.items()])
        fix = "nvidia-smi topo -m shows the connections: place tensor and fsdp on devices joined by NVLink"
        return [Row("devices", f"{finding}; slow: {named}", "warning", fix)]
    return [Row("devices", finding)]


def _pairs_text(number: int) -> str:
    return "1 pair" if number == 1 else f"{number} pairs"


def _check_pairs(
    pairs: Mapping[tuple[int, int], list[float]], ranks: Mapping[int, RankFacts], where: str
) -> Row:
    rates = {pair: figures[1] for pair, figures in pairs.items()}
    pings = [figures[0] for figures in pairs.values()]
    ping_text = " to ".join(dict.fromkeys((time_text(min(pings)), time_text(max(pings)))))
    item = f"ranks on {where}"
    speeds = spread_text(rates.values(), "B")
    finding = f"{_pairs_text(len(pairs))}: 8 B in {ping_text}, 8 MiB both ways at {speeds}"
    # a pair that is slow among its equals points to a cable or port
    if slow := find_outliers(rates, OUTLIER_SHARE):
        shown = some(
            [f"{ranks[a].name} - {ranks[b].name} {rate_text(rate)}" for (a, b), rate in slow.items()]
        )
        fix = _find_common_rank(list(slow), ranks) or "check the cables and ports between these hosts"
        return Row(item, f"{finding}; slow: {shown}", "warning", fix)
    middle = median(rates.values())
    # all pairs alike, but slow for a network: MPI may have taken another one
    if where == "two hosts" and middle < SLOW_BYTES_PER_SECOND:
        fix = (
            f"100 million gradients take {4 * EXAMPLE_PARAMETERS / middle:.0f} s a step: check that MPI uses"
            " the fast network (MPICH: UCX_NET_DEVICES, FI_PROVIDER; Open MPI: --mca btl_tcp_if_include), or"
            " send less: --combine int8+mean, --local-steps"
        )
        return Row(item, finding, "warning", fix)
    return Row(item, finding)


def _find_common_rank(slow: Sequence[tuple[int, int]], ranks: Mapping[int, RankFacts]) -> str:
    """Return the rank or host that all of several slow pairs share; "" if there is none."""
    shared = set.intersection(*map(set, slow))
    if len(slow) == 1 or not shared:
        return ""
    one = ranks[shared.pop()]
    return f"all slow pairs have {one.name}: check the network card, cable and load of {one.host}"
