"""Exchanges between pairs of devices of a mesh axis, for stages of a pipeline that compute different things.

All devices of a mesh take part in a permute. These are all-gathers of two devices, which wait for each other
alone; all-to-alls would send as much, but jax has no vmap of them. Next: `ring.py`, which sends keys by them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def partners(num: int, round_number: int) -> tuple[int, ...]:
    """Return the partner of each device in a round; in the rounds 1 to num - 1 each has every other one once.

    Args:
      num: devices, an even number.
      round_number: from 1 on.

    References:
      The circle method for round-robin tournaments, https://en.wikipedia.org/wiki/Round-robin_tournament.

    >>> partners(4, 1), partners(4, 2), partners(4, 3)
    ((1, 0, 3, 2), (2, 3, 0, 1), (3, 2, 1, 0))
    """
    last = num - 1
    # in a circle of all but the last, the device that would be its own partner has the last
    alone = round_number * (num // 2) % last
    return (*(last if i == alone else (round_number - i) % last for i in range(last)), alone)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def swapped(arrays: Any, axis: str, partner: tuple[int, ...]) -> Any:
    """Return the arrays of each device's partner.

    Args:
      arrays: a pytree, shaped alike on all devices.
      axis: the mesh axis, manual here.
      partner: of each device, who has this device as its own; none or two of them are their own partners,
        and exchange what they do not use. If all are, nothing is sent.
    """
    if partner == tuple(range(len(partner))):
        return arrays
    alone = [i for i, other in enumerate(partner) if i == other]
    groups = [[i, other] for i, other in enumerate(partner) if i < other] + [alone] * bool(alone)
    place = {device: group.index(device) for group in groups for device in group}
    is_second = jnp.asarray([place[other] == 1 for other in partner])[lax.axis_index(axis)]

    def of_partner(x: jax.Array) -> jax.Array:
        # a choice, as XLA for GPUs turns a gather and a dynamic slice of it back into a permute
        first, second = lax.all_gather(x, axis, axis_index_groups=groups)
        return jnp.where(is_second, second, first)

    return jax.tree.map(of_partner, arrays)


def _swapped_forward(arrays: Any, axis: str, partner: tuple[int, ...]) -> tuple[Any, None]:
    return swapped(arrays, axis, partner), None


def _swapped_backward(axis: str, partner: tuple[int, ...], _: None, cotangent: Any) -> tuple[Any]:
    return (swapped(cotangent, axis, partner),)


swapped.defvjp(_swapped_forward, _swapped_backward)


def shifted(arrays: Any, axis: str, num: int, places: int) -> Any:
    """Return the arrays of the device so many places before, round a ring; each device sends them twice.

    Args:
      arrays: a pytree, shaped alike on all devices.
      axis: the mesh axis, manual here.
      num: devices of it, an even number.
      places: of which direction its sign says.
    """
    # two reflections make a rotation
    arrays = swapped(arrays, axis, tuple(-i % num for i in range(num)))
    return swapped(arrays, axis, tuple((places - i) % num for i in range(num)))
