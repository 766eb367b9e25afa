"""Fingerprints of arrays on devices: find copies that should be the same bits and are not.

Each device adds up the bits of its own shards, so that a device that computes or stores wrong numbers is
found and named. Next: `synchronisation.py`, which compares islands.
"""

import platform
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.functional.model import path_text


class Divergence(NamedTuple):
    """Copies of an array that differ from those of most devices.

    Args:
      path: the path of the array.
      devices: the devices that have them.
    """

    path: str
    devices: tuple[Any, ...]


def fingerprint(x: jax.Array) -> jax.Array:
    """Return the weighted sum of an array's bits, uint32: any change of one number changes it."""
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    x = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
    # numbers of 64 bits become two of 32
    bits = jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}").astype(jnp.uint32)
    position = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    # odd weights: no change of a single number cancels out modulo 2**32
    return (bits * (2 * position + 1)).sum(dtype=jnp.uint32)


@jax.jit
def fingerprints(tree: Any) -> jax.Array:
    """Return the fingerprints of whole arrays, however they are sharded: uint32 (arrays,)."""
    return jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)])


def make_find_divergence(mesh: Mesh, shardings: Any) -> Callable[[Any], list[Divergence]]:
    """Make a function that finds arrays whose copies on several devices are not the same bits.

    Args:
      mesh: the mesh whose devices are compared.
      shardings: the NamedSharding of each array of the tree.

    Returns:
      tree -> divergences. All processes of the mesh call it at the same time; it waits for the tree. Of two
      copies that differ neither is the majority, so both are reported.
    """
    leaves = jax.tree.leaves_with_path(shardings)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    by_device = PartitionSpec(mesh.axis_names)
    devices = list(mesh.devices.flat)

    # 1. on each device: one number for the bits of each array, as this device holds them
    def of_device(tree: Any) -> jax.Array:
        return jnp.stack([fingerprint(leaf) for leaf in jax.tree.leaves(tree)])[None]

    compiled = jax.jit(
        jax.shard_map(of_device, mesh=mesh, in_specs=(specs,), out_specs=by_device, check_vma=False),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )

    # 2. on the host: devices that hold the same slice must have the same number; the minority is wrong
    def find(tree: Any) -> list[Divergence]:
        prints = np.asarray(compiled(tree))
        found = []
        for column, ((path, sharding), x) in enumerate(zip(leaves, jax.tree.leaves(tree), strict=True)):
            holders: dict[str, list[int]] = {}
            indices = sharding.devices_indices_map(x.shape)
            for row, device in enumerate(devices):
                holders.setdefault(str(indices[device]), []).append(row)
            wrong = [row for rows in holders.values() for row in minority(prints[rows, column], rows)]
            if wrong:
                found.append(Divergence(path_text(path), tuple(devices[row] for row in wrong)))
        return found

    return find


def hardware() -> str:
    """Return a key that is equal for hardware with identical rounding.

    The kind of device; for CPUs, whose compiled code differs, also their model and features.
    """
    kind = jax.devices()[0].device_kind
    if jax.devices()[0].platform != "cpu":
        return kind
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{kind} of {platform.node()}"
    features = sorted(
        {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    )
    return f"{kind} {zlib.crc32(repr(features).encode()):08x}"


def divergence_text(step: int, found: Sequence[Divergence]) -> str:
    """Return a message that names the devices whose copies differ, and the arrays."""
    devices = Counter(device for each in found for device in each.devices)
    names = [f"{device} of process {device.process_index}" for device, _ in devices.most_common()]
    paths = [each.path for each in found]
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    which = "copies on" if len(names) == 1 else "one of the copies on"
    return (
        f"after step {step} {which} {', '.join(names[:8])} of {', '.join(paths[:3])}{more} are not the bits"
        " that the others have: a device, or its memory, is faulty"
    )


def minority(prints: Sequence[int] | np.ndarray, holders: Sequence[Any]) -> list[Any]:
    """Return the holders whose fingerprint differs from the majority's; all if there is no majority.

    >>> minority([7, 7, 5], ["a", "b", "c"]), minority([7, 5], ["a", "b"]), minority([7, 7], ["a", "b"])
    (['c'], ['a', 'b'], [])
    """
    (most, number), *others = Counter(list(prints)).most_common()
    if not others:
        return []
    if number == others[0][1]:
        return list(holders)
    return [holder for print_, holder in zip(prints, holders, strict=True) if print_ != most]
