"""The same training with a linen model: its inputs must be told, for linen makes parameters by a call.

shardtrain train examples/linen_text.py
"""

import jax
import jax.numpy as jnp

from shardtrain import Run, Text, from_linen
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder

SEQ = 64


def decoder() -> LinenDecoder:
    return LinenDecoder(DecoderConfig(vocab=256, seq=SEQ, embed=64, num_layers=2, num_heads=4))


def run() -> Run:
    tokens = jax.ShapeDtypeStruct((1, SEQ), jnp.int32)
    return Run(model=from_linen(decoder(), tokens), data=Text(seq=SEQ), batch=32, steps=200)
