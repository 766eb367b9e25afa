"""Exchange keys and values around a ring of devices, by sends to neighbours or by pairwise exchanges."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax


def partners(num: int, round_number: int) -> tuple[int, ...]:
    """Return the partner of each device in a round; in rounds 1 to num - 1 each meets every other one once.

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
def swap(arrays: Any, axis: str, partner: tuple[int, ...]) -> Any:
    """Exchange arrays between partners: each device gets those of its partner.

    Args:
      arrays: a pytree, shaped alike on all devices.
      axis: the mesh axis, which must be manual.
      partner: the partner of each device, which is symmetric. None, two or all devices are their own
        partners; two of them exchange arrays that they do not use, and if all are, nothing is sent.
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


def _swap_forward(arrays: Any, axis: str, partner: tuple[int, ...]) -> tuple[Any, None]:
    return swap(arrays, axis, partner), None


def _swap_backward(axis: str, partner: tuple[int, ...], _: None, cotangent: Any) -> tuple[Any]:
    return (swap(cotangent, axis, partner),)


swap.defvjp(_swap_forward, _swap_backward)


def shift(arrays: Any, axis: str, num: int, places: int) -> Any:
    """Shift arrays around the ring by a number of places, as two pairwise exchanges.

    Args:
      arrays: a pytree, shaped alike on all devices.
      axis: the mesh axis, which must be manual.
      num: number of devices along it, which is even.
      places: number of places; its sign is the direction.
    """
    # two reflections make a rotation
    arrays = swap(arrays, axis, tuple(-i % num for i in range(num)))
    return swap(arrays, axis, tuple((places - i) % num for i in range(num)))


Order = Literal["any", "balanced", "window"]
"""How keys are distributed. "any": queries see keys of all positions. The others are causal: "balanced", in
the order of `Ring.balance_halves`; "window", contiguous shards, with only the steps that the window needs."""


@dataclass(frozen=True)
class Ring:
    """The devices of a ring, and the order of their keys.

    Args:
      axis: the mesh axis, which must be manual.
      num: number of devices along it.
      order: see `Order`.
      reach: in the order "window", the largest number of half shards before its own that a query sees.
      soft_cap: see `Queries`.
      in_pairs: whether to exchange in pairs, which involve no device of another ring, instead of by
        collective-permutes, which wait for all devices of the mesh; `num` is even.
    """

    axis: str
    num: int
    order: Order
    reach: int = 0
    soft_cap: float | None = None
    in_pairs: bool = False

    @property
    def num_steps(self) -> int:
        """The number of steps: one for the device's own keys, one for those of each other device."""
        return 1 + (self.reach + 1) // 2 if self.order == "window" else self.num

    @property
    def is_tournament(self) -> bool:
        """Whether a device receives keys from their owner in each step, and not from its neighbour."""
        return self.in_pairs and self.order != "window"

    @property
    def num_parts(self) -> int:
        """The number of parts of a device's queries and keys; pairs of parts may be skipped."""
        return 2 if self.order in ("balanced", "window") else 1

    def other(self, step: int) -> jax.Array:
        """Return the device whose keys are here in a step."""
        me = lax.axis_index(self.axis)
        if self.is_tournament and step > 0:
            return jnp.asarray(partners(self.num, step))[me]
        return (me - step) % self.num

    def next_keys(self, step: int, of_device: Any, keys: Any, computed: Any) -> Any:
        """Return the keys of the device `other`.

        Args:
          step: from 0, in which they are the device's own keys.
          of_device: arrays of the keys of this device.
          keys: the keys of the step before.
          computed: arrays that earlier steps computed. Keys are sent after them: otherwise a compiler sends
            the keys of all steps early, and allocates memory for all of them.
        """
        if step == 0:
            return of_device
        (of_device, keys), _ = lax.optimization_barrier(((of_device, keys), computed))
        return self.exchange_with_opponent(of_device, step) if self.is_tournament else self.send(keys)

    def exchange_with_opponent(self, arrays: Any, step: int) -> Any:
        """Exchange arrays with the device `other` of a tournament."""
        return self._exchange(arrays, partners(self.num, step))

    def _exchange(self, arrays: Any, partner: tuple[int, ...]) -> Any:
        if self.in_pairs:
            return swap(arrays, self.axis, partner)
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, list(enumerate(partner))), arrays)

    def send(self, arrays: Any, places: int = 1) -> Any:
        """Send arrays along the ring by a number of places."""
        if self.in_pairs:
            return shift(arrays, self.axis, self.num, places)
        pairs = [(i, (i + places) % self.num) for i in range(self.num)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, pairs), arrays)

    def early_part(self, device: Any) -> jax.Array:
        """Return the index of the early part of a device in the balanced order."""
        return jnp.where(2 * device < self.num, 2 * device, 2 * self.num - 1 - 2 * device)

    def balance_halves(self, x: jax.Array, *, inverse: bool = False) -> jax.Array:
        """Exchange halves of contiguous shards, so that each device has one early and one late part.

        Device i has the parts 2i and 2i + 1 of 2 num. It keeps the first and exchanges the second with device
        num - 1 - i; then it has `early_part(i)` and 2 num - 1 - `early_part(i)`.

        Args:
          x: (B, T, ...) of each device; T is even.
          inverse: convert that order back to contiguous shards.

        Returns:
          The same shape, in rising order of positions.

        References:
          Brandon et al. 2023, Striped Attention, https://arxiv.org/abs/2311.09431, section 3, on the
          imbalance of causal rings; an early and a late part for each device is the order of Megatron-LM's
          context parallelism, with the devices in another order.
        """
        # the second device of a pair keeps its late part
        keeps_early = 2 * lax.axis_index(self.axis) < self.num
        first, second = jnp.split(x, 2, 1)
        kept, other = _select_either(keeps_early, first, second) if inverse else (first, second)
        found = self._exchange(other, tuple(reversed(range(self.num))))
        return jnp.concatenate((kept, found) if inverse else _select_either(keeps_early, kept, found), 1)


def _select_either(in_order: Any, first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(in_order, first, second), jnp.where(in_order, second, first)
