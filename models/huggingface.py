"""Convert weights of Hugging Face's GPT-2, Llama and BERT families to parameters of this package, and back.

Pure numpy on state dicts (name -> array), one array at a time where memory counts; values are unchanged.
`huggingface_state.py` handles single arrays, `huggingface_files.py` reads and writes files.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shardtrain.models import checks
from shardtrain.models.huggingface_bert import BERT
from shardtrain.models.huggingface_gpt2 import GPT2
from shardtrain.models.huggingface_llama import LLAMA
from shardtrain.models.huggingface_place import Family, value_problems
from shardtrain.models.huggingface_state import (
    State,
    by_array,
    copies_of,
    current_names,
    differences,
    layer_problems,
    limited,
    stacked_parameter,
    state_arrays,
    state_problems,
)
from shardtrain.system.excerpts import short

Params = dict[str, Any]

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, BERT)}


def from_huggingface(config: Mapping[str, Any], state: State) -> tuple[Any, Params]:
    """Convert a Hugging Face model to a configuration and parameters.

    Args:
      config: the dict of its config.json, with `model_type` "gpt2", "llama" or "bert".
      state: its state dict as numpy arrays; names with or without the prefix of the whole model.

    Returns:
      The configuration (dropout 0, other options of ours at their defaults: change them with
      `dataclasses.replace`), and a nested dict of arrays with the dtypes of `state`, blocks stacked.

    Raises:
      ValueError: listing every option of `config` that our model does not have; or every missing, extra and
        misshaped name of `state`.
    """
    ours, arrays = parameters(config, state)
    params: Params = {}
    for path, array in arrays:
        _put(params, path, array)
    return ours, params


def parameters(
    config: Mapping[str, Any], state: State, *, dtype: Any = None
) -> tuple[Any, Iterator[tuple[str, np.ndarray]]]:
    """Convert a Hugging Face model parameter by parameter: (configuration, pairs of path and array).

    Args:
      config: as for `from_huggingface`.
      state: the same; an array is read when its turn comes.
      dtype: of the parameters; by default that of `state`.

    Raises:
      ValueError: at once, as `from_huggingface`.
    """
    family, ours = read_config(config)
    known = current_names(state, family)
    # before anything is counted up to it
    problems = layer_problems(ours.num_layers, len(known))
    places = list(family.places(ours))
    problems = problems or state_problems(family, places, ours, known)
    checks.refuse(f"state dict of a {family.model_type} model", limited(problems))
    return ours, ((place.path, stacked_parameter(place, known, ours, dtype)) for place in places)


def to_huggingface(config: Any, params: Params) -> dict[str, np.ndarray]:
    """Convert parameters to a Hugging Face state dict.

    Args:
      config: of the model: an `EncoderConfig`, or a `DecoderConfig` (GPT-2 if its positions are learned,
        else Llama).
      params: nested dict of arrays, blocks stacked.

    Returns:
      name -> array with the dtypes of `params`. A tied head is written once, as the embedding.

    Raises:
      ValueError: listing every option that neither family has; or every missing, extra and misshaped
        parameter.
    """
    flat = dict(_flat(params))
    return dict(tensors(config, {path: np.shape(array) for path, array in flat.items()}, flat.__getitem__))


def tensors(
    config: Any, shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Convert parameters to a state dict array by array: pairs of name and array.

    Args:
      config: of the model.
      shapes: path -> shape of every parameter.
      read: path -> array; asked once each, when its turn comes.

    Raises:
      ValueError: at once, as `to_huggingface`.
    """
    family = family_of(config)
    places = list(family.places(config))
    wanted = {
        place.path: (config.num_layers,) * place.is_stacked + place.shape(config.sizes) for place in places
    }
    checks.refuse("params", differences(wanted, shapes))
    return state_arrays(family, places, config, read)


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every array that `tensors` yields, in the same order."""
    family = family_of(config)
    shapes = {}
    for group in by_array(family.places(config)):
        for name in group[0].names(config.num_layers):
            for each in (name, *copies_of(name, family, config)):
                shapes[each] = group[0].their_shape(config.sizes)
    return shapes


def family_of(config: Any) -> Family:
    """Return the family that a configuration of this package can be written as.

    Raises:
      ValueError: no family has such models; or listing every option that it does not have.
    """
    fit = {name: family for name, family in FAMILIES.items() if isinstance(config, family.kind)}
    if not fit:
        kinds = ", ".join(sorted({family.kind.__name__ for family in FAMILIES.values()}))
        raise ValueError(
            f"a {type(config).__name__} cannot be written as a Hugging Face model; allowed are {kinds}"
        )
    if len(fit) > 1:
        name = "gpt2" if config.positions == "learned" else "llama"
        fit = {name: fit[name]}
    ((name, family),) = fit.items()
    checks.refuse(f"{family.kind.__name__} written as a {name} model", family.foreign(config))
    return family


def read_config(config: Mapping[str, Any]) -> tuple[Family, Any]:
    """Return the family and the configuration of a config.json; missing entries have their defaults.

    Args:
      config: the dict of a config.json, with `model_type` one of `FAMILIES`.

    Raises:
      ValueError: listing every entry that is missing or that our model has no option for.
    """
    name = config.get("model_type", "")
    if name not in tuple(FAMILIES):
        checks.refuse("Hugging Face config", [unknown_family_text(name)])
    checks.refuse("Hugging Face config", value_problems(config))
    family = FAMILIES[name]
    problems, made = family.read(config)
    checks.refuse("Hugging Face config", problems)
    return family, made()


def unknown_family_text(name: object) -> str:
    """Format the error for a config.json of another kind of model.

    >>> unknown_family_text("qwen2")
    "model_type is 'qwen2', a family that cannot be read yet; those that can are 'gpt2', 'llama', 'bert'"
    """
    known = ", ".join(map(repr, FAMILIES))
    return f"model_type is {short(name)}, a family that cannot be read yet; those that can are {known}"


def write_config(config: Any) -> dict[str, Any]:
    """Return the config.json of a configuration of this package.

    Raises:
      ValueError: no family has such models; or listing every option that it does not have.

    >>> from shardtrain.models.encoder import EncoderConfig
    >>> config = EncoderConfig(vocab=32, seq=8, embed=16, num_layers=1, num_heads=4, mlp=64)
    >>> write_config(config)["architectures"], read_config(write_config(config))[1] == config
    (['BertForMaskedLM'], True)
    """
    family = family_of(config)
    about = {"model_type": family.model_type, "architectures": [family.architecture]}
    return about | family.write(config)


def left_out(config: Mapping[str, Any], state: State) -> list[str]:
    """Return the names of a state dict that the model does not have, such as BERT's pooler."""
    prefixes = read_config(config)[0].left_out
    return sorted(name for name in state if prefixes and name.startswith(prefixes))


def _flat(tree: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, node in tree.items():
        path = (*parents, name)
        yield from _flat(node, path) if isinstance(node, Mapping) else [("/".join(path), node)]


def _put(tree: Params, path: str, array: np.ndarray) -> None:
    *parents, name = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = array
