"""Attention that leaves a mark in a traced program, by which its queries and keys are found.

Models ask Flax's rules for their attention (`models/attention.py`). Next: `trace.py`.
"""

from collections.abc import Callable
from typing import Any

import jax

MARKS = {"marked_attention_causal": True, "marked_attention_of_all": False}
"""Name of a traced call -> whether it is of causal attention."""


def marked_attention(
    whole: Callable[..., jax.Array], q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, **seen: Any
) -> jax.Array:
    """Compute attention as the model does, in a call with a name of `MARKS`.

    Args:
      whole: the model's own attention over whole sequences.
      q, k, v: as for `ContextAttention`.
      causal: likewise.
      seen: the other facts, likewise; None where there is none.
    """
    known = {name: fact for name, fact in seen.items() if fact is not None and not hasattr(fact, "shape")}
    traced = {name: fact for name, fact in seen.items() if hasattr(fact, "shape")}

    def attention(q: Any, k: Any, v: Any, traced: Any) -> Any:
        return whole(q, k, v, causal=causal, **known, **traced)

    attention.__name__ = next(name for name, of_causal in MARKS.items() if of_causal == causal)
    return jax.jit(attention)(q, k, v, traced)
