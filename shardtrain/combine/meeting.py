"""Rules by which replicas with local steps decide whether to meet, where the synchronisation lets them.

A new one is a function here and an entry of `MEETING_RULES`, which tests/combine/test_meeting.py checks.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardtrain.errors.messages import near


class MeetingRule(NamedTuple):
    """A number that each replica finds, and the decision that all make of these numbers, both inside jit.

    Args:
      measure: (deltas, params) -> float32 scalar. Both are path -> array of a fragment: what this replica
        has changed, and the common parameters. Without changes it is finite too.
      is_due: float32 (n,) -> bool scalar: whether deltas are sent now. The numbers are those of the replicas
        of a mesh, or of the processes of all islands: each process gives the number of its island or stage.
    """

    measure: Callable[[Mapping[str, jax.Array], Mapping[str, jax.Array]], jax.Array]
    is_due: Callable[[jax.Array], jax.Array]


def drift(most: float) -> MeetingRule:
    """Meet when a replica's parameters differ from the common ones by more than a part of their norm.

    Args:
      most: the norm of what a replica changed over the norm of the common parameters, up to which replicas
        go on alone.

    Raises:
      ValueError: `most` is not a finite number of 0 or more.

    >>> import jax.numpy as jnp
    >>> rule = moved(0.1)
    >>> values = [rule.measure({"a": jnp.array([x])}, {"a": jnp.array([2.0])}) for x in (0.1, 0.3)]
    >>> bool(rule.is_due(jnp.stack(values))), bool(rule.is_due(jnp.stack(values[:1])))
    (True, False)

    Source: Kamp et al. 2018, Efficient decentralized deep learning by dynamic model averaging, section 3,
    with the distance relative to the norm.
    """
    if not (math.isfinite(most) and most >= 0):
        raise ValueError(f"moved has the number {most}; use a part of the norm, 0 or more, such as 0.01")
    # parameters may all be 0; a NaN meets
    return MeetingRule(
        measure=lambda deltas, params: optax.tree.norm(deltas) / (optax.tree.norm(params) + 1e-12),
        is_due=lambda values: ~(jnp.max(values) <= most),
    )


ALWAYS = "always"

MEETING_RULES: dict[str, Callable[[float], MeetingRule]] = {"moved": drift}
"""Name -> function that makes the rule of its number, which is written after a colon."""


def make_meeting_rule(text: str) -> MeetingRule | None:
    """Make a rule by name; None is "always", which asks nothing.

    Args:
      text: "always", or a name of `MEETING_RULES` with its number, such as "moved:0.01".

    Raises:
      ValueError: there is no such rule, or it cannot use the number.
    """
    if text == ALWAYS:
        return None
    name, _, number = (part.strip() for part in text.partition(":"))
    if name not in MEETING_RULES:
        raise ValueError(f"when is {text!r}: {near(name, [ALWAYS, *MEETING_RULES])}")
    try:
        value = float(number)
    except ValueError:
        raise ValueError(f"when is {text!r}; write a number after a colon, such as '{name}:0.01'") from None
    return MEETING_RULES[name](value)
