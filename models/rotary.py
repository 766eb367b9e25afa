"""Rotary positions: compute wavelengths, scale them for longer sequences, and rotate queries and keys.

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
"""Kind of scaling -> its numbers and their defaults; None means that a number must be given."""

LISTS = ("short", "long")
"""Numbers with a value for each pair of features, written as 1.0+1.5+2.0."""


class Scaling(NamedTuple):
    """Scaling of rotary wavelengths.

    Attributes:
      kind: a key of `SCALINGS`; "linear" divides all frequencies by `factor`, "llama3" and "yarn" only lower
        frequencies, "longrope" each frequency by its own number.
      factor: ratio of new to original sequence length, at least 1.
      original_seq: positions of a sequence in the original training.
      low: for llama3, wavelengths above original_seq / low are scaled by the whole factor.
      high: for llama3, wavelengths below original_seq / high are not scaled.
      fast: for yarn, frequencies with more turns than this in original_seq positions are not scaled.
      slow: for yarn, frequencies with fewer turns than this are scaled by the whole factor.
      magnitude: for yarn and longrope, factor of queries and keys; 0 means 0.1 ln(factor) + 1, for longrope
        the root of 1 + ln(factor) / ln(original_seq).
      short: for longrope, divisors of the frequencies in sequences of at most original_seq positions.
      long: for longrope, divisors of the frequencies in longer sequences.
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
    """Read the text of the option `rope_scaling`; return None if it is empty.

    Raises:
      ValueError: lists every unknown key and wrong value.

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
        allowed = ", ".join(map(_describe_kind, SCALINGS))
        raise ValueError(f"rope_scaling is {text!r}; allowed are {allowed}, or an empty text")
    known = SCALINGS[kind]
    given, found = checks.read_pairs(rest, known, [name for name in known if known[name] is None])
    numbers = {
        name: tuple(map(_read_number, value.split("+"))) for name, value in given.items() if name in known
    }
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
        raise ValueError(
            f"rope_scaling is {text!r}: {'; '.join(found)}; write {_describe_kind(kind)}{optional}"
        )
    return scaling


def _describe_kind(kind: str) -> str:
    needed = [
        f"{name}={'NUMBER+NUMBER+...' if name in LISTS else 'NUMBER'}"
        for name, default in SCALINGS[kind].items()
        if default is None
    ]
    return f"{kind}:{','.join(needed)}"


def _read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def find_scaling_problems(scaling: Scaling, num_features: int) -> list[str]:
    """List numbers of a "longrope" scaling that do not fit the rotated features, one for each pair.

    >>> find_scaling_problems(Scaling("longrope", 2.0, 4096, short=(1.0, 1.5), long=(3.0,)), 4)
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


def compute_frequencies(
    theta: float, num_features: int, scaling: Scaling | None = None, num_positions: int = 0
) -> tuple[jax.Array, float]:
    """Return the angle between neighbouring positions of each pair of features, and a factor of the features.

    Args:
      theta: base of the geometric series of wavelengths.
      num_features: number of rotated features, even.
      scaling: scaling of the wavelengths.
      num_positions: length of a sequence, for which "longrope" takes short or long factors.

    Returns:
      float32 (num_features / 2,) in radians, and the factor.

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
        # number of wavelengths in a sequence of the original training: few are scaled, many are kept
        turns_K = scaling.original_seq * frequency_K / (2 * math.pi)
        kept_K = jnp.clip((turns_K - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return _blend(frequency_K, scaling.factor, kept_K), 1.0
    if scaling.kind == "longrope":
        factors = scaling.long if num_positions > scaling.original_seq else scaling.short
        stretch = math.log(scaling.factor) / math.log(scaling.original_seq)
        return frequency_K / jnp.array(factors, jnp.float32), scaling.magnitude or math.sqrt(1 + stretch)
    # yarn: a ramp over the pairs, between the pairs with `fast` and with `slow` turns
    first, last = (_find_pair(turns, theta, num_features, scaling) for turns in (scaling.fast, scaling.slow))
    first, last = max(math.floor(first), 0), min(math.ceil(last), num_features - 1)
    width = last - first or 0.001
    kept_K = 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / width, 0, 1)
    return (
        _blend(frequency_K, scaling.factor, kept_K),
        scaling.magnitude or 0.1 * math.log(scaling.factor) + 1.0,
    )


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
    of_all = compute_frequencies(config.theta, num_features, read_scaling(config.rope_scaling), num_positions)
    if config.window_theta is None:
        return of_all
    of_window = compute_frequencies(config.window_theta, num_features)
    if sees_all is None:
        return of_window
    return jax.tree.map(lambda x, y: jnp.where(sees_all, x, y), of_all, of_window)


def _blend(frequency_K: jax.Array, factor: float, kept_K: jax.Array) -> jax.Array:
    """Divide by the factor the part of each frequency that is not kept."""
    return frequency_K * kept_K + frequency_K / factor * (1 - kept_K)


def _find_pair(turns: float, theta: float, num_features: int, scaling: Scaling) -> float:
    """Return the pair of features, as a real number, with this many turns in an original sequence."""
    wavelength = scaling.original_seq / (turns * 2 * math.pi)
    return num_features * math.log(wavelength) / (2 * math.log(theta))


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
