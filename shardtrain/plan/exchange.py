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
    """

    attention: str | None = None
    experts: int = 1


NO_EXCHANGE = Exchange()


def exchange_of(layout: Layout, sizes: Mapping[str, int]) -> Exchange:
    """Return what devices compute by hand in a layout."""
    return Exchange(
        layout.context_attention if sizes.get(axes.CONTEXT, 1) > 1 else None, sizes.get(axes.EXPERT, 1)
    )
