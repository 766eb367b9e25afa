"""Compare copies of the state on devices and islands by fingerprints, and broadcast it from island 0.

A device that computes or stores wrong numbers is found and named. Next: `resume.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.combine.fragments import group_by_path
from shardtrain.functional.model import path_text
from shardtrain.train_step.state import State, copy_out_of_host
from shardtrain.trainer.coordination import Coordination


class Divergence(NamedTuple):
    """An array whose copies differ between devices.

    Args:
      path: the path of the array.
      devices: the devices whose copies differ from the majority.
    """

    path: str
    devices: tuple[Any, ...]


def compute_fingerprint(x: jax.Array) -> jax.Array:
    """Return the weighted sum of an array's bits, uint32: any change of one number changes it."""
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    x = jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x
    # numbers of 64 bits become two of 32
    bits = jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}").astype(jnp.uint32)
    position = jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape)
    # odd weights: no change of a single number cancels out modulo 2**32
    return (bits * (2 * position + 1)).sum(dtype=jnp.uint32)


@jax.jit
def compute_fingerprints(tree: Any) -> jax.Array:
    """Return the fingerprints of whole arrays, however they are sharded: uint32 (arrays,)."""
    return jnp.stack([compute_fingerprint(leaf) for leaf in jax.tree.leaves(tree)])


def make_find_divergence(mesh: Mesh, shardings: Any) -> Callable[[Any], list[Divergence]]:
    """Make a function that finds arrays whose copies on several devices have different bits.

    Args:
      mesh: the mesh whose devices are compared.
      shardings: the NamedSharding of each array of the tree.

    Returns:
      tree -> divergences. All processes of the mesh call it at the same time; it waits for the tree. If two
      copies differ, there is no majority, and both are reported.
    """
    leaves = jax.tree.leaves_with_path(shardings)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    by_device = PartitionSpec(mesh.axis_names)
    devices = list(mesh.devices.flat)

    # 1. on each device: one number for the bits of each array, as this device holds them
    def of_device(tree: Any) -> jax.Array:
        return jnp.stack([compute_fingerprint(leaf) for leaf in jax.tree.leaves(tree)])[None]

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
            wrong = [row for rows in holders.values() for row in find_minority(prints[rows, column], rows)]
            if wrong:
                found.append(Divergence(path_text(path), tuple(devices[row] for row in wrong)))
        return found

    return find


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


def find_minority(prints: Sequence[int] | np.ndarray, holders: Sequence[Any]) -> list[Any]:
    """Return the holders whose fingerprint differs from the majority's; all if there is no majority.

    >>> [find_minority(prints, ["a", "b", "c"]) for prints in ([7, 7, 5], [7, 7, 7], [7, 6, 5])]
    [['c'], [], ['a', 'b', 'c']]
    """
    (most, number), *others = Counter(list(prints)).most_common()
    if not others:
        return []
    if number == others[0][1]:
        return list(holders)
    return [holder for print_, holder in zip(prints, holders, strict=True) if print_ != most]


def synchronise(
    coordination: Coordination, state: State, own_optimizers: bool, note: Callable[[str], None]
) -> State:
    """Broadcast the common state from island 0, if it differs between islands.

    Unlike hosts round differently, so that their copies drift apart by the last bits.

    Args:
      coordination: the exchange with the other islands.
      state: the state of this island.
      own_optimizers: whether each island has its own optimizer state, which is kept.
      note: receives a line if the state differed.
    """
    paths = find_differing_arrays(coordination, state, own_optimizers)
    if not paths:
        return state
    note(
        f"{len(paths)} parameters had different bits on some islands, {paths[0]} among them; all continue"
        " with the parameters of island 0"
    )
    # the step is equal everywhere; the same array marks this as the state of the last step
    return broadcast_state(coordination, state, own_optimizers)._replace(step=state.step)


def broadcast_state(coordination: Coordination, state: State, own_optimizers: bool) -> State:
    """Broadcast the common state from island 0.

    Args:
      coordination: the exchange with the other islands.
      state: the state of this island.
      own_optimizers: whether each island has its own optimizer state, which is kept.
    """
    if coordination.transfer is None:
        return state
    common, owners = _common(state, own_optimizers), coordination.owners
    if owners is None:
        found = coordination.transfer.map(_broadcast, copy_out_of_host(common))
        return state._replace(**jax.device_put(found, jax.tree.map(lambda x: x.sharding, common)))
    # all islands broadcast the groups in the same order
    parts = zip(owners.transfers, owners.split(common), strict=True)
    return state._replace(**owners.join(common, [transfer.map(_broadcast, part) for transfer, part in parts]))


def find_differing_arrays(coordination: Coordination, state: State, own_optimizers: bool) -> list[str]:
    """Return the paths of the common arrays whose bits differ between islands.

    Args:
      coordination: the exchange with the other islands.
      state: the state of this island.
      own_optimizers: whether each island has its own optimizer state, which is not compared.
    """
    if coordination.transfer is None:
        return []
    assert coordination.islands is not None
    common, owners, grid = _common(state, own_optimizers), coordination.owners, coordination.grid
    parts = {"": group_by_path(common)}
    if owners is not None:
        keys = (",".join(map(str, group.stages)) for group in owners.groups)
        parts = dict(zip(keys, owners.split(common), strict=True))
    mine = {
        key: dict(
            zip(sorted(part), np.asarray(compute_fingerprints(copy_out_of_host(part))).tolist(), strict=True)
        )
        for key, part in parts.items()
    }
    prints = coordination.islands.all_gather_islands("fingerprints", mine)
    # every rank compares the copies of every group, so that all find the same
    differing: set[str] = set()
    for key in {key for each in prints for key in each}:
        copies = [each[key] for each in prints if key in each]
        if grid is not None:
            stages = enumerate(map(int, key.split(",")))
            copies = [grid.select_replica(prints, replica)[stage][key] for replica, stage in stages]
        differing |= {path for path in copies[0] if len({copy[path] for copy in copies}) > 1}
    return sorted(differing)


def find_faulty_copies(
    coordination: Coordination, step: int, problem: str, hardware: str, params: Any
) -> str | None:
    """Return a message about faulty copies of the parameters on any rank; None if there are none.

    Only islands of the same hardware and mesh compute the same bits, so only these are compared.

    Args:
      coordination: the exchange with the other islands.
      step: steps done.
      problem: a message about this island's own devices, or "".
      hardware: a key that is equal for islands that compute the same bits.
      params: the parameters of this island.
    """
    if coordination.islands is None:
        return problem or None
    prints = str(np.asarray(compute_fingerprints(params)).tolist())
    owners = coordination.owners
    group = [hardware, [] if owners is None else [each.blocks for each in owners.groups]]
    gathered = coordination.all_gather(f"copies after step {step}", [problem, group, prints])
    if problems := [each for each, _, _ in gathered if each]:
        return problems[0]
    names = coordination.islands.control.names
    wrong = []
    # only equal hardware has identical rounding: the minority of each group is faulty
    for group in {str(group) for _, group, _ in gathered}:
        alike = [rank for rank, (_, other, _) in enumerate(gathered) if str(other) == group]
        wrong += [names[rank] for rank in find_minority([gathered[rank][2] for rank in alike], alike)]
    if not wrong:
        return None
    which = "has" if len(wrong) == 1 else "one of them has"
    return (
        f"after step {step} {', '.join(sorted(wrong))} {which} other parameters than islands of the same"
        " hardware: a device, or its memory, is faulty"
    )


def _common(state: State, own_optimizers: bool) -> dict[str, Any]:
    names = ("step", "seed", "params", "model_state", "outer_state")
    names += () if own_optimizers else ("opt_state",)
    return {name: getattr(state, name) for name in names}


def _broadcast(arrays: Any, group: Any) -> Any:
    return [group.broadcast(x) for x in arrays]
