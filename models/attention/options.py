"""What decides which scores an attention has, and the contract of an entry of `ATTENTIONS`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class ScoreOptions(NamedTuple):
    """The scores that count, and how they are changed.

    Attributes:
      causal: whether a query sees only keys up to its own position; otherwise it sees all keys (in an
        encoder, or of another sequence, whose length may differ).
      mask_BS: 0 for keys that no query sees, such as padding; or (batch, seq, keys), 0 for keys that a query
        does not see; by default all are seen.
      segments_BT: for self-attention, the number of each token's segment; a query sees only keys of its own
        segment. By default there is one segment.
      window: for causal attention, the largest number of keys that a query sees: its own and those just
        before it. A traced int scalar may differ from block to block. None means all keys.
      soft_cap: replaces scores x by soft_cap * tanh(x / soft_cap). None disables it.
      bias_BHTS: added to the scaled scores. None adds nothing.
    """

    causal: bool = True
    mask_BS: jax.Array | None = None
    segments_BT: jax.Array | None = None
    window: int | jax.Array | None = None
    soft_cap: float | None = None
    bias_BHTS: jax.Array | None = None


class Attention(NamedTuple):
    """An attention over whole sequences.

    Attributes:
      find_obstacles: (queries, keys, `ScoreOptions`, devices) -> what the attention needs and does not find,
        as ends of a sentence "it needs ..."; arrays may be shapes. The devices are `Ops.devices`, or [].
      attend: (queries, keys, values, `ScoreOptions`) -> the context, shaped and typed as the queries; dims
        are (batch, seq, heads, head_dim), and the number of key heads divides that of query heads. Softmax is
        in float32.
    """

    find_obstacles: Callable[[Any, Any, ScoreOptions, Sequence[Any]], list[str]]
    attend: Callable[[jax.Array, jax.Array, jax.Array, ScoreOptions], jax.Array]
