"""Parse, check and complete the sizes of mesh axes. No jax.

Next: `layout.py`.
"""

import math
import re
from collections.abc import Mapping

from shardtrain import axes
from shardtrain.errors.messages import near, refuse
from shardtrain.system.excerpts import short

MOST_DEVICES, MOST_DIGITS = 1 << 24, 15
"""Largest size of an axis, and most characters of a size that are read as a number."""


def parse_mesh(text: str) -> dict[str, int]:
    """Read axis sizes such as `data=2,fsdp=-1`.

    Raises:
      ValueError: a part that is not `axis=number`, an axis given twice.

    >>> parse_mesh("data=2,fsdp=-1")
    {'data': 2, 'fsdp': -1}
    """
    sizes: dict[str, int] = {}
    problems = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, equals, size = (p.strip() for p in part.partition("="))
        if not equals or not re.fullmatch("-?[0-9]+", size):
            problems.append(f"{short(part)} is not AXIS=NUMBER, as in data=2")
        elif len(size) > MOST_DIGITS:
            problems.append(_format_too_large(axis, size))
        elif axis in sizes:
            problems.append(f"axis {axis!r} is given twice: {sizes[axis]} and {size}; give it once")
        else:
            sizes[axis] = int(size)
    refuse(f"mesh {text!r} cannot be read", problems)
    return sizes


def find_mesh_problems(mesh: Mapping[str, int]) -> list[str]:
    """List the problems of these axis sizes, one sentence each."""
    problems = [f"axis {near(axis, axes.AXES)}" for axis in mesh if axis not in axes.AXES]
    for axis, size in mesh.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            problems.append(
                f"axis {axis!r} has size {short(size)}; allowed: a whole number from 1, or -1 (the rest)"
            )
        elif size > MOST_DEVICES:
            problems.append(_format_too_large(axis, size))
    rest = [axis for axis, size in mesh.items() if size == -1]
    if len(rest) > 1:
        problems.append(f"axes {rest} are all -1; at most one can be the rest")
    return problems


def _format_too_large(axis: str, size: int | str) -> str:
    return (
        f"axis {axis!r} has size {short(size)}; allowed: at most {MOST_DEVICES}; give the number of devices"
        " of this axis, or -1 for all that the others leave"
    )


def axis_sizes(mesh: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Return the size of every axis; -1 becomes the number of devices divided by the other sizes.

    Raises:
      ValueError: the sizes do not multiply to `num_devices`.

    >>> axis_sizes({"data": 2, "tensor": -1}, 8)["tensor"]
    4
    """
    sizes = {axis: mesh.get(axis, 1) for axis in axes.AXES}
    asked = ",".join(f"{axis}={size}" for axis, size in mesh.items())
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest = [axis for axis, size in sizes.items() if size == -1]
    if rest and num_devices % fixed == 0:
        sizes[rest[0]] = num_devices // fixed
    if math.prod(sizes.values()) != num_devices:
        raise ValueError(format_mesh_size(asked, fixed, bool(rest), num_devices))
    return sizes


def is_one_device(sizes: Mapping[str, int]) -> bool:
    """Return whether all axes have size 1; then no dim needs a name."""
    return all(size == 1 for size in sizes.values())


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def format_mesh_size(asked: str, fixed: int, has_rest: bool, num_devices: int) -> str:
    """Format the error for axis sizes that do not multiply to the number of devices."""
    allowed = ", ".join(map(str, divisors(num_devices)))
    change = f"make the sizes multiply to {num_devices} (its divisors: {allowed}), or let one size be -1"
    if has_rest:
        change = f"make the other sizes multiply to a divisor of {num_devices} ({allowed})"
    needs = f"a multiple of {fixed} devices" if has_rest else f"{fixed} device{'s' if fixed > 1 else ''}"
    return (
        f"mesh {asked!r} needs {needs}, and there are {num_devices}; {change}."
        " On a CPU, --cpu-devices N simulates N devices."
    )
