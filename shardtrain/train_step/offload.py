"""Keep the optimizer's state in host memory between steps; a step copies it to the devices and back.

Scalars stay on the device. Next: `placement.py`, `step.py`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

HOST = "pinned_host"
"""The kind of host memory that devices read and write directly."""


def shard_on_host(opt_state: Any, shardings: Any, mesh: Mesh) -> Any:
    """Return the shardings of an optimizer's state in host memory.

    Args:
      opt_state: the shapes of the state.
      shardings: its shardings in device memory.
      mesh: the mesh, whose devices must support such memory.

    Raises:
      ValueError: the devices do not support it.
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
    """Copy an optimizer's state to device memory, inside jit.

    Args:
      opt_state: the state.
      shardings: the shardings of the state between steps.
    """
    if not is_offloaded(shardings):
        return opt_state
    return jax.device_put(opt_state, jax.tree.map(lambda s: s.with_memory_kind("device"), shardings))


def copy_out_of_host(arrays: Any) -> Any:
    """Copy the arrays of a pytree that are in host memory to device memory, outside jit."""
    return jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")) if is_offloaded(x.sharding) else x,
        arrays,
    )


def is_offloaded(shardings: Any) -> bool:
    """Return whether any of these shardings is in host memory."""
    return any(each.memory_kind == HOST for each in jax.tree.leaves(shardings))


def offload_optimizer(function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """Wrap a function (state, ...) -> (state, metrics) to copy the optimizer's state from the host and back.

    Args:
      function: computes with all arrays in device memory.
      shardings: the `State` of shardings between calls.
    """
    if not is_offloaded(shardings.opt_state):
        return function

    def call(state: Any, *rest: Any) -> Any:
        state = state._replace(opt_state=copy_to_device(state.opt_state, shardings.opt_state))
        state, metrics = function(state, *rest)
        return state._replace(opt_state=jax.device_put(state.opt_state, shardings.opt_state)), metrics

    return call
