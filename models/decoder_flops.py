"""Compute the floating-point operations of a decoder by a formula."""

from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, LAYERS, MLP, SEQ, VOCAB
from shardtrain.models.transformer_options import GATED


def flops_per_token(config: Any) -> int:
    """Return the floating-point operations of training per token, forward and backward: 6 N + 12 L H K T.

    N is the number of weights in matrix products: the blocks' kernels and the head (tied or not), without the
    lookup table, norms and biases; of a mixture of experts, the router and the experts that a token passes.
    L H K T are num_layers, num_heads, head_dim and seq. Masked scores are counted too, as usual. In blocks
    with a window T is the smaller of seq and window. Recomputation by remat is not counted, as usual for MFU.

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
    if experts := getattr(config, "experts", None):
        # the experts that a token passes, and the router
        feed_forward = feed_forward * (experts.top + experts.shared) + experts.num
    per_block = size[EMBED] * (heads_and_kv * size[HEAD_DIM] + feed_forward)
    num_weights = size[LAYERS] * per_block + size[EMBED] * size[VOCAB]
    # keys of each query, summed over the blocks: as many as the window, or all
    num_full = size[LAYERS] // config.full_every if config.full_every else 0
    num_full = size[LAYERS] if config.window is None else num_full
    keys = num_full * size[SEQ] + (size[LAYERS] - num_full) * min(size[SEQ], config.window or size[SEQ])
    return 6 * num_weights + 12 * size[HEADS] * size[HEAD_DIM] * keys
