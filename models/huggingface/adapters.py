"""Read and write low-rank adapters: merged into their kernels, or alone in the format of the PEFT library.

PEFT's `adapter_model.safetensors` has matrices A (rank, in) and B (out, rank) for each layer.
Next: `files.py`; `lora.py` has the adapters' options.

References:
  https://huggingface.co/docs/peft/developer_guides/checkpoint, "The checkpoint format".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardtrain.errors.messages import refuse
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.entries import entry_problems, find_problem
from shardtrain.models.huggingface.families import ParameterReader, find_family, list_differences, shorten
from shardtrain.models.huggingface.folder import open_weights, own_file, read_object
from shardtrain.models.huggingface.place import Place
from shardtrain.models.lora import LORA_A, LORA_B, TARGETS, Lora
from shardtrain.system.lazy_array import LazyArray
from shardtrain.system.untrusted_files import check_whole_number, finite_number

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KERNEL = "/kernel"

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
    # other values change the kernels themselves
    "init_lora_weights": (True, False, None, "gaussian"),
    "layer_replication": (None, []),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
"""Entry of adapter_config.json -> the values for which an adapter is as `lora.py` describes."""

MOST_RANK, MOST_ALPHA = 1 << 16, 1e9


Read = Callable[[str], Any]
"""Path of a parameter -> its values, or an object as for `families.iterate_tensors`."""


def merge_adapters(
    config: Any, shapes: Mapping[str, tuple[int, ...]], read: Read
) -> tuple[Any, dict[str, tuple[int, ...]], Read]:
    """Return the configuration, shapes and `read` of the same model with adapters merged into kernels.

    Args:
      config: the configuration of the model; without `lora` nothing changes.
      shapes: path -> shape of every parameter.
      read: path -> array.
    """
    lora: Lora | None = getattr(config, "lora", None)
    if lora is None:
        return config, dict(shapes), read
    kept = {path: shape for path, shape in shapes.items() if path.rpartition("/")[2] not in (LORA_A, LORA_B)}

    def merged(path: str) -> Any:
        parent, _, name = path.rpartition("/")
        names = f"{parent}/{LORA_A}", f"{parent}/{LORA_B}"
        if name != "kernel" or names[0] not in shapes:
            return read(path)
        # the dims of both maps except the rank are those of the kernel; the others are stacked layers
        num_stacked = len(shapes[names[0]]) + len(shapes[names[1]]) - 2 - len(shapes[path])
        parts = read(path), read(names[0]), read(names[1])
        return LazyArray(lambda numbers: _sum(lora, parts, num_stacked, numbers))

    return replace(config, lora=None), kept, merged


def _sum(lora: Lora, parts: tuple[Any, Any, Any], num_stacked: int, numbers: tuple[int, ...]) -> np.ndarray:
    """Merge kernel, A and B: of one layer, or of all layers, layer by layer."""
    if num_stacked and not numbers:
        layers = range(len(np.asarray(parts[0])))
        return np.stack([_sum(lora, parts, num_stacked, (i,)) for i in layers])
    w, a, b = (np.asarray(x[numbers] if numbers else x) for x in parts)
    return w + np.float32(lora.scale) * np.tensordot(a, b, 1)


def iterate_adapters(config: Any, read: Read) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and array of every adapter, by PEFT's names.

    Args:
      config: the configuration of the model.
      read: path -> array.

    Raises:
      ValueError: the model has no adapters, or PEFT stores adapters of its family differently.
    """
    lora, places = _get_lora(config), list_adapter_places(config)
    for place in places:
        parent = place.path.removesuffix(KERNEL)
        first, second = (np.asarray(read(f"{parent}/{name}")) for name in (LORA_A, LORA_B))
        for kind, array, shape in (("A", first, (-1, lora.rank)), ("B", second, (lora.rank, -1))):
            for i, name in enumerate(_names(place, config, kind)):
                yield name, np.ascontiguousarray(array[i].reshape(shape).T)


def write_adapter_config(config: Any) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Raises:
      ValueError: as `iterate_adapters`.
    """
    lora, places = _get_lora(config), list_adapter_places(config)
    modules = {place.name.removesuffix(".weight").partition("{}.")[2] for place in places}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(config, DecoderConfig) else None,
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(modules),
    }


def _get_lora(config: Any) -> Lora:
    lora: Lora | None = getattr(config, "lora", None)
    if lora is None:
        raise ValueError("the model has no low-rank adapters (lora is None), so there are none to write")
    return lora


def list_adapter_places(config: Any) -> list[Place]:
    """Return the places of the kernels of a model that have an adapter.

    Raises:
      ValueError: as `iterate_adapters`.
    """
    lora = _get_lora(config)
    family = find_family(replace(config, lora=None))
    kernels = [place for place in family.places(config) if place.path.endswith(KERNEL) and place.is_stacked]
    found = [place for place in kernels if place.path.split("/")[-2] in lora.on]
    if any(place.parts or not place.transposed for place in found):
        refuse(
            "adapters of PEFT",
            [
                f"{family.model_type} has queries, keys and values in one matrix there, so PEFT has another"
                " layout; export the merged model instead, or train a model of a family such as llama"
            ],
        )
    return found


def open_adapters(folder: Path, config: Any) -> tuple[Lora, dict[str, ParameterReader]]:
    """Open the adapters in a folder.

    Args:
      folder: a folder with adapter_config.json and adapter_model.safetensors.
      config: the configuration of their model; its option `lora` is ignored.

    Returns:
      The option `lora` of a model with these adapters, and path -> float32 parameter.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: safetensors is not installed; PEFT stores adapters of the family differently; or lists
        entries of other kinds of adapters, and every missing, extra and misshaped array.
    """
    about = read_object(own_file(folder, ADAPTER_CONFIG), f"a folder with {ADAPTER_CONFIG}")
    problems = entry_problems(about, NEEDED, ONLY, "lora")
    problems += find_problem(check_whole_number, about.get("r"), "r", MOST_RANK, 1)
    problems += find_problem(finite_number, about.get("lora_alpha"), "lora_alpha", MOST_ALPHA, 1e-9)
    refuse(f"adapters in {folder}", problems)
    rank, places = about["r"], list_adapter_places(replace(config, lora=Lora(rank=1)))
    known = open_weights(folder, ADAPTER_WEIGHTS)
    present = [place for place in places if any(name in known for name in _names(place, config, "A"))]
    shapes = {}
    for place in present:
        out, into = place.their_shape(config.sizes)
        shapes |= dict.fromkeys(_names(place, config, "A"), (rank, into))
        shapes |= dict.fromkeys(_names(place, config, "B"), (out, rank))
    problems = list_differences(shapes, {name: array.shape for name, array in known.items()})
    refuse(f"arrays in {folder / ADAPTER_WEIGHTS}", shorten(problems))
    on = {place.path.split("/")[-2] for place in present}
    if not on:
        raise ValueError(f"{folder / ADAPTER_WEIGHTS} has no adapter of a projection of this model")
    lora = Lora(rank=rank, alpha=about["lora_alpha"], on=tuple(t for t in TARGETS if t in on))
    found = {}
    for place in present:
        shape, parent = place.shape(config.sizes), place.path.removesuffix(KERNEL)
        pairs = {LORA_A: ("A", (*shape[: place.num_in], rank)), LORA_B: ("B", (rank, *shape[place.num_in :]))}
        for name, (kind, ours) in pairs.items():
            read = partial(_stack, known, _names(place, config, kind), ours)
            found[f"{parent}/{name}"] = ParameterReader((config.num_layers, *ours), read)
    return lora, found


def _names(place: Place, config: Any, kind: str) -> list[str]:
    """Return the names of a projection's matrices A, or B, one for each layer."""
    names = place.names(config.num_layers)
    return [f"{PREFIX}{name.removesuffix('.weight')}.lora_{kind}.weight" for name in names]


def _stack(known: Mapping[str, Any], names: list[str], shape: tuple[int, ...]) -> np.ndarray:
    return np.stack([np.asarray(known[name], np.float32).T.reshape(shape) for name in names])
