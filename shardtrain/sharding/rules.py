"""The default rules: which mesh axes shard each dim of parameters and of activations. No jax.

A layout overrides them dim by dim. Next: `layout.py`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from shardtrain import axes

Rules = Mapping[str, tuple[str, ...]]


PARAMETER_RULES: Rules = {
    axes.SEQ: (),
    axes.EMBED: (axes.FSDP,),
    axes.HEADS: (axes.TENSOR,),
    axes.KV_HEADS: (axes.TENSOR,),
    axes.HEAD_DIM: (),
    axes.MLP: (axes.TENSOR,),
    axes.VOCAB: (axes.TENSOR,),
    axes.LAYERS: (axes.PIPELINE,),
    axes.EXPERTS: (axes.EXPERT,),
    axes.SEGMENTS: (),
    axes.HEIGHT: (),
    axes.WIDTH: (),
    axes.CHANNELS_IN: (axes.FSDP,),
    axes.CHANNELS_OUT: (axes.TENSOR,),
}
"""Dim -> axes for parameters, gradients and optimizer state: Megatron's tensor parallelism, ZeRO over
fsdp."""


ACTIVATION_RULES: Rules = {
    axes.BATCH: (axes.DATA, axes.FSDP),
    axes.SEQ: (axes.CONTEXT,),
    axes.RESIDUAL_SEQ: (axes.CONTEXT,),
    axes.EMBED: (),
    axes.HEADS: (axes.TENSOR,),
    axes.KV_HEADS: (axes.TENSOR,),
    axes.HEAD_DIM: (),
    axes.MLP: (axes.TENSOR,),
    axes.VOCAB: (axes.TENSOR,),
    axes.LAYERS: (),
    axes.EXPERTS: (axes.EXPERT,),
    axes.SEGMENTS: (),
    axes.HEIGHT: (),
    axes.WIDTH: (),
    axes.CHANNELS_IN: (),
    axes.CHANNELS_OUT: (axes.TENSOR,),
}
"""Dim -> axes for activations, and for weights while they are used: `embed` is replicated, so fsdp is
gathered."""


def find_repeated(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return the names that occur more than once, with their counts."""
    return [(name, n) for name, n in Counter(names).items() if n > 1]
