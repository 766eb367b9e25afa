"""Read the groups of devices of a collective, and find the mesh axes along which they differ.

XLA has three spellings of replica groups, and pairs for a permutation. Devices count in C order of the axis
sizes: device = np.ravel_multi_index(position, sizes).
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from shardtrain.plan.hlo.text import Instruction

Groups = tuple[tuple[int, ...], ...]
"""Device numbers that exchange data with each other, group by group."""

_NUMBERS = r"\[([\d,]+)\]"
_PERMUTATION = r"(?:T\(([\d,]+)\))?"
_ARRANGED = re.compile(rf"{_NUMBERS}(?:<={_NUMBERS})?{_PERMUTATION}")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_SUB_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def find_device_groups(instruction: Instruction, num_devices: int) -> Groups:
    """Return the groups of devices within which a collective moves data.

    Args:
        instruction: a collective; a permutation's pairs count as groups of two.
        num_devices: devices that the program runs on.

    Returns:
        Groups of device numbers.

    Raises:
        ValueError: the groups have an unknown spelling.
    """
    pairs = instruction.find_braced("source_target_pairs")
    if pairs is not None:
        return parse_list(pairs)
    groups = instruction.find_braced("replica_groups")
    if groups is not None:
        return parse_list(groups) or (tuple(range(num_devices)),)
    start = instruction.attributes.find("replica_groups=")
    if start < 0:
        return (tuple(range(num_devices)),)
    text = instruction.attributes[start + len("replica_groups=") :]
    arranged, mesh = _ARRANGED.match(text), _MESH.match(text)
    if arranged:
        return _make_groups(_arrange(arranged))
    if mesh:
        return _make_groups(_parse_over_mesh(mesh))
    raise ValueError(
        f"collective {instruction.name} has replica groups that are spelled in an unknown way: {text[:60]!r}."
        " Known are {{0,1},{2,3}}, [2,2]<=[4], mesh['a'=2,'b'=2] {'a'} and source_target_pairs; add the new"
        " spelling to shardtrain/plan/hlo/replica_groups.py."
    )


def find_axes(groups: Groups, axis_sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes along which members of a group differ, in the order of the mesh.

    Args:
        groups: device numbers, group by group.
        axis_sizes: size of each mesh axis, slowest first.

    Returns:
        Names of axes; empty if no group has two devices.

    Examples:
        >>> find_axes(((0, 2), (1, 3)), {"data": 2, "tensor": 2})
        ('data',)
    """
    sizes = tuple(axis_sizes.values())
    varies = np.zeros(len(sizes), dtype=bool)
    for group in groups:
        positions = np.stack(np.unravel_index(np.array(group), sizes))
        varies |= (positions != positions[:, :1]).any(axis=1)
    return tuple(name for name, differs in zip(axis_sizes, varies, strict=True) if differs)


def parse_list(text: str) -> Groups:
    """Parse groups of numbers in braces.

    Args:
        text: numbers in braces, from inside the braces of an attribute.

    Returns:
        The numbers, group by group; empty groups are left out.

    Examples:
        >>> parse_list("{0,1},{2,3}")
        ((0, 1), (2, 3))
    """
    groups = (tuple(_integers(group)) for group in re.findall(r"\{([\d,\s]*)\}", text))
    return tuple(group for group in groups if group)


def _arrange(match: re.Match[str]) -> np.ndarray:
    """Parse the second spelling, `[4,2]<=[2,4]T(1,0)`: iota of the right sizes, transposed, then reshaped."""
    left, right, permutation = match.groups()
    sizes = _integers(right or left)
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    if permutation:
        devices = devices.transpose(_integers(permutation))
    return devices.reshape(_integers(left)) if right else devices


def _parse_over_mesh(match: re.Match[str]) -> np.ndarray:
    """Parse the third spelling, `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a':(1)2,'b'}`."""
    axes_text, ids_text, joined = match.groups()
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes_text)}
    position = dict(zip(sizes, np.indices(tuple(sizes.values())).reshape(len(sizes), -1), strict=True))
    devices = _device_order(ids_text, math.prod(sizes.values()))
    # split off the joined sub-axes: `inside` numbers devices within a group, the rest numbers the groups
    inside = np.zeros_like(devices)
    for name, before, size in _SUB_AXIS.findall(joined):
        size_before, size_joined = (int(before), int(size)) if size else (1, sizes[name])
        stride = sizes[name] // (size_before * size_joined)
        part = position[name] // stride % size_joined
        position[name] = position[name] - part * stride
        inside = inside * size_joined + part
    outside = np.ravel_multi_index(tuple(position.values()), tuple(sizes.values()))
    num_groups = len(np.unique(outside))
    return devices[np.lexsort((inside, outside))].reshape(num_groups, -1)


def _device_order(ids_text: str | None, num_devices: int) -> np.ndarray:
    """Return the device numbers in C order of XLA's mesh, which may differ from the caller's."""
    if not ids_text:
        return np.arange(num_devices)
    arranged = _ARRANGED.match(ids_text)
    return _arrange(arranged).reshape(-1) if arranged else np.array(_integers(ids_text))


def _make_groups(devices: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in group) for group in devices)


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
