"""List the messages of a combiner, by running it on shapes over a group that only counts.

So the predicted bytes are those of the combiner and its codecs, without a second description. Next:
`train_step/bucket_exchange.py` (between islands), `plan/island_exchange.py` (predicted bytes).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.combine.combiner import Combiner
from shardtrain.combine.group import Op

ALL_REDUCE, ALL_GATHER, EXCHANGE = "all-reduce", "all-gather", "collective-permute"


class Message(NamedTuple):
    """An array that one rank passes to its group in one call.

    Args:
      kind: the collective: `ALL_REDUCE`, `ALL_GATHER` or `EXCHANGE`.
      num_bytes: the bytes of this rank's array.
      num_ranks: the number of ranks that take part.
    """

    kind: str
    num_bytes: int
    num_ranks: int


class CountingGroup:
    """Rank 0 of a pretended group, a `Group` for `jax.eval_shape` that lists its messages.

    Args:
      size: number of ranks.

    Attributes:
      messages: the messages of this rank, in the order of the calls.

    >>> group = CountingGroup(4)
    >>> jax.eval_shape(group.all_gather, jax.ShapeDtypeStruct((3,), jnp.float32)).shape
    (4, 3)
    >>> group.messages
    [Message(kind='all-gather', num_bytes=12, num_ranks=4)]
    """

    def __init__(self, size: int) -> None:
        self.size, self.index = size, 0
        self.messages: list[Message] = []

    def all_reduce(self, x: jax.Array, span: int | None = None) -> jax.Array:
        """Count a sum over `span` ranks, see `Group`."""
        self._count(ALL_REDUCE, x, self.size if span is None else span)
        return x

    def exchange(self, x: jax.Array, sources: Sequence[int]) -> jax.Array:
        """Count an array that is sent to one other rank, see `Group`."""
        assert sorted(sources) == [*range(self.size)], sources
        self._count(EXCHANGE, x, 1 if sources[0] == 0 else self.size)
        return x

    def all_gather(self, x: jax.Array) -> jax.Array:
        """Count an array that all ranks get, see `Group`."""
        self._count(ALL_GATHER, x, self.size)
        return jnp.broadcast_to(x, (self.size, *x.shape))

    def whole(self, x: jax.Array, op: Op = "sum", *, stages: bool = False) -> jax.Array:
        """Return `x`: reductions between devices of one replica are not sent to other replicas."""
        return x

    def _count(self, kind: str, x: jax.Array, num_ranks: int) -> None:
        if num_ranks > 1 and x.size:
            self.messages.append(Message(kind, x.size * x.dtype.itemsize, num_ranks))


def trace_messages(combiner: Combiner, tree: Any, num_ranks: int) -> list[Message]:
    """List the messages of one rank in one round of a combiner, without computing anything.

    Args:
      combiner: any combiner, with codecs before it.
      tree: arrays or shapes of one rank.
      num_ranks: number of ranks that are combined.

    >>> from shardtrain.combine import make_combiner
    >>> tree = {"up": jax.ShapeDtypeStruct((100,), jnp.float32)}
    >>> trace_messages(make_combiner("mean"), tree, 2)
    [Message(kind='all-reduce', num_bytes=408, num_ranks=2)]
    >>> [(each.kind, each.num_bytes) for each in trace_messages(make_combiner("int8+mean"), tree, 2)]
    [('all-gather', 100), ('all-gather', 8)]
    """
    group = CountingGroup(num_ranks)

    def combine(tree: Any) -> Any:
        return combiner.combine(tree, jnp.float32(1), combiner.init(tree), group)[:3]

    jax.eval_shape(combine, tree)
    return group.messages
