"""A GPT-2 decoder in linen, with the parameter tree, dims and results of `decoder.Decoder`.

It is a model in linen's own style, for users of linen; only the nnx model has the other options of
`DecoderConfig`.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.spmd import with_logical_constraint
from jax.ad_checkpoint import checkpoint_name

from shardtrain.axes import BATCH, EMBED, HEAD_DIM, HEADS, KV_HEADS, LAYERS, MLP, SEQ, VOCAB
from shardtrain.errors.messages import refuse
from shardtrain.functional.remat_counts import RematCounts
from shardtrain.functional.remat_policies import BLOCK_OUTPUT, REMAT_POLICIES, name_block_input
from shardtrain.models.attention import attend
from shardtrain.models.chunked_logits import ChunkedLogits
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.float8 import Products
from shardtrain.models.ops import PLAIN, Ops
from shardtrain.models.residual_stream import (
    STREAM,
    gather_sequence,
    project_to_stream,
    read_by_products,
    read_from_stream,
)
from shardtrain.models.transformer import TABLE, describe_too_long
from shardtrain.models.transformer_options import BIASES, has_bias

FREE = (
    "vocab", "seq", "embed", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp", "theta", "eps",
    "dropout", "remat", "scan", "dtype", "attention", "loss_chunk",
)  # fmt: skip
"""The options that may have any value; all others must have their defaults, and heads must be equal."""


class LinenDecoder(nn.Module):
    """Map token ids to logits; `config` is a `DecoderConfig` that differs from the defaults only in `FREE`.

    A run sets `ops`, the operations of the model.

    >>> decoder = LinenDecoder(DecoderConfig(vocab=16, seq=8, embed=4, num_layers=2, num_heads=2))
    >>> tokens = jnp.zeros((1, 8), jnp.int32)
    >>> decoder.apply(decoder.init(jax.random.key(0), tokens), tokens).shape
    (1, 8, 16)
    """

    config: DecoderConfig
    ops: Ops = PLAIN

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, train: bool = False) -> Any:
        """Predict the next token at every position.

        Args:
          tokens_BT: int token ids below `vocab`; T is at most `seq`.
          train: whether to apply dropout, by the random stream "dropout".

        Returns:
          Logits (batch, seq, vocab), float32; with `loss_chunk` as `ChunkedLogits`.

        Raises:
          ValueError: an option has a value that this model does not support, or T is above `seq`.
        """
        config = self.config
        refuse("LinenDecoder", _find_problems(config))
        if tokens_BT.shape[1] > config.seq:
            raise ValueError(describe_too_long(tokens_BT.shape[1], config.seq))
        table_VD = _make_weight(self, "embedding", (VOCAB, EMBED), config)
        positions_TD = _make_weight(self, "positions", (SEQ, EMBED), config)
        x_BTD = jnp.take(table_VD, tokens_BT, axis=0) + positions_TD[: tokens_BT.shape[1]]
        x_BTD = nn.Dropout(config.dropout, deterministic=not train)(with_logical_constraint(x_BTD, STREAM))
        block = LinenBlock
        if config.remat != "none":
            block = nn.remat(block, policy=REMAT_POLICIES[str(config.remat)], prevent_cse=not config.scan)
        stacked = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=config.num_layers,
            unroll=1 if config.scan else config.num_layers,
            metadata_params={nn.PARTITION_NAME: LAYERS},
        )
        x_BTD = with_logical_constraint(x_BTD, STREAM)
        x_BTD, _ = stacked(config, train, self.ops, name="blocks")(x_BTD, None)
        x_BTD = gather_sequence(_make_norm("final_norm", config)(x_BTD))
        if config.loss_chunk is not None:
            return ChunkedLogits(
                hidden_BTD=x_BTD, kernel=table_VD, bias_V=None, kernel_dims=TABLE, chunk=config.loss_chunk
            )
        logits_BTV = jnp.einsum("BTD,VD->BTV", x_BTD, table_VD).astype(jnp.float32)
        return with_logical_constraint(logits_BTV, (BATCH, SEQ, VOCAB))


class LinenBlock(nn.Module):
    """A pre-norm residual block, the body of `nn.scan`."""

    config: DecoderConfig
    train: bool
    ops: Ops

    @nn.compact
    def __call__(self, x_BTD: jax.Array, _: None) -> tuple[jax.Array, None]:
        x_BTD = name_block_input(x_BTD, str(self.config.remat))
        parts = ("attention_norm", LinenAttention, "attention"), ("mlp_norm", LinenFeedForward, "mlp")
        for norm_name, layer, name in parts:
            h_BTD = read_by_products(self.ops, _make_norm(norm_name, self.config)(x_BTD))
            h_BTD = checkpoint_name(layer(self.config, self.ops, name=name)(h_BTD), BLOCK_OUTPUT)
            h_BTD = nn.Dropout(self.config.dropout, deterministic=not self.train)(h_BTD)
            x_BTD = with_logical_constraint(x_BTD + h_BTD, STREAM)
        return x_BTD, None


class LinenAttention(nn.Module):
    """Causal self-attention."""

    config: DecoderConfig
    ops: Ops

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        linears = [
            LinenLinear(self.config, (EMBED,), (heads, HEAD_DIM), name=name)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        ]
        # one product, whose gradient is then reduced over devices once
        kernel = jnp.stack([linear.cast() for linear in linears], 2)
        y = read_from_stream(self.ops, x_BTD, kernel, (EMBED, KV_HEADS, None, HEAD_DIM))
        y = with_logical_constraint(y, (BATCH, SEQ, KV_HEADS, None, HEAD_DIM))
        q_BTHK, k_BSHK, v_BSHK = (
            with_logical_constraint(linear.add_bias(y[:, :, :, i]), (BATCH, SEQ, linear.out[0], HEAD_DIM))
            for i, linear in enumerate(linears)
        )
        y_BTHK = attend(self.ops, q_BTHK, k_BSHK, v_BSHK, self.config.attention)
        y_BTHK = with_logical_constraint(y_BTHK, (BATCH, SEQ, HEADS, HEAD_DIM))
        linear = LinenLinear(self.config, (HEADS, HEAD_DIM), (EMBED,), name="o")
        return project_to_stream(self.ops, linear, y_BTHK)


class LinenFeedForward(nn.Module):
    """Two projections around a gelu."""

    config: DecoderConfig
    ops: Ops

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        up = LinenLinear(self.config, (EMBED,), (MLP,), name="up")
        h_BTF = up.add_bias(read_from_stream(self.ops, x_BTD, up.cast(), (EMBED, MLP)))
        h_BTF = jax.nn.gelu(with_logical_constraint(h_BTF, (BATCH, SEQ, MLP)), approximate=True)
        linear = LinenLinear(self.config, (MLP,), (EMBED,), name="down")
        return project_to_stream(self.ops, linear, h_BTF)


class LinenLinear(nn.Module):
    """A linear map from the dims `into`, the last of its input, to `out`, with a bias."""

    config: DecoderConfig
    into: tuple[str, ...]
    out: tuple[str, ...]
    products: Products = ""

    def setup(self) -> None:
        std = 0.02 / math.sqrt(2 * self.config.num_layers) if self.out == (EMBED,) else 0.02
        sizes = self.config.sizes
        self.kernel = self.param(
            "kernel", *_partition(nn.initializers.normal(std), (*self.into, *self.out), sizes)
        )
        self.bias = self.param("bias", *_partition(nn.initializers.zeros, self.out, sizes))

    def product(self, x: jax.Array) -> jax.Array:
        """Apply the map without its bias."""
        kernel = with_logical_constraint(self.cast(), (*self.into, *self.out))
        return jnp.tensordot(x, kernel, axes=len(self.into))

    def add_adapter(self, y: jax.Array, x: jax.Array) -> jax.Array:
        """Return y, as this map has no adapter."""
        return y

    def cast(self) -> jax.Array:
        """Cast the kernel to the compute dtype, sharded as stored, for concatenation and gathering."""
        return self.kernel.astype(self.config.dtype)

    def add_bias(self, y: jax.Array) -> jax.Array:
        """Add the bias to a product with the kernel."""
        return y + with_logical_constraint(self.bias.astype(self.config.dtype), self.out)


def _make_norm(name: str, config: DecoderConfig) -> nn.LayerNorm:
    """Make linen's layer norm, in float32, with the results of `layers.Norm`."""
    return nn.LayerNorm(
        epsilon=config.eps,
        dtype=jnp.dtype(config.dtype),
        use_fast_variance=False,
        scale_init=nn.with_partitioning(nn.initializers.ones, (EMBED,)),
        bias_init=nn.with_partitioning(nn.initializers.zeros, (EMBED,)),
        name=name,
    )


def _make_weight(module: Any, name: str, dims: tuple[str, ...], config: DecoderConfig) -> jax.Array:
    """Make a float32 parameter, cast to the compute dtype and constrained to its dims."""
    value = module.param(name, *_partition(nn.initializers.normal(0.02), dims, config.sizes))
    return with_logical_constraint(value.astype(config.dtype), dims)


def _partition(init: Any, dims: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[Any, ...]:
    """Return the arguments of `param` after the name: an initialiser with dim names, shape, dtype."""
    return nn.with_partitioning(init, dims), [sizes[dim] for dim in dims], jnp.float32


def _find_problems(config: DecoderConfig) -> list[str]:
    """List options with values that this model does not support."""
    heads, kv_heads = config.sizes[HEADS], config.sizes[KV_HEADS]
    only = {f.name: f.default for f in fields(config) if f.name not in FREE and f.name not in BIASES}
    only |= {"num_kv_heads": heads, **dict.fromkeys(BIASES, True)}
    given = {**vars(config), "num_kv_heads": kv_heads, **{name: has_bias(config, name) for name in BIASES}}
    found = [f"remat is '{config.remat}'; the linen model has one policy for all blocks, such as full"]
    return found * isinstance(config.remat, RematCounts) + [
        f"{name} is {given[name]!r}; the linen model has {value!r} only. Use {name}={value!r}, or Decoder."
        for name, value in only.items()
        if given[name] != value
    ]
