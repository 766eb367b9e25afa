"""Floating-point operations of a decoder, by formula."""

from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, LAYERS, MLP, SEQ, VOCAB
from shardtrain.models.experts_options import read_experts
from shardtrain.models.transformer_options import GATED


def flops_per_token(config: Any) -> int:
    """Floating-point operations that training spends on one token, forward and backward: 6 N + 12 L H K T.

    N counts the weights of matrix products: the blocks' kernels and the head (tied or not), not the lookup
    table, nor norms and biases; of a mixture of experts the router and those that a token passes. L H K T are
    num_layers, num_heads, head_dim and seq; scores are counted in full, as is usual, though half of them are
    masked. In blocks with a window, T is that where it is shorter: as if every token saw so many.
    Recomputation by remat is not counted, so this is what MFU divides by.

    Returns:
      Flops per token, with every sequence of length `seq`.

    References:
      Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311, appendix B.

    >>> from shardtrain.models.decoder import gpt2
    >>> flops_per_token(gpt2())
    854438400
    """
    size = config.sizes
    # query and output projections have all heads, keys and values those that they have
    heads_and_kv = 2 * size[HEADS] + 2 * size[KV_HEADS]
    num_projections = 3 if config.activation in GATED else 2
    # the weights of matrix products in a block, and in all, with the head
    feed_forward = num_projections * size[MLP]
    if experts := read_experts(getattr(config, "experts", "")):
        # the experts that a token passes, and the router
        feed_forward = feed_forward * (experts.top + experts.shared) + experts.num
    per_block = size[EMBED] * (heads_and_kv * size[HEAD_DIM] + feed_forward)
    num_weights = size[LAYERS] * per_block + size[EMBED] * size[VOCAB]
    # keys of each query, summed over the blocks: as many as the window, or all
    num_full = size[LAYERS] // config.full_every if config.full_every else 0
    num_full = size[LAYERS] if config.window is None else num_full
    keys = num_full * size[SEQ] + (size[LAYERS] - num_full) * min(size[SEQ], config.window or size[SEQ])
    return 6 * num_weights + 12 * size[HEADS] * size[HEAD_DIM] * keys
