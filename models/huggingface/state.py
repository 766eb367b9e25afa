"""State dicts of Hugging Face (name -> array): their names, their problems, and their conversion.

`place.py` says which parameter each array is; `families.py` converts whole models.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from shardtrain.models.huggingface.place import Copy, Family, Place, num_blocks

State = Mapping[str, Any]
"""Name -> array, or what has a shape and becomes one by `np.asarray`: it is read when its turn comes."""

MOST_PROBLEMS = 100
BUFFERS = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq",
    ".embeddings.position_ids", ".num_batches_tracked",
)  # fmt: skip
"""Endings of names of arrays beside the weights that ours have not."""

OLDER = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
"""Endings of names in the first BERT files -> what they are called now."""


def current_names(state: State, family: Family) -> dict[str, Any]:
    """Return the state dict by current names, with the family's prefix, without buffers and unused arrays."""
    is_bare = not any(name.startswith(family.prefix) for name in state)

    def today(name: str) -> str:
        name = family.prefix + name if is_bare and not name.startswith(family.heads) else name
        for ending, now in OLDER.items():
            name = name.removesuffix(ending) + now if name.endswith(ending) else name
        for alias, now in family.aliases:
            name = name.replace(alias, now)
        return name

    named = {today(name): array for name, array in state.items()}
    return {
        name: array
        for name, array in named.items()
        if not name.endswith(BUFFERS) and not name.startswith(family.left_out)
    }


def stacked_parameter(place: Place, known: State, config: Any, dtype: Any) -> np.ndarray:
    """Return a parameter of this package, with at most one of the stacked arrays in memory twice."""
    names = place.names(num_blocks(config))
    first = place.ours(np.asarray(known[names[0]]), config.sizes)
    dtype = first.dtype if dtype is None else dtype
    if not place.is_stacked:
        return np.ascontiguousarray(first.astype(dtype, copy=False))
    stacked = np.empty((len(names), *first.shape), dtype)
    stacked[0] = first
    for i, name in enumerate(names[1:], 1):
        stacked[i] = place.ours(np.asarray(known[name]), config.sizes)
    return stacked.reshape(*place.stack(num_blocks(config)), *first.shape)


def one_parameter(place: Place, names: list[str], known: State, config: Any, number: int) -> np.ndarray:
    """Return one of the arrays that are stacked in a parameter of this package, in the dtype of the state."""
    return place.ours(np.asarray(known[names[number]]), config.sizes)


def state_arrays(
    family: Family, places: list[Place], config: Any, read: Callable[[str], Any]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and array of a whole state dict, made of the parameters that `read` returns.

    Of a parameter that is stacked only what the next array needs is asked for, by the numbers of its layer
    and expert.
    """
    for group in by_array(places):
        stack = group[0].stack(num_blocks(config))
        arrays = [read(place.path) for place in group]
        for numbers, name in zip(np.ndindex(*stack), group[0].names(num_blocks(config)), strict=True):
            slices = [
                place.theirs(np.asarray(array[numbers] if stack else array))
                for place, array in zip(group, arrays, strict=True)
            ]
            joined = group[0].joined(slices, config.sizes)
            joined = np.ascontiguousarray(joined.T if group[0].transposed else joined)
            for each in (name, *copies_of(name, family, config)):
                yield each, joined


def by_array(places: Any) -> list[list[Place]]:
    """Group the places by the Hugging Face array that they are slices of, in the order of the slices."""
    groups: dict[str, list[Place]] = {}
    for place in places:
        groups.setdefault(place.name, []).append(place)
    return [sorted(group, key=lambda place: place.part) for group in groups.values()]


def copies_of(name: str, family: Family, config: Any) -> list[str]:
    """Return the second names under which an array is written."""
    return [copy.name for copy in family.copies(config) if copy.of == name and not copy.tied]


def state_problems(family: Family, places: list[Place], config: Any, known: dict[str, Any]) -> list[str]:
    """List the problems of a state dict for the model; copies of other arrays are dropped from `known`."""
    shapes = {
        name: place.their_shape(config.sizes) for place in places for name in place.names(num_blocks(config))
    }
    found = []
    for copy in family.copies(config):
        if copy.name in known:
            found += _copy_problems(copy, known)
            known.pop(copy.name)
    return found + differences(shapes, {name: tuple(np.shape(array)) for name, array in known.items()})


def layer_problems(num_layers: int, num_arrays: int, num_experts: int = 0) -> list[str]:
    """Refuse more layers, or experts, than the files have arrays: each has at least one.

    >>> layer_problems(10**9, 148)
    ['the config has 1000000000 layers, and the files have 148 arrays in all']
    """
    if num_layers * max(num_experts, 1) <= num_arrays:
        return []
    experts = f" of {num_experts} experts" if num_experts else ""
    return [f"the config has {num_layers} layers{experts}, and the files have {num_arrays} arrays in all"]


def limited(problems: list[str]) -> list[str]:
    """Shorten a long list of problems."""
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


def differences(wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List every missing, extra and misshaped array.

    >>> differences({"a": (2,), "b": (3,)}, {"b": (4,), "c": (5,)})
    ['a is missing; it needs shape (2,)', 'b has shape (4,); it needs shape (3,)', 'c is extra; leave it out']
    """
    missing = [f"{name} is missing; it needs shape {wanted[name]}" for name in wanted if name not in given]
    shaped = [
        f"{name} has shape {given[name]}; it needs shape {wanted[name]}"
        for name in wanted
        if name in given and given[name] != wanted[name]
    ]
    return missing + shaped + [f"{name} is extra; leave it out" for name in given if name not in wanted]
