"""Convert weights of Hugging Face's families to parameters of this package, and back.

Pure numpy on state dicts (name -> array), one array at a time to save memory; values are unchanged.
`place.py` maps arrays to parameters, `files.py` reads and writes files.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from shardtrain.errors.messages import refuse
from shardtrain.models import checks
from shardtrain.models.huggingface.decoder_families import DECODERS
from shardtrain.models.huggingface.encoder_families import BERT, VIT
from shardtrain.models.huggingface.entries import value_problems
from shardtrain.models.huggingface.place import STATE, Copy, Family, Place, num_blocks
from shardtrain.models.huggingface.resnet import RESNET
from shardtrain.models.huggingface.t5 import MT5, T5
from shardtrain.system.excerpts import short

FAMILIES = {family.model_type: family for family in (*DECODERS, BERT, VIT, RESNET, T5, MT5)}
"""model_type -> family; a model is written as the first family that has all its options."""

State = Mapping[str, Any]
"""Name -> array, or an object with a shape that `np.asarray` reads when it is needed."""

MOST_PROBLEMS = 100
BUFFERS = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq",
    ".embeddings.position_ids", ".num_batches_tracked",
)  # fmt: skip
"""Endings of names of arrays that are no weights, and that our models do not have."""

OLDER = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Endings of names in the first BERT files -> their current endings."""


class ParameterReader(NamedTuple):
    """A parameter that is read when it is needed.

    Attributes:
      shape: its shape, blocks stacked.
      read: a function that returns its values.
      stack: the first sizes of `shape`, along which arrays of the files are stacked: blocks, and experts.
      read_one: number of such an array, in the order of the stack -> its values.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    stack: tuple[int, ...] = ()
    read_one: Callable[[int], np.ndarray] | None = None


def from_huggingface(config: Mapping[str, Any], state: State) -> tuple[Any, dict[str, Any]]:
    """Convert a Hugging Face model to a configuration and parameters.

    Args:
      config: the dict of its config.json, with `model_type` one of `FAMILIES`.
      state: its state dict as numpy arrays; names with or without the prefix of the whole model.

    Returns:
      The configuration (dropout 0, other options that files do not have at their defaults: change them with
      `dataclasses.replace`), and a nested dict of arrays with the dtypes of `state`, blocks stacked; running
      statistics are below its entry "model_state".

    Raises:
      ValueError: lists every option of `config` that our model does not support; or every missing, extra and
        misshaped name of `state`.
    """
    ours, found = open_readers(config, state)
    return ours, unflatten_dict({path: each.read() for path, each in found.items()}, sep="/")


def open_readers(
    config: Mapping[str, Any], state: State, *, dtype: Any = None
) -> tuple[Any, dict[str, ParameterReader]]:
    """Return the configuration, and path -> parameter; parameters are read when they are needed.

    Args:
      config, state: as for `from_huggingface`.
      dtype: the dtype of the parameters; by default that of `state`.

    Raises:
      ValueError: at once, as `from_huggingface`.
    """
    family, ours = read_config(config)
    known = _rename(state, family)
    # before anything is counted up to it
    refuse(f"state dict of a {family.model_type} model", _layer_problems(num_blocks(ours), len(known)))
    places = list(family.places(ours))
    problems = _layer_problems(num_blocks(ours), len(known), max(place.num_experts for place in places))
    problems = problems or _state_problems(family, places, ours, known)
    refuse(f"state dict of a {family.model_type} model", shorten(problems))
    return ours, {place.path: _make_reader(place, known, ours, dtype) for place in places}


def _rename(state: State, family: Family) -> dict[str, Any]:
    """Rename a state dict to current names with the family's prefix, and drop buffers and unused arrays."""
    is_bare = not any(name.startswith(family.prefix) for name in state)

    def current(name: str) -> str:
        name = family.prefix + name if is_bare and not name.startswith(family.heads) else name
        for ending, now in OLDER.items():
            name = name.removesuffix(ending) + now if name.endswith(ending) else name
        for alias, now in family.aliases:
            name = name.replace(alias, now)
        return name

    named = {current(name): array for name, array in state.items()}
    return {
        name: array
        for name, array in named.items()
        if not name.endswith(BUFFERS) and not name.startswith(family.left_out)
    }


def _make_reader(place: Place, known: State, config: Any, dtype: Any) -> ParameterReader:
    names, stack = place.names(num_blocks(config)), place.stack(num_blocks(config))
    shape = place.shape(config.sizes)

    def read_one(number: int) -> np.ndarray:
        return place.convert_to_ours(np.asarray(known[names[number]]), config.sizes)

    def read() -> np.ndarray:
        # at most one of the stacked arrays is in memory twice
        first = read_one(0)
        stacked = np.empty((len(names), *shape), first.dtype if dtype is None else dtype)
        for i in range(len(names)):
            stacked[i] = first if i == 0 else read_one(i)
        return stacked.reshape(*stack, *shape)

    return ParameterReader((*stack, *shape), read, stack, read_one)


def to_huggingface(
    config: Any, params: Mapping[str, Any], family: str | None = None
) -> dict[str, np.ndarray]:
    """Convert parameters to a Hugging Face state dict.

    Args:
      config: the configuration of the model; a `DecoderConfig` is written as the first of `FAMILIES` that has
        its options.
      params: nested dict of arrays, blocks stacked.
      family: see `find_family`.

    Returns:
      name -> array with the dtypes of `params`. A tied head is written once, as the embedding.

    Raises:
      ValueError: lists every option that no family has; or every missing, extra and misshaped parameter.
    """
    flat: Any = flatten_dict(params, sep="/")
    shapes = {path: np.shape(array) for path, array in flat.items()}
    return dict(iterate_tensors(config, shapes, flat.__getitem__, family))


def iterate_tensors(
    config: Any,
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Any],
    family: str | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Convert parameters to a state dict array by array; yield pairs of name and array.

    Args:
      config: the configuration of the model.
      shapes: path -> shape of every parameter.
      read: path -> array, or an object that supports `array[layer]`, `array[layer, expert]` and `np.asarray`.
        It is called once for each path, and only the slices of the next array are read.
      family: see `find_family`.

    Raises:
      ValueError: at once, as `to_huggingface`.
    """
    written_as = find_family(config, family)
    places = list(written_as.places(config))
    wanted = {place.path: place.stack(num_blocks(config)) + place.shape(config.sizes) for place in places}
    refuse("params", list_differences(wanted, shapes))
    return _convert(written_as, places, config, read)


def _convert(
    family: Family, places: list[Place], config: Any, read: Callable[[str], Any]
) -> Iterator[tuple[str, np.ndarray]]:
    for group in _group_by_array(places):
        stack = group[0].stack(num_blocks(config))
        arrays = [read(place.path) for place in group]
        for numbers, name in zip(np.ndindex(*stack), group[0].names(num_blocks(config)), strict=True):
            slices = [
                place.convert_to_theirs(np.asarray(array[numbers] if stack else array))
                for place, array in zip(group, arrays, strict=True)
            ]
            joined = group[0].joined(slices, config.sizes)
            joined = np.ascontiguousarray(joined.T if group[0].transposed else joined)
            for each in (name, *_written_copies(name, family, config)):
                yield each, joined


def list_tensor_shapes(config: Any, family: str | None = None) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every array that `iterate_tensors` yields, in the same order."""
    written_as = find_family(config, family)
    return {
        each: group[0].their_shape(config.sizes)
        for group in _group_by_array(written_as.places(config))
        for name in group[0].names(num_blocks(config))
        for each in (name, *_written_copies(name, written_as, config))
    }


def _group_by_array(places: Any) -> list[list[Place]]:
    """Group the places by their array in the state dict, in the order of its slices."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.name, []).append(place)
    return [sorted(group, key=lambda place: place.part) for group in groups.values()]


def _written_copies(name: str, family: Family, config: Any) -> list[str]:
    """Return the other names under which an array is written too."""
    return [copy.name for copy in family.copies(config) if copy.of == name and not copy.tied]


def find_family(config: Any, name: str | None = None) -> Family:
    """Find the family that a configuration of this package can be written as.

    Args:
      config: the configuration of the model.
      name: the `model_type` to write. None means the first of `FAMILIES` that has all options of the model.

    Raises:
      ValueError: no family has such models; or lists every option that the family does not have.
    """
    fit = {name: family for name, family in FAMILIES.items() if isinstance(config, family.kind)}
    if not fit:
        kinds = ", ".join(sorted({family.kind.__name__ for family in FAMILIES.values()}))
        raise ValueError(
            f"a {type(config).__name__} cannot be written as a Hugging Face model; allowed are {kinds}"
        )
    if name is not None:
        refuse("family", checks.choice("family", name, tuple(fit)))
        fit = {name: fit[name]}
    # the first that has all options, else the nearest
    family = min(fit.values(), key=lambda family: len(family.list_foreign(config)))
    problems = family.list_foreign(config)
    refuse(f"{family.kind.__name__} written as a {family.model_type} model", problems)
    return family


def drop_unwritten_state(
    config: Any, shapes: Mapping[str, tuple[int, ...]], family: str | None
) -> dict[str, tuple[int, ...]]:
    """Drop the shapes of running statistics that files of the family do not have."""
    if not any(path.startswith(STATE) for path in shapes):
        return dict(shapes)
    known = {place.path for place in find_family(config, family).places(config)}
    return {path: shape for path, shape in shapes.items() if not path.startswith(STATE) or path in known}


def read_config(config: Mapping[str, Any]) -> tuple[Family, Any]:
    """Return the family and the configuration of a config.json; missing entries have their defaults.

    Args:
      config: the dict of a config.json, with `model_type` one of `FAMILIES`.

    Raises:
      ValueError: lists every entry that is missing or that our model does not support.

    >>> read_config({"model_type": "t0"})
    Traceback (most recent call last):
    ValueError: Hugging Face config:
      - model_type is 't0', a family that cannot be read yet; those that can are 'gpt2', 'llama', 'mistral', \
'qwen2', 'qwen3', 'phi3', 'starcoder2', 'olmo2', 'gemma', 'gemma2', 'gemma3_text', 'gpt_neox', 'mixtral', \
'qwen2_moe', 'qwen3_moe', 'bert', 'vit', 'resnet', 't5', 'mt5'
    """
    name = config.get("model_type", "")
    problems = value_problems(config)
    if name not in tuple(FAMILIES):
        known = ", ".join(map(repr, FAMILIES))
        problems = [
            f"model_type is {short(name)}, a family that cannot be read yet; those that can are {known}"
        ]
    elif (quantized := config.get("quantization_config")) is not None:
        problems = [
            f"quantization_config is {short(quantized)}, and quantized weights are not read; give it in"
            " 16 or 32 bits, or load it with transformers, call model.dequantize() and save it again"
        ]
    refuse("Hugging Face config", problems)
    return FAMILIES[name], FAMILIES[name].read_config(config)


def write_config(config: Any, family: str | None = None) -> dict[str, Any]:
    """Return the config.json of a configuration of this package; see `find_family`.

    Raises:
      ValueError: no family has such models; or lists every option that the family does not have.

    >>> from shardtrain.models.encoder import EncoderConfig
    >>> config = EncoderConfig(vocab=32, seq=8, embed=16, num_layers=1, num_heads=4, mlp=64)
    >>> write_config(config)["architectures"], read_config(write_config(config))[1] == config
    (['BertForMaskedLM'], True)
    """
    return find_family(config, family).write_config(config)


def list_left_out(config: Mapping[str, Any], state: State) -> list[str]:
    """Return the names of a state dict that the model does not have, such as BERT's pooler."""
    prefixes = read_config(config)[0].left_out
    return sorted(name for name in state if prefixes and name.startswith(prefixes))


def _state_problems(family: Family, places: list[Place], config: Any, known: dict[str, Any]) -> list[str]:
    """List the problems of a state dict, and drop copies of other arrays from `known`."""
    shapes = {
        name: place.their_shape(config.sizes) for place in places for name in place.names(num_blocks(config))
    }
    found = []
    for copy in family.copies(config):
        if copy.name in known:
            found += _copy_problems(copy, known)
            known.pop(copy.name)
    return found + list_differences(shapes, {name: tuple(np.shape(array)) for name, array in known.items()})


def _copy_problems(copy: Copy, known: Mapping[str, Any]) -> list[str]:
    if not copy.tied or copy.of not in known:
        return []
    if np.array_equal(np.asarray(known[copy.name]), np.asarray(known[copy.of])):
        return []
    return [
        f"{copy.name} differs from {copy.of}, to which it is tied."
        " Set tie_word_embeddings to false in the config."
    ]


def _layer_problems(num_layers: int, num_arrays: int, num_experts: int = 0) -> list[str]:
    """Report more layers, or experts, than arrays in the files: each has at least one array.

    >>> _layer_problems(10**9, 148)
    ['the config has 1000000000 layers, and the files have 148 arrays in all']
    """
    if num_layers * max(num_experts, 1) <= num_arrays:
        return []
    experts = f" of {num_experts} experts" if num_experts else ""
    return [f"the config has {num_layers} layers{experts}, and the files have {num_arrays} arrays in all"]


def shorten(problems: list[str]) -> list[str]:
    """Shorten a long list of problems."""
    more = [f"and {len(problems) - MOST_PROBLEMS} more"] if len(problems) > MOST_PROBLEMS else []
    return problems[:MOST_PROBLEMS] + more


def list_differences(
    wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """List every missing, extra and misshaped array.

    >>> list_differences({"a": (2,), "b": (3,)}, {"b": (4,), "c": (5,)})
    ['a is missing; it needs shape (2,)', 'b has shape (4,); it needs shape (3,)', 'c is extra; leave it out']
    """
    missing = [f"{name} is missing; it needs shape {wanted[name]}" for name in wanted if name not in given]
    shaped = [
        f"{name} has shape {given[name]}; it needs shape {wanted[name]}"
        for name in wanted
        if name in given and given[name] != wanted[name]
    ]
    return missing + shaped + [f"{name} is extra; leave it out" for name in given if name not in wanted]
