"""A rule of meeting: when a replica has moved far enough from the common parameters."""

import math

import jax.numpy as jnp
import optax

from shardtrain.combine.meeting_rule import MeetingRule


def moved(most: float) -> MeetingRule:
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
