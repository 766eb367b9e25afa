"""Low-rank adapters in files: merged into the kernels they belong to, or alone as the PEFT library has them.

PEFT's `adapter_model.safetensors` has matrices A (rank, in) and B (out, rank) for each layer.
Next: `adapter_folder.py`, which reads them, and `files.py`; the adapters themselves are in `lora.py`.

References:
  https://huggingface.co/docs/peft/developer_guides/checkpoint, "The checkpoint format".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardtrain.models import checks
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.families import family_of
from shardtrain.models.huggingface.place import Place
from shardtrain.models.lora import LORA_A, LORA_B, Lora, read_lora
from shardtrain.system.lazy_array import LazyArray

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
KERNEL = "/kernel"

Read = Callable[[str], Any]
"""Path of a parameter -> its values, or what gives them as `tensors` asks for them."""


def with_adapters_merged(
    config: Any, shapes: Mapping[str, tuple[int, ...]], read: Read
) -> tuple[Any, dict[str, tuple[int, ...]], Read]:
    """Return the same model without adapters: each is added to its kernel when that is read.

    Args:
      config: of the model; without `lora` everything is returned as it is.
      shapes: path -> shape of every parameter.
      read: path -> array.
    """
    lora = read_lora(getattr(config, "lora", ""))
    if lora is None:
        return config, dict(shapes), read
    kept = {path: shape for path, shape in shapes.items() if path.rpartition("/")[2] not in (LORA_A, LORA_B)}

    def merged(path: str) -> Any:
        parent, _, name = path.rpartition("/")
        names = f"{parent}/{LORA_A}", f"{parent}/{LORA_B}"
        if name != "kernel" or names[0] not in shapes:
            return read(path)
        # the dims of the kernel are those of both maps but for the rank; what is left counts layers
        num_stacked = len(shapes[names[0]]) + len(shapes[names[1]]) - 2 - len(shapes[path])
        parts = read(path), read(names[0]), read(names[1])
        return LazyArray(lambda numbers: _sum(lora, parts, num_stacked, numbers))

    return replace(config, lora=""), kept, merged


def _sum(lora: Lora, parts: tuple[Any, Any, Any], num_stacked: int, numbers: tuple[int, ...]) -> np.ndarray:
    """Return a kernel with its adapter, of these three: of one layer, or of all, layer by layer."""
    if num_stacked and not numbers:
        layers = range(len(np.asarray(parts[0])))
        return np.stack([_sum(lora, parts, num_stacked, (i,)) for i in layers])
    w, a, b = (np.asarray(x[numbers] if numbers else x) for x in parts)
    return w + np.float32(lora.scale) * np.tensordot(a, b, 1)


def adapter_tensors(config: Any, read: Read) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and array of every adapter, as PEFT names them.

    Args:
      config: of the model.
      read: path -> array.

    Raises:
      ValueError: the model has no adapters, or PEFT has none for its family.
    """
    lora, places = _lora_of(config), adapter_places(config)
    for place in places:
        parent = place.path.removesuffix(KERNEL)
        first, second = (np.asarray(read(f"{parent}/{name}")) for name in (LORA_A, LORA_B))
        for i, name in enumerate(place.names(config.num_layers)):
            module = PREFIX + name.removesuffix(".weight")
            yield f"{module}.lora_A.weight", np.ascontiguousarray(first[i].reshape(-1, lora.rank).T)
            yield f"{module}.lora_B.weight", np.ascontiguousarray(second[i].reshape(lora.rank, -1).T)


def adapter_config(config: Any) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Raises:
      ValueError: as `adapter_tensors`.
    """
    lora, places = _lora_of(config), adapter_places(config)
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


def _lora_of(config: Any) -> Lora:
    lora = read_lora(getattr(config, "lora", ""))
    if lora is None:
        raise ValueError("the model has no low-rank adapters (lora is empty), so there are none to write")
    return lora


def adapter_places(config: Any) -> list[Place]:
    """Return the places of the kernels of a model that have an adapter.

    Raises:
      ValueError: as `adapter_tensors`.
    """
    lora = _lora_of(config)
    family = family_of(replace(config, lora=""))
    kernels = [place for place in family.places(config) if place.path.endswith(KERNEL) and place.is_stacked]
    found = [place for place in kernels if place.path.split("/")[-2] in lora.on]
    if any(place.parts or not place.transposed for place in found):
        checks.refuse(
            "adapters of PEFT",
            [
                f"{family.model_type} has queries, keys and values in one matrix there, so PEFT has another"
                " layout; export the merged model instead, or train a model of a family such as llama"
            ],
        )
    return found
