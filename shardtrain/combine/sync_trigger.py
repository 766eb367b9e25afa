"""Triggers, which decide whether replicas with local steps synchronise at a step that `every` allows.

A new one is a function here and an entry of `SYNC_TRIGGERS`; tests/combine/test_sync_trigger.py checks it.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardtrain.errors.messages import near


class SyncTrigger(NamedTuple):
    """A statistic of each replica, and a decision by the statistics of all; both run inside jit.

    Args:
      measure: (deltas, params) -> float32 scalar. Both are path -> array of a fragment: the changes of this
        replica, and the common parameters. It must be finite without changes too.
      is_due: float32 (n,) -> bool scalar: whether deltas are sent now, given the statistics of all replicas
        of a mesh, or of the processes of all islands.
    """

    measure: Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array]
    is_due: Callable[[jax.Array], jax.Array]


def drift(most: float) -> SyncTrigger:
    """Synchronise when the parameters of a replica drifted from the common ones by a fraction of their norm.

    Args:
      most: replicas synchronise when the norm of a replica's changes divided by the norm of the common
        parameters is above this.

    Raises:
      ValueError: `most` is not a finite number of 0 or more.

    >>> import jax.numpy as jnp
    >>> trigger = drift(0.1)
    >>> values = [trigger.measure({"a": jnp.array([x])}, {"a": jnp.array([2.0])}) for x in (0.1, 0.3)]
    >>> bool(trigger.is_due(jnp.stack(values))), bool(trigger.is_due(jnp.stack(values[:1])))
    (True, False)

    Source: Kamp et al. 2018, Efficient decentralized deep learning by dynamic model averaging, section 3,
    with the distance relative to the norm.
    """
    if not (math.isfinite(most) and most >= 0):
        raise ValueError(f"drift has the number {most}; use a fraction of the norm, 0 or more, such as 0.01")
    # parameters may all be 0; a NaN synchronises
    return SyncTrigger(
        measure=lambda deltas, params: optax.tree.norm(deltas) / (optax.tree.norm(params) + 1e-12),
        is_due=lambda values: ~(jnp.max(values) <= most),
    )


ALWAYS = "always"

SYNC_TRIGGERS: dict[str, Callable[[float], SyncTrigger]] = {"drift": drift}
"""Name -> function that makes the trigger for a number, which is written after a colon."""


def make_sync_trigger(text: str) -> SyncTrigger | None:
    """Make a trigger by name; return None for "always".

    Args:
      text: "always", or a name of `SYNC_TRIGGERS` with its number, such as "drift:0.01".

    Raises:
      ValueError: there is no such trigger, or it cannot use the number.
    """
    if text == ALWAYS:
        return None
    name, _, number = (part.strip() for part in text.partition(":"))
    if name == "moved":
        raise ValueError(f"when is {text!r}; moved is drift now: write 'drift:{number or 0.01}'")
    if name not in SYNC_TRIGGERS:
        raise ValueError(f"when is {text!r}: {near(name, [ALWAYS, *SYNC_TRIGGERS])}")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"when is {text!r}; write a number after a colon, such as '{name}:0.01'") from None
    return SYNC_TRIGGERS[name](value)
