"""Rotary positions: compute wavelengths, scale them for longer sequences, and rotate queries and keys.

References:
  Su et al., RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2, with the pairing that Llama uses.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.axes import HEAD_DIM
from shardtrain.errors.options import CompactOptions

Numbers = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RopeScaling(CompactOptions):
    """A scaling of rotary wavelengths, for longer sequences than in the original training.

    Args:
      factor: ratio of new to original sequence length, at least 1.

    >>> RopeScaling.parse("llama3:factor=8,original_seq=8192")
    Llama3Scaling(factor=8, original_seq=8192, low=1.0, high=4.0)
    """

    factor: float

    def list_problems(self) -> list[str]:
        """List the numbers that are out of range."""
        if not self.kind:
            return ["it is of no kind; use LinearScaling, Llama3Scaling, YarnScaling or LongropeScaling"]
        found = [f"factor is {self.factor}; it is at least 1"] if self.factor < 1 else []
        for name, given in vars(self).items():
            numbers = given if isinstance(given, tuple) else () if given is None else (given,)
            if min(numbers, default=1) <= 0:
                found.append(f"{name} is {given}; it is above 0")
        return found

    def list_misfits(self, theta: float, num_features: int) -> list[str]:
        """List the numbers that do not fit the base of the wavelengths, or the rotated features."""
        return []

    def scale(self, frequency_K: jax.Array, theta: float, num_positions: int) -> tuple[jax.Array, float]:
        """Scale the frequencies, and return them with the factor of queries and keys.

        Args:
          frequency_K: float32, radians between neighbouring positions, of each pair of features.
          theta: base of the wavelengths.
          num_positions: length of a sequence.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeScaling):
    """Divide all frequencies by `factor`."""

    kind = "linear"

    def scale(self, frequency_K: jax.Array, theta: float, num_positions: int) -> tuple[jax.Array, float]:
        return frequency_K / self.factor, 1.0


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Divide only lower frequencies.

    Args:
      original_seq: positions of a sequence in the original training.
      low: wavelengths above original_seq / low are scaled by the whole factor.
      high: wavelengths below original_seq / high are not scaled.

    References:
      Llama 3.1, https://arxiv.org/abs/2407.21783, and its published code for the numbers.
    """

    kind = "llama3"
    original_seq: int
    low: float = 1.0
    high: float = 4.0

    def list_problems(self) -> list[str]:
        found = [f"low is {self.low}; it is below high, {self.high}"] if self.low >= self.high else []
        return super().list_problems() + found

    def scale(self, frequency_K: jax.Array, theta: float, num_positions: int) -> tuple[jax.Array, float]:
        # number of wavelengths in a sequence of the original training: few are scaled, many are kept
        turns_K = self.original_seq * frequency_K / (2 * math.pi)
        return _blend(frequency_K, self.factor, (turns_K - self.low) / (self.high - self.low)), 1.0


@dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeScaling):
    """Divide only lower frequencies, by a ramp over the pairs of features.

    Args:
      original_seq: positions of a sequence in the original training.
      fast: frequencies with more turns than this in original_seq positions are not scaled.
      slow: frequencies with fewer turns than this are scaled by the whole factor.
      magnitude: factor of queries and keys. None means 0.1 ln(factor) + 1.

    References:
      Peng et al., YaRN, https://arxiv.org/abs/2309.00071, sections 3.2 to 3.4.
    """

    kind = "yarn"
    original_seq: int
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float | None = None

    def list_problems(self) -> list[str]:
        found = [f"slow is {self.slow}; it is below fast, {self.fast}"] if self.slow >= self.fast else []
        return super().list_problems() + found

    def list_misfits(self, theta: float, num_features: int) -> list[str]:
        return [f"theta is {theta}; yarn needs it above 1. Use theta=10000."] if theta <= 1 else []

    def scale(self, frequency_K: jax.Array, theta: float, num_positions: int) -> tuple[jax.Array, float]:
        half = len(frequency_K)
        first, last = (
            half * math.log(self.original_seq / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.fast, self.slow)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * half - 1)
        kept_K = 1 - (jnp.arange(half, dtype=jnp.float32) - first) / (last - first or 0.001)
        magnitude = self.magnitude or 0.1 * math.log(self.factor) + 1.0
        return _blend(frequency_K, self.factor, kept_K), magnitude


@dataclass(frozen=True, kw_only=True)
class LongropeScaling(RopeScaling):
    """Divide each frequency by its own number.

    Args:
      original_seq: positions of a sequence in the original training.
      short: divisors of the frequencies in sequences of at most original_seq positions, one for each pair of
        rotated features.
      long: divisors of the frequencies in longer sequences.
      magnitude: factor of queries and keys. None means the root of 1 + ln(factor) / ln(original_seq).

    References:
      Ding et al., LongRoPE, https://arxiv.org/abs/2402.13753, section 3, and Phi-3's numbers.
    """

    kind = "longrope"
    original_seq: int
    short: Numbers
    long: Numbers
    magnitude: float | None = None

    def list_problems(self) -> list[str]:
        found = [f"original_seq is {self.original_seq}; it is above 1. Use 4096."] * (self.original_seq == 1)
        return super().list_problems() + found

    def list_misfits(self, theta: float, num_features: int) -> list[str]:
        """List the lists of divisors of another length.

        >>> scaling = LongropeScaling(factor=2, original_seq=4096, short=(1.0, 1.5), long=(3.0,))
        >>> scaling.list_misfits(1e4, 4)
        ['long of rope_scaling has 1 numbers; 4 rotated features are 2 pairs. Give 2 numbers.']
        """
        half = num_features // 2
        return [
            f"{name} of rope_scaling has {len(values)} numbers; {num_features} rotated features are {half}"
            f" pairs. Give {half} numbers."
            for name, values in (("short", self.short), ("long", self.long))
            if len(values) != half
        ]

    def scale(self, frequency_K: jax.Array, theta: float, num_positions: int) -> tuple[jax.Array, float]:
        factors = self.long if num_positions > self.original_seq else self.short
        stretch = math.log(self.factor) / math.log(self.original_seq)
        return frequency_K / jnp.array(factors, jnp.float32), self.magnitude or math.sqrt(1 + stretch)


def compute_frequencies(
    theta: float, num_features: int, scaling: RopeScaling | None = None, num_positions: int = 0
) -> tuple[jax.Array, float]:
    """Return the angle between neighbouring positions of each pair of features, and a factor of the features.

    Args:
      theta: base of the geometric series of wavelengths.
      num_features: number of rotated features, even.
      scaling: scaling of the wavelengths.
      num_positions: length of a sequence, for which "longrope" takes short or long factors.

    Returns:
      float32 (num_features / 2,) in radians, and the factor.
    """
    half = num_features // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return (frequency_K, 1.0) if scaling is None else scaling.scale(frequency_K, theta, num_positions)


def compute_block_frequencies(
    config: Any, sees_all: jax.Array | None, num_positions: int
) -> tuple[jax.Array, Any]:
    """Return the frequencies and the factor of a block's rotary positions, as `compute_frequencies` does.

    Args:
      config: the configuration, for the options of positions and windows.
      sees_all: with `full_every`, whether the block has no window.
      num_positions: length of a row of the batch, or of its cache.
    """
    num_features = config.rotary_dims or config.sizes[HEAD_DIM]
    of_all = compute_frequencies(config.theta, num_features, config.rope_scaling, num_positions)
    if config.window_theta is None:
        return of_all
    of_window = compute_frequencies(config.window_theta, num_features)
    if sees_all is None:
        return of_window
    return jax.tree.map(lambda x, y: jnp.where(sees_all, x, y), of_all, of_window)


def _blend(frequency_K: jax.Array, factor: float, kept_K: jax.Array) -> jax.Array:
    """Divide by the factor the part of each frequency that is not kept, between 0 and 1."""
    kept_K = jnp.clip(kept_K, 0, 1)
    return frequency_K * kept_K + frequency_K / factor * (1 - kept_K)


def rotate(
    x_BTHK: jax.Array, frequency_K: jax.Array, positions_BT: jax.Array | None = None, factor: Any = 1.0
) -> jax.Array:
    """Rotate feature pairs by their frequency times the position, so that scores depend only on distances.

    Args:
      x_BTHK: queries or keys.
      frequency_K: angles between neighbouring positions, for pairs (k, k + n) of the first 2 n features;
        later features are not rotated.
      positions_BT: integer positions; None means 0 to T-1.
      factor: factor of the rotated features.

    Returns:
      The rotated array, same shape and dtype; the angles are float32.
    """
    position = jnp.arange(x_BTHK.shape[1]) if positions_BT is None else positions_BT
    angle = (position.astype(jnp.float32)[..., None] * frequency_K)[..., None, :]
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
    # a rotation of the plane (low, high), in float32
    half = frequency_K.shape[-1]
    low, high, rest = jnp.split(x_BTHK.astype(jnp.float32), [half, 2 * half], axis=-1)
    turned = [low * cos - high * sin, high * cos + low * sin]
    return jnp.concatenate([*turned, rest], axis=-1).astype(x_BTHK.dtype)
