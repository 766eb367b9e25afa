"""The block of a transformer: attention and feed-forward, with norms, added to the residual stream."""

from functools import partial
from typing import Any, NamedTuple

import jax
from flax import nnx

from shardtrain.models.experts import MixtureOfExperts
from shardtrain.models.key_value_cache import LayerCache
from shardtrain.models.ops import WithOps
from shardtrain.models.residual_stream import add_part, read_by_products, split_key
from shardtrain.models.transformer import Attention, FeedForward, make_norm
from shardtrain.models.transformer_options import BlockOptions

Stream = jax.Array | dict[str, Any]
"""The residual stream; or a dict of it as "x", with "segments" of rows with several documents, or the counts
of "routers" of a mixture of experts."""


class BlockInputs(NamedTuple):
    """Further inputs of a block, if blocks differ.

    Attributes:
      key: key of its dropout; None without dropout.
      sees_all: a bool, whether it has no window.
    """

    key: jax.Array | None
    sees_all: jax.Array


class Block(WithOps):
    """A residual block. It has only parameters: the key of its dropout is an argument."""

    def __init__(self, config: BlockOptions, *, rngs: nnx.Rngs, causal: bool = True):
        self.parallel = config.parallel
        self.attention_norm = None if config.only_post_norm else make_norm(config)
        self.attention = Attention(config, causal=causal, rngs=rngs)
        self.mlp_norm = None if config.only_post_norm else make_norm(config)
        kind: Any = MixtureOfExperts if config.experts else FeedForward
        self.mlp = kind(config, rngs=rngs)
        self.attention_post_norm = make_norm(config) if config.post_norm else None
        self.mlp_post_norm = make_norm(config) if config.post_norm else None
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(
        self,
        x_BTD: jax.Array,
        key: jax.Array | BlockInputs | None,
        segments_BT: jax.Array | None = None,
        cache: LayerCache | None = None,
        **seen: Any,
    ) -> Any:
        """Return the residual stream; with experts also the counts of their router, see `add_block`.

        Args:
          x_BTD: the residual stream.
          key: key of dropout, or `BlockInputs`.
          segments_BT, cache: see `Attention`.
          seen: the arguments `mask_BS` and `bias_BHTS` of `Attention`.
        """
        counts: dict[str, jax.Array] | None = None
        key, sees_all = key if isinstance(key, BlockInputs) else (key, None)
        # two halves, attention and feed-forward: norm, layer, perhaps another norm, dropout, sum
        seen |= {"segments_BT": segments_BT, "sees_all": sees_all, "cache": cache}
        attention = partial(self.attention, **seen)
        # the experts of a generated token do not depend on the number of tokens read at once
        is_mixture = isinstance(self.mlp, MixtureOfExperts)
        mlp = partial(self.mlp, dropless=cache is not None) if is_mixture else self.mlp
        halves = (
            (self.attention_norm, attention, self.attention_post_norm),
            (self.mlp_norm, mlp, self.mlp_post_norm),
        )
        entering_BTD = x_BTD
        for (norm, layer, post_norm), dropout_key in zip(halves, split_key(key, 2), strict=True):
            read_BTD = entering_BTD if self.parallel else x_BTD
            h_BTD = layer(read_by_products(self.ops, read_BTD if norm is None else norm(read_BTD)))
            if is_mixture and layer is mlp:
                h_BTD, counts = h_BTD
            x_BTD = add_part(self.ops, x_BTD, h_BTD, self.dropout, dropout_key, post_norm)
        return x_BTD if counts is None else (x_BTD, counts)
