"""Compute the steps of an elastic run anew from its epochs alone, bit by bit as its islands did.

Each member's own sum is computed on its mesh over its slots in its order, sums are added in the order of the
ring, and each mesh has its own state. A state differs between meshes in the last bit of a norm at most, and a
joiner of another mesh copies that of the oldest member; which steps it had watched before is not in the
ledger. So a replay of a run with several meshes can differ from it in last bits, one with equal meshes not.
"""

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from shardtrain.elastic.epoch import Epoch
from shardtrain.elastic.flat_sum import FlatSum
from shardtrain.elastic.ledger import LedgerLine, list_ledger
from shardtrain.elastic.program import Program, copy_leaves, make_packing
from shardtrain.elastic.ring import OwnSum, Ring

Mesh = TypeVar("Mesh", bound=Hashable)


def replay_steps(
    programs: Mapping[Mesh, Program],
    meshes: Mapping[str, Mesh],
    epochs: Sequence[Epoch],
    first: int,
    last: int,
) -> Mesh:
    """Compute steps of a run anew.

    Args:
      programs: a program for each mesh of a member, with the state after the first `first` steps.
      meshes: member -> its mesh.
      epochs: all epochs of the run, in order.
      first: number of steps applied.
      last: number of steps applied at the end.

    Returns:
      The mesh of the last chief; its program has the state that the chief saved.

    Raises:
      ValueError: an epoch is missing.
    """
    living: list[Mesh] = list(programs)
    for line in list_ledger(epochs, last, first):
        epoch = epochs[line.epoch - 1]
        if epoch.founded and epoch.step == line.step:
            # the founder took the state from a checkpoint of the last chief
            living = living[:1]
        present = list(dict.fromkeys(meshes[name] for name in epoch.names))
        donor = next((mesh for mesh in present if mesh in living), living[0])
        for mesh in present:
            if mesh not in living:
                tree = jax.tree.structure(programs[mesh].state)
                programs[mesh].state = jax.tree.unflatten(tree, copy_leaves(programs[donor].state))
        living = present
        total = _compute_total(programs, meshes, line, epoch.find_batches(line.step))
        for mesh in present:
            programs[mesh].apply(line.step, total)
    return living[0]


def _compute_total(
    programs: Mapping[Mesh, Program], meshes: Mapping[str, Mesh], line: LedgerLine, batches: range | None
) -> Any:
    """Return the sum of a step as all its members held it."""
    given = () if batches is None else (batches,)
    found = {
        name: [programs[meshes[name]].compute(line.step, group, *given) for group in groups]
        for name, groups in line.groups.items()
    }
    like, tree = jax.tree.flatten(next(sums[0] for sums in found.values() if sums))
    packing, own = make_packing(next(iter(programs.values())), like), []
    for sums in found.values():
        # as an island adds them: to zeros, so that -0.0 becomes 0.0
        flat = packing.make_zeros()
        for each in sums:
            for mine, new in zip(packing.view(flat), jax.tree.leaves(each), strict=True):
                mine += np.asarray(new)
        own.append(FlatSum(flat, packing.codecs))
    return jax.tree.unflatten(tree, packing.view(sum_as_ring(own).arrays))


def sum_as_ring(sums: Sequence[OwnSum]) -> Any:
    """Return the sum that a ring of members makes of their own sums, bitwise.

    Args:
      sums: the own sum of each member, oldest first.
    """
    rings = [Ring(own.copy(len(sums)), index, len(sums)) for index, own in enumerate(sums)]
    while not rings[0].is_whole:
        payloads = [ring.payload() for ring in rings]
        for index, ring in enumerate(rings):
            ring.receive(payloads[index - 1])
    return rings[0].total


def list_differences(found: Any, expected: Any) -> list[str]:
    """Return the paths of arrays of a state that differ in a bit, with their largest difference.

    Args:
      found: a tree of arrays.
      expected: a tree of the same structure, shapes and dtypes.
    """
    paths, tree = jax.tree.flatten_with_path(found)
    problems = []
    for (path, x), y in zip(paths, tree.flatten_up_to(expected), strict=True):
        one, other = np.asarray(x), np.asarray(y)
        if one.tobytes() != other.tobytes():
            most = np.max(np.abs(one.astype(np.float64) - other.astype(np.float64)))
            problems.append(f"{jax.tree_util.keystr(path, simple=True, separator='/')}: by up to {most:.3g}")
    return problems


def hash_arrays(tree: Any) -> str:
    """Return the SHA-256 of the bytes of all arrays of a tree, in order."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(tree):
        found.update(np.ascontiguousarray(x).tobytes())
    return found.hexdigest()
