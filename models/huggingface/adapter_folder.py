"""Read a folder of low-rank adapters of the PEFT library, onto the model that they belong to.

`adapters.py` writes such folders and describes their arrays.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.models import checks
from shardtrain.models.huggingface.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    KERNEL,
    PREFIX,
    adapter_places,
)
from shardtrain.models.huggingface.families import ParameterReader
from shardtrain.models.huggingface.folder import open_weights, own_file, read_object
from shardtrain.models.huggingface.place import Place, entry_problems, problem_of
from shardtrain.models.huggingface.state import differences, limited
from shardtrain.models.lora import LORA_A, LORA_B, TARGETS
from shardtrain.system.untrusted_files import finite_number, whole_number

NEEDED = ("peft_type", "r", "lora_alpha")
ONLY = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "lora_bias": (False, None),
    # others begin with a change of the kernels themselves
    "init_lora_weights": (True, False, None, "gaussian"),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
"""Entries of adapter_config.json, and the values with which an adapter is what `lora.py` describes."""

MOST_RANK, MOST_ALPHA = 1 << 16, 1e9


def open_adapters(folder: Path, config: Any) -> tuple[str, dict[str, ParameterReader]]:
    """Open the adapters in a folder.

    Args:
      folder: it has adapter_config.json and adapter_model.safetensors.
      config: of the model that they belong to; its own `lora` is not looked at.

    Returns:
      The text of the option `lora` of a model with these adapters, and path -> float32 parameter.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: safetensors is not installed; the family has no adapters in this form; or listing what is
        another kind of adapter, and every missing, extra and misshaped array.
    """
    about = read_object(own_file(folder, ADAPTER_CONFIG), f"a folder with {ADAPTER_CONFIG}")
    problems = entry_problems(about, NEEDED, ONLY, "lora")
    problems += problem_of(whole_number, about.get("r"), "r", MOST_RANK, 1)
    problems += problem_of(finite_number, about.get("lora_alpha"), "lora_alpha", MOST_ALPHA, 1e-9)
    checks.refuse(f"adapters in {folder}", problems)
    rank, places = about["r"], adapter_places(replace(config, lora="rank=1"))
    known = open_weights(folder, ADAPTER_WEIGHTS)
    present = [place for place in places if any(name in known for name in _names(place, config, "A"))]
    shapes = {
        name: shape
        for place in present
        for kind, shape in zip("AB", _their_shapes(place, config, rank), strict=True)
        for name in _names(place, config, kind)
    }
    problems = differences(shapes, {name: array.shape for name, array in known.items()})
    checks.refuse(f"arrays in {folder / ADAPTER_WEIGHTS}", limited(problems))
    on = {place.path.split("/")[-2] for place in present}
    if not on:
        raise ValueError(f"{folder / ADAPTER_WEIGHTS} has no adapter of a projection of this model")
    text = f"rank={rank},alpha={float(about['lora_alpha'])!r},on={'+'.join(t for t in TARGETS if t in on)}"
    found = {}
    for place in present:
        shape, parent = place.shape(config.sizes), place.path.removesuffix(KERNEL)
        pairs = {LORA_A: ("A", (*shape[: place.num_in], rank)), LORA_B: ("B", (rank, *shape[place.num_in :]))}
        for name, (kind, ours) in pairs.items():
            read = partial(_stacked, known, _names(place, config, kind), ours)
            found[f"{parent}/{name}"] = ParameterReader((config.num_layers, *ours), read)
    return text, found


def _names(place: Place, config: Any, kind: str) -> list[str]:
    """Return the names of a projection's matrices A, or B, one for each layer."""
    names = place.names(config.num_layers)
    return [f"{PREFIX}{name.removesuffix('.weight')}.lora_{kind}.weight" for name in names]


def _their_shapes(place: Place, config: Any, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    out, into = place.their_shape(config.sizes)
    return (rank, into), (out, rank)


def _stacked(known: Mapping[str, Any], names: list[str], shape: tuple[int, ...]) -> np.ndarray:
    return np.stack([np.asarray(known[name], np.float32).T.reshape(shape) for name in names])
