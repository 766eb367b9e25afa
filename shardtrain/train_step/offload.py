"""Keep the optimizer's state in the memory of the host between steps; a step works on the device's.

Scalars stay on the device. Next: `placement.py`, `step.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

HOST = "pinned_host"
"""The kind of memory of a host that its devices read and write directly."""


def shard_on_host(opt_state: Any, shardings: Any, mesh: Mesh) -> Any:
    """Return the shardings of an optimizer's state with its arrays in the memory of the host.

    Args:
      opt_state: its shapes.
      shardings: like `opt_state`, in the memory of the devices.
      mesh: whose devices must have such a memory.

    Raises:
      ValueError: they have none.
    """
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        found = f"has {', '.join(kinds)}" if kinds else "is described and not here, so has none"
        raise ValueError(
            f"offload is 'optimizer', which needs a memory {HOST} of the host, and {device.device_kind}"
            f" {found}; use --offload none"
        )

    def placed(leaf: Any, sharding: NamedSharding) -> NamedSharding:
        return sharding.with_memory_kind(HOST) if leaf.ndim else sharding

    return jax.tree.map(placed, opt_state, shardings)


def copy_to_device(opt_state: Any, shardings: Any) -> Any:
    """Copy an optimizer's state to the memory of the devices, inside jit.

    Args:
      opt_state: the state.
      shardings: those that it has between steps.
    """
    if not is_offloaded(shardings):
        return opt_state
    return jax.device_put(opt_state, jax.tree.map(lambda s: s.with_memory_kind("device"), shardings))


def copy_out_of_host(arrays: Any) -> Any:
    """Copy what a pytree has in the memory of the host to that of the devices, outside jit."""
    return jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")) if is_offloaded(x.sharding) else x,
        arrays,
    )


def is_offloaded(shardings: Any) -> bool:
    """Whether any array with these shardings is in the memory of the host."""
    return any(each.memory_kind == HOST for each in jax.tree.leaves(shardings))


def offload_optimizer(function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Wrap (state, ...) -> (state, metrics), for jit: read the optimizer's state from the host, and write it.

    Args:
      function: computes with all arrays in the memory of the devices.
      shardings: the `State` of shardings between calls.
    """
    if not is_offloaded(shardings.opt_state):
        return function

    def call(state: Any, *rest: Any) -> Any:
        state = state._replace(opt_state=copy_to_device(state.opt_state, shardings.opt_state))
        state, metrics = function(state, *rest)
        return state._replace(opt_state=jax.device_put(state.opt_state, shardings.opt_state)), metrics

    return call
