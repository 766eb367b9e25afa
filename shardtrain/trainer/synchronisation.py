"""Synchronise the state of several islands: compare fingerprints, and broadcast from island 0.

What is compared on the devices of one mesh is in `fingerprints.py`. Next: `resume.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardtrain.combine.fragments import by_path
from shardtrain.train_step.offload import to_device
from shardtrain.train_step.state import State
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.fingerprints import fingerprints, minority


def synchronise(
    coordination: Coordination, state: State, own_optimizers: bool, note: Callable[[str], None]
) -> State:
    """Make the state that islands have in common equal to that of island 0, if it differs.

    Unlike hosts round differently, so that their copies drift apart by the last bits.

    Args:
      coordination: the exchange with the other islands.
      state: the state of this island.
      own_optimizers: each island has an optimizer state of its own, which is left alone.
      note: receives a line where the state differed.
    """
    paths = differing_arrays(coordination, state, own_optimizers)
    if not paths:
        return state
    note(
        f"{len(paths)} parameters were not the same bits on all islands, {paths[0]} among them;"
        " all continue with those of island 0"
    )
    # the step is equal everywhere, and as the same array it says that this is the state of the last step
    return broadcast_state(coordination, state, own_optimizers)._replace(step=state.step)


def broadcast_state(coordination: Coordination, state: State, own_optimizers: bool) -> State:
    """Broadcast from island 0 the part of the state that islands have in common.

    Args:
      coordination: the exchange with the other islands.
      state: the state of this island.
      own_optimizers: each island has an optimizer state of its own, which is left alone.
    """
    if coordination.transfer is None:
        return state
    common, owners = _common(state, own_optimizers), coordination.owners
    if owners is None:
        found = coordination.transfer.map(_broadcast, to_device(common))
        return state._replace(**jax.device_put(found, jax.tree.map(lambda x: x.sharding, common)))
    # group after group, as all islands go through them
    parts = zip(owners.transfers, owners.split(common), strict=True)
    return state._replace(**owners.join(common, [transfer.map(_broadcast, part) for transfer, part in parts]))


def differing_arrays(coordination: Coordination, state: State, own_optimizers: bool) -> list[str]:
    """Return the paths of the common arrays that are not the same bits on all islands.

    Args:
      coordination: the exchange with the other islands.
      state: the state of this island.
      own_optimizers: each island has an optimizer state of its own, which is not compared.
    """
    if coordination.transfer is None:
        return []
    assert coordination.islands is not None
    common, owners, seats = _common(state, own_optimizers), coordination.owners, coordination.seats
    parts = {"": by_path(common)}
    if owners is not None:
        keys = (",".join(map(str, group.stages)) for group in owners.groups)
        parts = dict(zip(keys, owners.split(common), strict=True))
    mine = {
        key: dict(zip(sorted(part), np.asarray(fingerprints(to_device(part))).tolist(), strict=True))
        for key, part in parts.items()
    }
    prints = coordination.islands.all_gather_islands("fingerprints", mine)
    # every rank compares the copies of every group, so that all find the same
    differing: set[str] = set()
    for key in {key for each in prints for key in each}:
        copies = [each[key] for each in prints if key in each]
        if seats is not None:
            stages = enumerate(map(int, key.split(",")))
            copies = [seats.of_replica(prints, replica)[stage][key] for replica, stage in stages]
        differing |= {path for path in copies[0] if len({copy[path] for copy in copies}) > 1}
    return sorted(differing)


def faulty_copies(
    coordination: Coordination, step: int, problem: str, hardware: str, params: Any
) -> str | None:
    """Return a message about faulty copies of the parameters on any rank; None if there are none.

    Islands of the same hardware and mesh compute the same bits. Others drift apart by the last bits, which
    `synchronise` removes at every save, so they are not compared.

    Args:
      coordination: the exchange with the other islands.
      step: steps done.
      problem: what was found on this island's own devices, or "".
      hardware: equal for islands that compute the same bits.
      params: the parameters of this island.
    """
    if coordination.islands is None:
        return problem or None
    prints = str(np.asarray(fingerprints(params)).tolist())
    owners = coordination.owners
    group = [hardware, [] if owners is None else [each.blocks for each in owners.groups]]
    gathered = coordination.all_gather(f"copies after step {step}", [problem, group, prints])
    if problems := [each for each, _, _ in gathered if each]:
        return problems[0]
    names = coordination.islands.control.names
    wrong = []
    # only equal hardware rounds alike: compare within each group, where the minority is faulty
    for group in {str(group) for _, group, _ in gathered}:
        alike = [rank for rank, (_, other, _) in enumerate(gathered) if str(other) == group]
        wrong += [names[rank] for rank in minority([gathered[rank][2] for rank in alike], alike)]
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
