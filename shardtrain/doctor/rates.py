"""The check `rates`: matrix and memory rates of each device, and whether its matrix products are exact."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, TypeVar

from shardtrain.doctor.check import Facts, RankContext, RankFacts, Row, rate_text
from shardtrain.plan.devices import find_device
from shardtrain.system.excerpts import some

SIZES = {"cpu": (1024, 2**24)}
LARGE = (8192, 2**28)
"""Sizes by platform, and for all others: rows of square matrices, and number of float32 elements to copy."""

REPEATS, BUDGET_SECONDS = 5, 1.0
OUTLIER_SHARE, CPU_OUTLIER_SHARE = 0.8, 0.5
"""Fraction of the median rate of its kind below which a device is slow; CPUs, whose ranks interfere, have a
lower one."""

OF_PEAK = 0.4
"""Fraction of the data sheet's rate below which a device counts as throttled, shared or misconfigured."""

_Key = TypeVar("_Key")

ITEMS = {
    "float32": ("float32 products", "flop"),
    "bfloat16": ("bfloat16 products", "flop"),
    "memory": ("memory bandwidth", "B"),
}
"""Measurement -> its name in the table, and its unit."""


def collect(context: RankContext) -> Facts:
    """Measure every device of this rank, one after the other, all ranks at the same time."""
    import jax

    kinds = ((one, {"platform": one.platform, "kind": one.device_kind}) for one in jax.local_devices())
    return {"devices": [kind | measure(device) for device, kind in kinds]}


def measure(device: Any) -> Facts:
    """Measure the rates of one device.

    Args:
      device: a jax device.

    Returns:
      `float32` and `bfloat16` in flops per second, `memory` in bytes read and written per second, and
      `exact`: whether the product of integers was exact.
    """
    size, elements = SIZES.get(device.platform, LARGE)
    rates, exact = {}, True
    for dtype in ("float32", "bfloat16"):
        run, is_right = make_product(device, size, dtype)
        exact = exact and is_right()
        rates[dtype] = 2 * size**3 / best(run)
    return {**rates, "memory": 2 * 4 * elements / best(make_copy(device, elements)), "exact": exact}


def make_product(device: Any, size: int, dtype: str) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Return a function that multiplies matrices of small integers, and one that checks the exact product."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    # u v^T times p q^T is (v.p) u q^T: known without a second product
    v, p = np.arange(size) % 2, np.arange(size) % 3 % 2
    u, q = np.arange(size) % 3, np.arange(size) % 4
    left, right = (
        jax.device_put(np.outer(a, b).astype(np.float32), device).astype(dtype) for a, b in ((u, v), (p, q))
    )
    multiply = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))

    def is_right() -> bool:
        expected = jax.device_put(np.outer(u * int(v @ p), q).astype(np.float32), device)
        return bool((multiply(left, right) == expected).all())

    return lambda: jax.block_until_ready(multiply(left, right)), is_right


def make_copy(device: Any, elements: int) -> Callable[[], None]:
    """Return a function that adds a constant to an array in place; new memory would measure page faults."""
    import jax
    import numpy as np

    array = [jax.device_put(np.ones(elements, np.float32), device)]
    add = jax.jit(lambda x: x + np.float32(1.0), donate_argnums=0)

    def run() -> None:
        array[0] = jax.block_until_ready(add(array[0]))

    return run


def best(run: Callable[[], None]) -> float:
    """Return the seconds of the fastest of several calls, after a first call that compiles."""
    run()
    began, seconds = time.monotonic(), []
    while len(seconds) < REPEATS and (not seconds or time.monotonic() - began < BUDGET_SECONDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def evaluate(all_facts: Sequence[RankFacts]) -> list[Row]:
    """Return a row for each kind of device and measurement, with the slow devices."""
    devices = {
        f"{one.name} device {number}": device
        for one in all_facts
        for number, device in enumerate(one["devices"])
    }
    rows = []
    if wrong := [where for where, device in devices.items() if not device["exact"]]:
        fix = (
            "do not train on it: the hardware, its overclocking or its driver makes errors; have it replaced"
        )
        finding = f"a product of small integers is wrong on {some(wrong)}"
        rows.append(Row("exact products", finding, "wrong", fix))
    for kind in dict.fromkeys(device["kind"] for device in devices.values()):
        alike = {where: device for where, device in devices.items() if device["kind"] == kind}
        rows += [_check_rate(alike, kind, name) for name in ITEMS]
    return rows


def _check_rate(devices: Mapping[str, Facts], kind: str, name: str) -> Row:
    item, unit = ITEMS[name]
    rates = {where: device[name] for where, device in devices.items()}
    middle = median(rates.values())
    finding = f"{len(rates)} x {kind}: {spread_text(rates.values(), unit)}"
    # compare devices of one kind with each other, then with the data sheet
    is_cpu = next(iter(devices.values()))["platform"] == "cpu"
    if slow := find_outliers(rates, CPU_OUTLIER_SHARE if is_cpu else OUTLIER_SHARE):
        named = some(
            [f"{where} {rate_text(rate, unit)} ({rate / middle:.0%})" for where, rate in slow.items()]
        )
        fix = (
            "every step waits for the slowest: check it for another process, heat and clocks"
            " (nvidia-smi -q -d PERFORMANCE), a shared core; or give it fewer rows (--shares)"
        )
        return Row(item, f"{finding}; slow: {named}", "warning", fix)
    peak = _find_peak(kind, name)
    if peak and middle < OF_PEAK * peak:
        finding += f", {middle / peak:.0%} of the data sheet's {rate_text(peak, unit)}"
        fix = "check for another process, a power cap and clocks: nvidia-smi -q -d PERFORMANCE,POWER"
        return Row(item, finding, "warning", fix)
    return Row(item, finding)


def _find_peak(kind: str, name: str) -> float | None:
    known = find_device(kind)
    if known is None or name == "float32":
        return None
    return known.matrix_flops_per_second if name == "bfloat16" else known.memory_bytes_per_second


def spread_text(values: Iterable[float], unit: str) -> str:
    """Format the range and the median of several rates.

    >>> spread_text([2e9, 2.04e9], "B"), spread_text([1e9, 2e9, 3e9], "B")
    ('2.0 GB/s', '1.0 to 3.0 GB/s, median 2.0 GB/s')
    """
    values = list(values)
    low, high = rate_text(min(values), unit), rate_text(max(values), unit)
    if low == high:
        return low
    low_number, _, low_unit = low.partition(" ")
    both = f"{low_number} to {high}" if high.endswith(low_unit) else f"{low} to {high}"
    return f"{both}, median {rate_text(median(values), unit)}"


def find_outliers(rates: dict[_Key, float], share: float) -> dict[_Key, float]:
    """Return the entries below a fraction of the median.

    >>> find_outliers({"a": 10.0, "b": 7.0, "c": 10.5}, 0.8)
    {'b': 7.0}
    """
    limit = share * median(rates.values())
    return {name: rate for name, rate in rates.items() if rate < limit}
