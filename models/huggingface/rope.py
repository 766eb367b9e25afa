"""Convert entries of a config.json about positions and windows to our options, and back."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from shardtrain.axes import HEAD_DIM
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.entries import find_problem
from shardtrain.models.rotary import RopeScaling
from shardtrain.system.excerpts import short

ENTRIES = {
    "factor": "factor",
    "original_seq": "original_max_position_embeddings",
    "low": "low_freq_factor",
    "high": "high_freq_factor",
    "fast": "beta_fast",
    "slow": "beta_slow",
    "magnitude": "attention_factor",
    "short": "short_factor",
    "long": "long_factor",
}
"""Field of a `RopeScaling` -> its entry."""

KINDS = {kind.kind: kind for kind in RopeScaling.__subclasses__()}
"""Name of a scaling in files -> its class."""

WINDOWED, FULL = "sliding_attention", "full_attention"


def read_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entries about positions, from one of two objects, if there is one.

    For LongRoPE some entries may be next to the object, or follow from others.
    """
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    original = ENTRIES["original_seq"]
    seq, original_seq = (config.get(name) for name in ("max_position_embeddings", original))
    original_seq = original_seq or found.get(original)
    if _kind(found) != "longrope" or not (seq and original_seq):
        return found
    factor = found.get("factor") or max(1.0, seq / original_seq)
    return {**found, original: original_seq, "factor": factor}


def scaling_problems(rope: Mapping[str, Any]) -> list[str]:
    """List entries that are missing, or that our models do not support.

    >>> scaling_problems({"rope_type": "dynamic", "factor": 2.0})[0][:66]
    "rope_type is 'dynamic'; Decoder has 'default' or 'linear' or 'llam"
    """
    kind = _kind(rope)
    if kind not in ("default", *KINDS):
        allowed = " or ".join(map(repr, ("default", *KINDS)))
        return [f"rope_type is {short(kind)}; Decoder has {allowed} only"]
    needed = [f.name for f in fields(KINDS[kind]) if f.default is MISSING] if kind in KINDS else []
    found = [f"{ENTRIES[name]} is missing" for name in needed if rope.get(ENTRIES[name]) is None]
    if not rope.get("truncate", True):
        found.append("truncate is False; Decoder has True only")
    return found or find_problem(read_scaling, rope)


def _kind(rope: Mapping[str, Any]) -> Any:
    kind = rope.get("rope_type", rope.get("type", "default"))
    # the name in the first files of Phi-3
    return "longrope" if kind == "su" else kind


def read_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    """Return the option `rope_scaling`.

    >>> read_scaling({"type": "linear", "factor": 2.0})
    LinearScaling(factor=2.0)
    """
    kind = _kind(rope)
    if kind == "default":
        return None
    numbers = {f.name: rope.get(ENTRIES[f.name]) for f in fields(KINDS[kind])}
    scales = [rope[name] for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    if kind == "yarn" and numbers["magnitude"] is None and len(scales) == 2:
        # the ratio of two factors that these numbers give
        first, second = (0.1 * scale * math.log(rope["factor"]) + 1 for scale in scales)
        numbers["magnitude"] = first / second
    return KINDS[kind](**{name: number for name, number in numbers.items() if number is not None})


def rope_entries(config: DecoderConfig) -> dict[str, Any]:
    """Return the entries about positions, for transformers 5 and earlier versions."""
    scaling = config.rope_scaling
    stretched = {"rope_type": "default"} if scaling is None else _scaling_entries(scaling)
    rope = {"rope_theta": config.theta, **stretched}
    if config.rotary_dims is not None:
        rope["partial_rotary_factor"] = _part(config.rotary_dims, config.sizes[HEAD_DIM])
    return {"rope_theta": config.theta, "rope_scaling": scaling and stretched, "rope_parameters": rope}


def _part(rotated: int, head_dim: int) -> float:
    """Return the rotated fraction of a head, such that readers that truncate get `rotated` features.

    >>> int(44 * (30 / 44)), int(44 * _part(30, 44))
    (29, 30)
    """
    part = rotated / head_dim
    return part if int(head_dim * part) == rotated else math.nextafter(part, 2)


def _scaling_entries(scaling: RopeScaling) -> dict[str, Any]:
    numbers = {ENTRIES[name]: number for name, number in vars(scaling).items() if number is not None}
    numbers = {name: list(x) if isinstance(x, tuple) else x for name, x in numbers.items()}
    return {"rope_type": scaling.kind, **numbers}


class WindowPattern(NamedTuple):
    """The blocks that have a window.

    Attributes:
      any: whether any block has a window.
      full_every: every n-th block has no window; None means that all have it.
    """

    any: bool
    full_every: int | None


def window_options(config: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Return the options `window` and `full_every`; `window_problems` must have found none.

    Args:
      config: the dict of a config.json.
      every: by default every n-th block has no window.
    """
    windows = _windows(config, every)
    if config.get("sliding_window") is None or windows is None or not windows.any:
        return {"window": None, "full_every": None}
    return {"window": config["sliding_window"], "full_every": windows.full_every}


def window_problems(config: Mapping[str, Any], every: int) -> list[str]:
    """List arrangements of windows that our models do not support."""
    if "num_hidden_layers" not in config:
        return []
    num, kinds = config["num_hidden_layers"], config.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and len(kinds) == num and all(kind in (WINDOWED, FULL) for kind in kinds)
    ):
        return [f"layer_types is {short(kinds)}; it is a list of {num} times {WINDOWED!r} or {FULL!r}"]
    if _windows(config, every) is None:
        return [f"layer_types is {short(kinds)}; Decoder has {FULL!r} in every n-th block only"]
    return []


def _windows(config: Mapping[str, Any], every: int) -> WindowPattern | None:
    """Return the blocks that have a window; None if they follow no pattern of ours."""
    num, kinds = config["num_hidden_layers"], config.get("layer_types")
    pattern = config.get("sliding_window_pattern", every)
    if kinds is None:
        # no list is made: a file may claim any number of layers
        return WindowPattern(pattern > 1, pattern if pattern <= num else None)
    if FULL not in kinds or WINDOWED not in kinds:
        return WindowPattern(WINDOWED in kinds, None)
    found = next((n for n in (pattern, kinds.index(FULL) + 1) if _pattern(num, n) == kinds), None)
    return None if found is None else WindowPattern(True, found)


def _pattern(num_layers: int, every: int) -> list[str]:
    return [WINDOWED if i % every else FULL for i in range(1, num_layers + 1)]


def window_entries(config: DecoderConfig) -> dict[str, Any]:
    """Return the entries about windows in blocks that differ."""
    if config.window is None:
        # not read then, but it must be a number
        return {"sliding_window": config.seq, "layer_types": [FULL] * config.num_layers}
    kinds = _pattern(config.num_layers, config.full_every or config.num_layers + 1)
    return {"sliding_window": config.window, "layer_types": kinds}
