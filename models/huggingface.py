"""Convert weights of Hugging Face's GPT-2, Llama and BERT families to parameters of this package, and back.

Pure numpy on state dicts (name -> array), one array at a time where memory counts; values are
unchanged. Files are read and written by `huggingface_files.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shardtrain.models import checks
from shardtrain.models.huggingface_bert import BERT
from shardtrain.models.huggingface_gpt2 import GPT2
from shardtrain.models.huggingface_llama import LLAMA
from shardtrain.models.huggingface_place import Copy, Family, Place, value_problems
from shardtrain.system.excerpts import short

State = Mapping[str, Any]
"""Name -> array, or what has a shape and becomes one by `np.asarray`: it is read when its turn comes."""

Params = dict[str, Any]

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, BERT)}
MOST_PROBLEMS = 100
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".embeddings.position_ids")
"""Endings of names that older state dicts hold beside the weights."""

OLDER = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Endings of names in the first BERT files -> what they are called now."""


def from_huggingface(config: Mapping[str, Any], state: State) -> tuple[Any, Params]:
    """Turn a Hugging Face model into a configuration and parameters.

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
    """The same, parameter by parameter: (configuration, pairs of path and array).

    Args:
      config: as for `from_huggingface`.
      state: the same; an array is read when its turn comes.
      dtype: of the parameters; by default that of `state`.

    Raises:
      ValueError: at once, as `from_huggingface`.
    """
    family, ours = read_config(config)
    known = _canonical(state, family)
    # before anything is counted up to it
    problems = _layer_problems(ours.num_layers, len(known))
    places = list(family.places(ours))
    problems = problems or _state_problems(family, places, ours, known)
    checks.refuse(f"state dict of a {family.model_type} model", _first(problems))
    return ours, ((place.path, _stacked(place, known, ours, dtype)) for place in places)


def to_huggingface(config: Any, params: Params) -> dict[str, np.ndarray]:
    """Turn parameters into a Hugging Face state dict.

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
    """The same, one array of the state dict after the other: pairs of name and array.

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
    checks.refuse("params", _differences(wanted, shapes))
    return _written(family, places, config, read)


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every array that `tensors` gives, in the same order."""
    family = family_of(config)
    shapes = {}
    for group in _groups(family.places(config)):
        for name in group[0].names(config.num_layers):
            for each in (name, *_copies_of(name, family, config)):
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
    """The error for a config.json of another kind of model.

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


def _written(
    family: Family, places: list[Place], config: Any, read: Callable[[str], Any]
) -> Iterator[tuple[str, np.ndarray]]:
    for group in _groups(places):
        arrays = [np.asarray(read(place.path)) for place in group]
        for i, name in enumerate(group[0].names(config.num_layers)):
            slices = [
                place.theirs(array[i] if place.is_stacked else array)
                for place, array in zip(group, arrays, strict=True)
            ]
            joined = np.concatenate(slices, axis=-1) if len(slices) > 1 else slices[0]
            joined = np.ascontiguousarray(joined.T if group[0].transposed else joined)
            for each in (name, *_copies_of(name, family, config)):
                yield each, joined


def _groups(places: Any) -> list[list[Place]]:
    """Group the places by the Hugging Face array that they are slices of, in the order of the slices."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.name, []).append(place)
    return [sorted(group, key=lambda place: place.part) for group in groups.values()]


def _copies_of(name: str, family: Family, config: Any) -> list[str]:
    return [copy.name for copy in family.copies(config) if copy.of == name and not copy.tied]


def _stacked(place: Place, known: State, config: Any, dtype: Any) -> np.ndarray:
    """Return a parameter of this package, with at most one of its stacked layers in memory twice."""
    names = place.names(config.num_layers)
    first = place.ours(np.asarray(known[names[0]]), config.sizes)
    dtype = first.dtype if dtype is None else dtype
    if not place.is_stacked:
        return np.ascontiguousarray(first.astype(dtype, copy=False))
    stacked = np.empty((len(names), *first.shape), dtype)
    stacked[0] = first
    for i, name in enumerate(names[1:], 1):
        stacked[i] = place.ours(np.asarray(known[name]), config.sizes)
    return stacked


def _canonical(state: State, family: Family) -> dict[str, Any]:
    """Return the state dict by current names, with the family's prefix, without buffers and unused arrays."""
    is_bare = not any(name.startswith(family.prefix) for name in state)

    def today(name: str) -> str:
        name = family.prefix + name if is_bare and not name.startswith(family.heads) else name
        for ending, now in OLDER.items():
            name = name.removesuffix(ending) + now if name.endswith(ending) else name
        return name

    named = {today(name): array for name, array in state.items()}
    return {
        name: array
        for name, array in named.items()
        if not name.endswith(BUFFERS) and not name.startswith(family.left_out)
    }


def left_out(config: Mapping[str, Any], state: State) -> list[str]:
    """Return the names of a state dict that the model has no place for, such as BERT's pooler."""
    prefixes = read_config(config)[0].left_out
    return sorted(name for name in state if prefixes and name.startswith(prefixes))


def _state_problems(family: Family, places: list[Place], config: Any, known: dict[str, Any]) -> list[str]:
    shapes = {
        name: place.their_shape(config.sizes) for place in places for name in place.names(config.num_layers)
    }
    found = []
    for copy in family.copies(config):
        if copy.name in known:
            found += _copy_problems(copy, known)
            known.pop(copy.name)
    return found + _differences(shapes, {name: tuple(np.shape(array)) for name, array in known.items()})


def _layer_problems(num_layers: int, num_arrays: int) -> list[str]:
    """Refuse more layers than the files have arrays: each layer has at least one.

    >>> _layer_problems(10**9, 148)
    ['the config has 1000000000 layers, and the files have 148 arrays in all']
    """
    if num_layers <= num_arrays:
        return []
    return [f"the config has {num_layers} layers, and the files have {num_arrays} arrays in all"]


def _first(problems: list[str]) -> list[str]:
    """Shorten a list of problems to as many as a person reads."""
    more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
    return problems[:MOST_PROBLEMS] + more


def _copy_problems(copy: Copy, known: Mapping[str, Any]) -> list[str]:
    if not copy.tied or copy.of not in known:
        return []
    if np.array_equal(np.asarray(known[copy.name]), np.asarray(known[copy.of])):
        return []
    return [
        f"{copy.name} differs from {copy.of}, to which it is tied."
        " Set tie_word_embeddings to false in the config."
    ]


def _differences(wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List every missing, extra and misshaped array.

    >>> _differences({"a": (2,), "b": (3,)}, {"b": (4,), "c": (5,)})
    ['a is missing; it needs shape (2,)', 'b has shape (4,); it needs shape (3,)', 'c is extra; leave it out']
    """
    missing = [f"{name} is missing; it needs shape {wanted[name]}" for name in wanted if name not in given]
    shaped = [
        f"{name} has shape {given[name]}; it needs shape {wanted[name]}"
        for name in wanted
        if name in given and given[name] != wanted[name]
    ]
    return missing + shaped + [f"{name} is extra; leave it out" for name in given if name not in wanted]


def _flat(tree: Mapping[str, Any], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, node in tree.items():
        path = (*parents, name)
        yield from _flat(node, path) if isinstance(node, Mapping) else [("/".join(path), node)]


def _put(tree: Params, path: str, array: np.ndarray) -> None:
    *parents, name = path.split("/")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = array
