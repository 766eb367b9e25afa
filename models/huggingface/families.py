"""Convert weights of Hugging Face's families to parameters of this package, and back.

Pure numpy on state dicts (name -> array), one array at a time where memory counts; values are unchanged.
`state.py` handles single arrays, `files.py` reads and writes files.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardtrain.models import checks
from shardtrain.models.huggingface.bert import BERT
from shardtrain.models.huggingface.gpt2 import GPT2
from shardtrain.models.huggingface.gpt_neox import GPT_NEOX
from shardtrain.models.huggingface.place import STATE, Family, num_blocks, value_problems
from shardtrain.models.huggingface.relatives import RELATIVES
from shardtrain.models.huggingface.resnet import RESNET
from shardtrain.models.huggingface.sparse_relatives import SPARSE_RELATIVES
from shardtrain.models.huggingface.state import (
    State,
    by_array,
    copies_of,
    current_names,
    differences,
    layer_problems,
    limited,
    one_parameter,
    stacked_parameter,
    state_arrays,
    state_problems,
)
from shardtrain.models.huggingface.t5 import MT5, T5
from shardtrain.models.huggingface.vit import VIT
from shardtrain.system.excerpts import short

Params = dict[str, Any]

ALL = (GPT2, *RELATIVES, GPT_NEOX, *SPARSE_RELATIVES, BERT, VIT, RESNET, T5, MT5)
FAMILIES = {family.model_type: family for family in ALL}
"""The first that has all options of a model is the one that it is written as."""


def from_huggingface(config: Mapping[str, Any], state: State) -> tuple[Any, Params]:
    """Convert a Hugging Face model to a configuration and parameters.

    Args:
      config: the dict of its config.json, with `model_type` one of `FAMILIES`.
      state: its state dict as numpy arrays; names with or without the prefix of the whole model.

    Returns:
      The configuration (dropout 0, other options of ours at their defaults: change them with
      `dataclasses.replace`), and a nested dict of arrays with the dtypes of `state`, blocks stacked; running
      statistics are below its entry "model_state".

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
    ours, found = parameter_readers(config, state, dtype=dtype)
    return ours, ((path, each.read()) for path, each in found.items())


class ParameterReader(NamedTuple):
    """A parameter that is not read yet.

    Attributes:
      shape: its shape, blocks stacked.
      read: returns its values.
      stack: the first sizes of `shape`, along which arrays of the files are stacked: blocks, and experts.
      read_one: number of such an array, in the order of the stack -> its values.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    stack: tuple[int, ...] = ()
    read_one: Callable[[int], np.ndarray] | None = None


def parameter_readers(
    config: Mapping[str, Any], state: State, *, dtype: Any = None
) -> tuple[Any, dict[str, ParameterReader]]:
    """Return the configuration, and path -> parameter, each to be read in any order; see `parameters`.

    Raises:
      ValueError: at once, as `from_huggingface`.
    """
    family, ours = read_config(config)
    known = current_names(state, family)
    # before anything is counted up to it
    checks.refuse(f"state dict of a {family.model_type} model", layer_problems(num_blocks(ours), len(known)))
    places = list(family.places(ours))
    problems = layer_problems(num_blocks(ours), len(known), max(place.num_experts for place in places))
    problems = problems or state_problems(family, places, ours, known)
    checks.refuse(f"state dict of a {family.model_type} model", limited(problems))
    return ours, {
        place.path: ParameterReader(
            place.stack(num_blocks(ours)) + place.shape(ours.sizes),
            partial(stacked_parameter, place, known, ours, dtype),
            place.stack(num_blocks(ours)),
            partial(one_parameter, place, place.names(num_blocks(ours)), known, ours),
        )
        for place in places
    }


def to_huggingface(config: Any, params: Params, family: str | None = None) -> dict[str, np.ndarray]:
    """Convert parameters to a Hugging Face state dict.

    Args:
      config: of the model, of a class that a family has; a `DecoderConfig` is written as the first of
        `FAMILIES` that has its options.
      params: nested dict of arrays, blocks stacked.
      family: see `family_of`.

    Returns:
      name -> array with the dtypes of `params`. A tied head is written once, as the embedding.

    Raises:
      ValueError: listing every option that no family has; or every missing, extra and misshaped
        parameter.
    """
    flat = dict(_flat(params))
    shapes = {path: np.shape(array) for path, array in flat.items()}
    return dict(tensors(config, shapes, flat.__getitem__, family))


def tensors(
    config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Any],
    family: str | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Convert parameters to a state dict array by array: pairs of name and array.

    Args:
      config: of the model.
      shapes: path -> shape of every parameter.
      read: path -> array, or what gives one for `array[layer]`, `array[layer, expert]` and by `np.asarray`;
        asked once each, when its turn comes.
      family: see `family_of`.

    Raises:
      ValueError: at once, as `to_huggingface`.
    """
    written_as = family_of(config, family)
    places = list(written_as.places(config))
    wanted = {place.path: place.stack(num_blocks(config)) + place.shape(config.sizes) for place in places}
    checks.refuse("params", differences(wanted, shapes))
    return state_arrays(written_as, places, config, read)


def tensor_shapes(config: Any, family: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every array that `tensors` yields, in the same order."""
    written_as = family_of(config, family)
    shapes = {}
    for group in by_array(written_as.places(config)):
        for name in group[0].names(num_blocks(config)):
            for each in (name, *copies_of(name, written_as, config)):
                shapes[each] = group[0].their_shape(config.sizes)
    return shapes


def family_of(config: Any, name: str | None = None) -> Family:
    """Return the family that a configuration of this package can be written as.

    Args:
      config: of the model.
      name: the `model_type` to write; None: the first of `FAMILIES` that has all options of the model.

    Raises:
      ValueError: no family has such models; or listing every option that it does not have.
    """
    fit = {name: family for name, family in FAMILIES.items() if isinstance(config, family.kind)}
    if not fit:
        kinds = ", ".join(sorted({family.kind.__name__ for family in FAMILIES.values()}))
        raise ValueError(
            f"a {type(config).__name__} cannot be written as a Hugging Face model; allowed are {kinds}"
        )
    if name is not None:
        checks.refuse("family", checks.choice("family", name, tuple(fit)))
        fit = {name: fit[name]}
    # the first that has all of it, else the nearest
    family = min(fit.values(), key=lambda family: len(family.foreign(config)))
    checks.refuse(f"{family.kind.__name__} written as a {family.model_type} model", family.foreign(config))
    return family


def without_unwritten_state(
    config: Any, shapes: Mapping[str, tuple[int, ...]], family: str | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes without running statistics that files of the family do not have."""
    if not any(path.startswith(STATE) for path in shapes):
        return dict(shapes)
    known = {place.path for place in family_of(config, family).places(config)}
    return {path: shape for path, shape in shapes.items() if not path.startswith(STATE) or path in known}


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
    if (quantized := config.get("quantization_config")) is not None:
        text = (
            f"quantization_config is {short(quantized)}, and quantized weights are not read; give it in"
            " 16 or 32 bits, or load it with transformers, call model.dequantize() and save it again"
        )
        checks.refuse("Hugging Face config", [text])
    checks.refuse("Hugging Face config", value_problems(config))
    family = FAMILIES[name]
    problems, made = family.read(config)
    checks.refuse("Hugging Face config", problems)
    return family, made()


def unknown_family_text(name: object) -> str:
    """Format the error for a config.json of another kind of model.

    >>> unknown_family_text("t0")[:70]
    "model_type is 't0', a family that cannot be read yet; those that can a"
    """
    known = ", ".join(map(repr, FAMILIES))
    return f"model_type is {short(name)}, a family that cannot be read yet; those that can are {known}"


def write_config(config: Any, family: str | None = None) -> dict[str, Any]:
    """Return the config.json of a configuration of this package, as `family_of` chooses its family.

    Raises:
      ValueError: no family has such models; or listing every option that it does not have.

    >>> from shardtrain.models.encoder import EncoderConfig
    >>> config = EncoderConfig(vocab=32, seq=8, embed=16, num_layers=1, num_heads=4, mlp=64)
    >>> write_config(config)["architectures"], read_config(write_config(config))[1] == config
    (['BertForMaskedLM'], True)
    """
    found = family_of(config, family)
    about = {"model_type": found.model_type, "architectures": [found.architecture]}
    return about | found.write(config)


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
