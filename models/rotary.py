"""Rotary positions: wavelengths, stretched for longer sequences than a model was trained on, and rotation.

References:
  Su et al., RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2, with the pairing that Llama uses.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.axes import HEAD_DIM
from shardtrain.models import checks

Numbers = tuple[float, ...]

SCALINGS: dict[str, dict[str, float | Numbers | None]] = {
    "linear": {"factor": None},
    "llama3": {"factor": None, "original_seq": None, "low": 1.0, "high": 4.0},
    "yarn": {"factor": None, "original_seq": None, "fast": 32.0, "slow": 1.0, "magnitude": 0.0},
    "longrope": {"factor": None, "original_seq": None, "short": None, "long": None, "magnitude": 0.0},
}
"""Way of stretching wavelengths -> its numbers and their defaults; None: it must be given."""

LISTS = ("short", "long")
"""Those of which there is one for each pair of features, written as 1.0+1.5+2.0."""


class Scaling(NamedTuple):
    """How wavelengths are stretched.

    Attributes:
      kind: of `SCALINGS`; "linear" divides all frequencies by `factor`, "llama3" and "yarn" only the lower
        ones, "longrope" each by a number of its own.
      factor: how much longer the sequences are, at least 1.
      original_seq: positions of a sequence in the first training.
      low: llama3: wavelengths above original_seq / low are stretched by the whole factor.
      high: llama3: those below original_seq / high are left.
      fast: yarn: frequencies with more turns than this in original_seq positions are left.
      slow: yarn: those with fewer are stretched by the whole factor.
      magnitude: yarn and longrope: queries and keys are multiplied by it; 0: 0.1 ln(factor) + 1, for longrope
        the root of 1 + ln(factor) / ln(original_seq).
      short: longrope: the frequency of each pair of features is divided by its number in sequences of at most
        original_seq positions.
      long: longrope: the same in longer ones.
    """

    kind: str
    factor: float
    original_seq: float = 0.0
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float = 0.0
    short: Numbers = ()
    long: Numbers = ()


def read_scaling(text: str) -> Scaling | None:
    """Read the text of the option `rope_scaling`; None if it is empty.

    Raises:
      ValueError: listing what is wrong.

    >>> read_scaling("llama3:factor=8,original_seq=8192")[:5]
    ('llama3', 8.0, 8192.0, 1.0, 4.0)
    >>> read_scaling("yarn:factor=0,low=2")
    Traceback (most recent call last):
    ValueError: rope_scaling is 'yarn:factor=0,low=2': original_seq is missing; no key 'low'; factor is \
'0', and it is at least 1; write yarn:factor=NUMBER,original_seq=NUMBER, and if wanted fast, slow, magnitude
    """
    if not text:
        return None
    kind, _, rest = text.partition(":")
    if kind not in SCALINGS:
        allowed = ", ".join(map(_pattern, SCALINGS))
        raise ValueError(f"rope_scaling is {text!r}; allowed are {allowed}, or an empty text")
    known = SCALINGS[kind]
    given, found = checks.read_pairs(rest, known, [name for name in known if known[name] is None])
    numbers = {name: tuple(map(_number, value.split("+"))) for name, value in given.items() if name in known}
    for name, values in numbers.items():
        if name == "factor" and not (len(values) == 1 and 1 <= values[0] < math.inf):
            found.append(f"factor is {given[name]!r}, and it is at least 1")
        elif (name not in LISTS and len(values) > 1) or not all(0 < number < math.inf for number in values):
            found.append(f"{name} is {given[name]!r}, and it is above 0")
    single: dict[str, Any] = {name: x if name in LISTS else x[0] for name, x in numbers.items()}
    scaling = Scaling(kind, **{"factor": 1.0, **single})
    if not found and (scaling.low >= scaling.high or scaling.slow >= scaling.fast):
        found.append("low is below high, and slow below fast")
    if found:
        more = [name for name, default in known.items() if default is not None]
        optional = f", and if wanted {', '.join(more)}" if more else ""
        raise ValueError(f"rope_scaling is {text!r}: {'; '.join(found)}; write {_pattern(kind)}{optional}")
    return scaling


def _pattern(kind: str) -> str:
    needed = [
        f"{name}={'NUMBER+NUMBER+...' if name in LISTS else 'NUMBER'}"
        for name, default in SCALINGS[kind].items()
        if default is None
    ]
    return f"{kind}:{','.join(needed)}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def scaling_fits(scaling: Scaling, num_features: int) -> list[str]:
    """List what of a "longrope" scaling does not fit the rotated features: one number for each pair.

    >>> scaling_fits(Scaling("longrope", 2.0, 4096, short=(1.0, 1.5), long=(3.0,)), 4)
    ['long of rope_scaling has 1 numbers; 4 rotated features are 2 pairs. Give 2 numbers.']
    """
    if scaling.kind != "longrope":
        return []
    half, original = num_features // 2, scaling.original_seq
    few = [f"original_seq of rope_scaling is {original:g}; it is above 1 for longrope. Use 4096."]
    return few * (original <= 1) + [
        f"{name} of rope_scaling has {len(values)} numbers; {num_features} rotated features are {half} pairs."
        f" Give {half} numbers."
        for name in LISTS
        if len(values := getattr(scaling, name)) != half
    ]


def frequencies(
    theta: float, num_features: int, scaling: Scaling | None = None, num_positions: int = 0
) -> tuple[jax.Array, float]:
    """Return the angle of each pair of features from a position to the next, and a factor of what is rotated.

    Args:
      theta: base of the geometric series of wavelengths.
      num_features: how many features are rotated, even.
      scaling: how the series is stretched.
      num_positions: of a sequence, by which "longrope" has short or long factors.

    Returns:
      float32 (num_features / 2,) in radians, and a number.

    References:
      Llama 3.1, https://arxiv.org/abs/2407.21783, and its published code for the numbers of "llama3".
      Peng et al., YaRN, https://arxiv.org/abs/2309.00071, sections 3.2 to 3.4.
      Ding et al., LongRoPE, https://arxiv.org/abs/2402.13753, section 3, and Phi-3's numbers.
    """
    half = num_features // 2
    frequency_K = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency_K, 1.0
    if scaling.kind == "linear":
        return frequency_K / scaling.factor, 1.0
    if scaling.kind == "llama3":
        # how many wavelengths fit into the first training's sequences: few are stretched, many are left
        turns_K = scaling.original_seq * frequency_K / (2 * math.pi)
        kept_K = jnp.clip((turns_K - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return _blend(frequency_K, scaling.factor, kept_K), 1.0
    if scaling.kind == "longrope":
        factors = scaling.long if num_positions > scaling.original_seq else scaling.short
        stretch = math.log(scaling.factor) / math.log(scaling.original_seq)
        return frequency_K / jnp.array(factors, jnp.float32), scaling.magnitude or math.sqrt(1 + stretch)
    # yarn: a ramp over the pairs, between those with as many turns as `fast` and as `slow`
    first, last = (_find_pair(turns, theta, num_features, scaling) for turns in (scaling.fast, scaling.slow))
    first, last = max(math.floor(first), 0), min(math.ceil(last), num_features - 1)
    width = last - first or 0.001
    kept_K = 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / width, 0, 1)
    return (
        _blend(frequency_K, scaling.factor, kept_K),
        scaling.magnitude or 0.1 * math.log(scaling.factor) + 1.0,
    )


def block_frequencies(config: Any, sees_all: jax.Array | None, num_positions: int) -> tuple[jax.Array, Any]:
    """Return the frequencies and the factor of a block's rotary positions, as `frequencies` does.

    Args:
      config: for the options of positions and windows.
      sees_all: with `full_every`, whether the block has no window.
      num_positions: of a row of the batch, or of the cache that it has.
    """
    num_features = config.rotary_dims or config.sizes[HEAD_DIM]
    of_all = frequencies(config.theta, num_features, read_scaling(config.rope_scaling), num_positions)
    if config.window_theta is None:
        return of_all
    of_window = frequencies(config.window_theta, num_features)
    if sees_all is None:
        return of_window
    return jax.tree.map(lambda x, y: jnp.where(sees_all, x, y), of_all, of_window)


def _blend(frequency_K: jax.Array, factor: float, kept_K: jax.Array) -> jax.Array:
    """Divide the part of each frequency that is not kept by the factor."""
    return frequency_K * kept_K + frequency_K / factor * (1 - kept_K)


def _find_pair(turns: float, theta: float, num_features: int, scaling: Scaling) -> float:
    """Return the pair of features, as a real number, that turns so often in the first sequences."""
    wavelength = scaling.original_seq / (turns * 2 * math.pi)
    return num_features * math.log(wavelength) / (2 * math.log(theta))


def rotate(
    x_BTHK: jax.Array, frequency_K: jax.Array, positions_BT: jax.Array | None = None, factor: Any = 1.0
) -> jax.Array:
    """Rotate feature pairs by their frequency times the position: scores then depend on distances alone.

    Args:
      x_BTHK: queries or keys.
      frequency_K: angles from a position to the next, for pairs (k, k + n) of the first 2 n features; the
        features behind them stay.
      positions_BT: the position of each, integers; None: 0 to T-1.
      factor: the rotated features are multiplied by it.

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
