"""The policies of the option `remat`: which arrays are kept for the backward pass.

Next: `remat.py`, which applies them to any model.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

BLOCK_INPUT = "block_input"
"""The `checkpoint_name` of the inputs of a block."""

BLOCK_OUTPUT = "block_output"
"""The `checkpoint_name` of the outputs that a block adds to the residual stream."""

WHOLE_SEQ = "whole_seq"
"""The `checkpoint_name` of the inputs of a block after an all-gather along a sharded sequence."""

OFFLOAD = "offload"
"""The policy that keeps arrays in the memory of the host."""

CHEAP = ("sharding_constraint", "convert_element_type", "concatenate", "stack", "reshape", "broadcast_in_dim")
"""Operations between a stored weight and its use: gathers, casts and concatenations."""

ELEMENTWISE = (
    *CHEAP,
    *("abs", "add", "add_any", "and", "clamp", "copy", "div"),
    *("eq", "erf", "exp", "exp2", "ge", "gt"),
    *("integer_pow", "iota", "layout_constraint", "le", "log", "logistic", "lt"),
    *("max", "min", "mul", "ne", "neg", "not", "optimization_barrier"),
    *("or", "pow", "reduce_max", "reduce_sum", "rsqrt", "select_n", "sign"),
    *("slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub"),
    *("tanh", "transpose"),
)
"""Operations that a GPU recomputes faster than it writes and reads their results."""


def _is_not_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name not in CHEAP


def not_elementwise(primitive: Any, *_: Any, **__: Any) -> bool:
    """The policy "weights" for GPUs: keep the results of products and other slow operations."""
    return primitive.name not in ELEMENTWISE


REMAT_POLICIES: dict[str, Callable[..., Any]] = {
    "weights": _is_not_gathered,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "outputs": jax.checkpoint_policies.save_only_these_names(BLOCK_OUTPUT),
    "full": jax.checkpoint_policies.nothing_saveable,
    OFFLOAD: jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""Value of the option `remat` -> the policy that selects arrays to keep; others are recomputed."""


def name_block_input(x: Any, remat: str) -> Any:
    """Name the inputs of a block, inside the recomputed function, for the policy "offload".

    Args:
      x: a pytree of arrays.
      remat: the policy; only "offload" needs the name.
    """
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, BLOCK_INPUT), x) if remat == OFFLOAD else x
