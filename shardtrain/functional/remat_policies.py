"""The values of the option `remat`: what is kept for the backward pass, and what is computed again.

Next: `remat.py`, which applies them to any model.
"""

from collections.abc import Callable
from typing import Any

import jax

BLOCK_OUTPUT = "block_output"
"""The name, by `checkpoint_name`, of what a block adds to the residual stream."""

CHEAP = ("sharding_constraint", "convert_element_type", "concatenate", "stack", "reshape", "broadcast_in_dim")
"""Steps between a stored weight and its use: what gathers, casts and joins."""


def _not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in CHEAP


REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    "weights": _not_gathered,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "outputs": jax.checkpoint_policies.save_only_these_names(BLOCK_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Value of the option `remat` -> what is kept for the backward pass; the rest is recomputed."""
