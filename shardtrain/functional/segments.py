"""Rows of several documents: the model gets the number of each token's document, its segment."""

from collections.abc import Callable
from typing import Any

import jax


def apply_to_segments(apply: Callable[..., Any], tokens: jax.Array, segments: jax.Array | None) -> Any:
    """Call a model with tokens, and with segments if there are some.

    Args:
      apply: the model.
      tokens: int32 (B, T).
      segments: int32 (B, T), or None.

    Raises:
      ValueError: it takes tokens alone, so its attention would cross from one document into the next.
    """
    if segments is None:
        return apply(tokens)
    try:
        return apply(tokens, segments)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(
            "the batch has segments (documents that do not see each other), and the model takes none"
            f" ({error}); use data with --data.packing joined, or a model whose call takes both,"
            " as that of DecoderConfig"
        ) from error
