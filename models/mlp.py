"""A residual feed-forward classifier in nnx: `MlpConfig` builds the model `Mlp`.

Its blocks are an `nnx.List`, each with its own parameters; the decoder stacks its blocks instead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import BATCH, EMBED, MLP, VOCAB
from shardtrain.errors.options import CheckedOptions
from shardtrain.models import checks
from shardtrain.models.layers import Linear, Norm


@dataclass(frozen=True, kw_only=True)
class MlpConfig(CheckedOptions):
    """Sizes of a classifier; called with `nnx.Rngs` it builds the model.

    Args:
      features: number of values of an example (28 * 28 for MNIST), the dim embed.
      mlp: number of hidden features of a block.
      num_layers: number of blocks.
      classes: number of classes, the dim vocab.
      dropout: dropout rate of the hidden features of each block. It needs a random stream "dropout".
      dtype: compute dtype; parameters, norms and logits are float32.

    Raises:
      ValueError: listing every option that is out of range.

    >>> from flax import nnx
    >>> classifier = MlpConfig(features=16, mlp=32, num_layers=2, classes=10)(nnx.Rngs(0))
    >>> classifier(jnp.zeros((3, 4, 4))).shape
    (3, 10)
    """

    features: int
    mlp: int
    num_layers: int
    classes: int
    dropout: float = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def list_problems(self) -> list[str]:
        """List the options that are out of range."""
        return checks.numbers(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name."""
        return {EMBED: self.features, MLP: self.mlp, VOCAB: self.classes}

    def __call__(self, rngs: nnx.Rngs) -> "Mlp":
        """Build the model; `rngs` needs the stream "params", and "dropout" where the rate is above 0."""
        return Mlp(self, rngs=rngs)


class MlpBlock(nnx.Module):
    """A block: norm, linear map, relu, dropout and linear map, added to the input."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs):
        self.norm = Norm("layernorm", config.features, eps=1e-5, bias=True, dtype=config.dtype)
        self.up = _make_linear(config, (EMBED,), (MLP,), rngs)
        self.down = _make_linear(config, (MLP,), (EMBED,), rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        h_BF = with_logical_constraint(self.up(self.norm(x_BD)), (BATCH, MLP))
        h_BF = self.dropout(jax.nn.relu(h_BF))
        return with_logical_constraint(x_BD + self.down(h_BF), (BATCH, EMBED))


class Mlp(nnx.Module):
    """Map flattened examples to logits; `nnx.view(mlp, deterministic=True)` is the same without dropout."""

    def __init__(self, config: MlpConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.blocks = nnx.List([MlpBlock(config, rngs=rngs) for _ in range(config.num_layers)])
        self.head = _make_linear(config, (EMBED,), (VOCAB,), rngs)

    def __call__(self, examples: jax.Array) -> jax.Array:
        """Score each example against the classes.

        Args:
          examples: float (batch, ...); the dims after the first hold `features` numbers.

        Returns:
          Logits (batch, classes), float32.

        Raises:
          ValueError: if an example does not hold `features` numbers.
        """
        return self.last(self.run(self.blocks, self.first(examples), None))

    def first(self, examples: jax.Array) -> jax.Array:
        """Flatten examples, as input of the first block."""
        num_features = math.prod(examples.shape[1:])
        if num_features != self.config.features:
            raise ValueError(
                f"examples of shape {examples.shape[1:]} hold {num_features} numbers, the model takes "
                f"features={self.config.features}. Build it with features={num_features}."
            )
        x_BD = examples.reshape(len(examples), num_features).astype(self.config.dtype)
        return with_logical_constraint(x_BD, (BATCH, EMBED))

    def run(self, blocks: Sequence[MlpBlock], x_BD: jax.Array, keys: None) -> jax.Array:
        """Apply blocks to the activations: all blocks, or those of a pipeline stage."""
        for block in blocks:
            x_BD = block(x_BD)
        return x_BD

    def last(self, x_BD: jax.Array) -> jax.Array:
        """Return the logits."""
        return with_logical_constraint(self.head(x_BD).astype(jnp.float32), (BATCH, VOCAB))


def _make_linear(config: MlpConfig, into: tuple[str, ...], out: tuple[str, ...], rngs: nnx.Rngs) -> Linear:
    std = config.sizes[into[0]] ** -0.5
    return Linear(into, out, sizes=config.sizes, std=std, bias=True, dtype=config.dtype, rngs=rngs)
