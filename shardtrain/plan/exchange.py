"""What devices compute by hand in a layout, so that it is another traced program. No jax."""

from collections.abc import Mapping
from typing import NamedTuple

from shardtrain import axes
from shardtrain.sharding.layout import Layout


class Exchange(NamedTuple):
    """What devices compute by hand in a layout, so that it is another program.

    Args:
      attention: over context, as `Layout.context_attention`; None: sequences are whole.
      experts: size of the axis expert.
      context: of the axis context, into whose parts of sequences experts take their tokens.
    """

    attention: str | None = None
    experts: int = 1
    context: int = 1


NO_EXCHANGE = Exchange()


def exchange_of(layout: Layout, sizes: Mapping[str, int]) -> Exchange:
    """Return what devices compute by hand in a layout."""
    context = sizes.get(axes.CONTEXT, 1)
    attention = layout.context_attention if context > 1 else None
    return Exchange(attention, sizes.get(axes.EXPERT, 1), context)
