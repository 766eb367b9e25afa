"""The mapping between parameters of this package and a Hugging Face state dict, as a table for each family.

Each family is a table of places, read in both directions, and two functions for its config.json; they stand
in `huggingface_gpt2.py`, `huggingface_llama.py` and `huggingface_bert.py`. Next: `huggingface.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import finite_number, whole_number


@dataclass(frozen=True, kw_only=True)
class Place:
    """The mapping of one parameter of this package to arrays of a state dict.

    Args:
      path: in our nested dict, joined by "/".
      name: in the state dict; "{}" stands for the number of the layer.
      dims: what its sizes are, without layers.
      num_in: how many of the dims a linear map contracts; their product is one dim over there.
      transposed: whether the matrix over there is (out, in).
      part: which of `num_parts` equal slices of the last dim it is.
      num_parts: 3 for queries, keys and values in one matrix.
    """

    path: str
    name: str
    dims: tuple[str, ...]
    num_in: int = 0
    transposed: bool = False
    part: int = 0
    num_parts: int = 1

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter has all layers stacked along a first dim."""
        return "{}" in self.name

    def names(self, num_layers: int) -> list[str]:
        """The names in the state dict, one for each layer."""
        return [self.name.format(i) for i in range(num_layers)] if self.is_stacked else [self.name]

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the parameter, without layers."""
        return tuple(sizes[dim] for dim in self.dims)

    def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole array in the state dict."""
        shape = self.shape(sizes)
        if self.path.endswith(("kernel", "bias")):
            shape = (*_matrix(shape, self.num_in)[:-1], _matrix(shape, self.num_in)[-1] * self.num_parts)
        return shape[::-1] if self.transposed else shape

    def ours(self, theirs: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Return the parameter of one layer from the array of the state dict."""
        theirs = theirs.T if self.transposed else theirs
        return np.split(theirs, self.num_parts, axis=-1)[self.part].reshape(self.shape(sizes))

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """Return the parameter of one layer as its slice of the state dict's array, untransposed."""
        return (
            ours.reshape(_matrix(ours.shape, self.num_in)) if self.path.endswith(("kernel", "bias")) else ours
        )


def _matrix(shape: tuple[int, ...], num_in: int) -> tuple[int, ...]:
    """The shape of a kernel as a matrix (in, out), or of a bias as a vector (num_in 0)."""
    out = math.prod(shape[num_in:])
    return (math.prod(shape[:num_in]), out) if num_in else (out,)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A second name in the state dict for an array that is mapped already.

    Args:
      name: of the copy.
      of: the name that has the place.
      tied: it is the same array over there: never written, and in files that have it, equal. Else it is
        written, and in files passed over.
    """

    name: str
    of: str
    tied: bool


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of Hugging Face models, and the configuration of ours that it fits.

    Args:
      model_type: in config.json.
      architecture: the class of `transformers` that loads it, in config.json.
      kind: our configuration's class.
      prefix: before all names but those of the head; files of the model without its head lack it.
      heads: beginnings of the names of the head.
      places: configuration -> where everything stands.
      copies: configuration -> second names.
      left_out: beginnings of names that have no place in our model, and are not read.
      read: config.json -> (entries that ours cannot follow, a function that gives the configuration).
      write: configuration -> the entries of config.json.
      foreign: configuration -> options of ours that the family does not have.
    """

    model_type: str
    architecture: str
    kind: type
    prefix: str
    heads: tuple[str, ...]
    places: Callable[[Any], Iterable[Place]]
    copies: Callable[[Any], Iterable[Copy]]
    left_out: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], tuple[list[str], Callable[[], Any]]]
    write: Callable[[Any], dict[str, Any]]
    foreign: Callable[[Any], list[str]]


KERNELS = {
    "attention/q": ((EMBED,), (HEADS, HEAD_DIM)),
    "attention/k": ((EMBED,), (KV_HEADS, HEAD_DIM)),
    "attention/v": ((EMBED,), (KV_HEADS, HEAD_DIM)),
    "attention/o": ((HEADS, HEAD_DIM), (EMBED,)),
    "mlp/up": ((EMBED,), (MLP,)),
    "mlp/gate": ((EMBED,), (MLP,)),
    "mlp/down": ((MLP,), (EMBED,)),
}
"""Path of a linear map in a block -> the dims that it reads and those that it writes."""


def entry_problems(
    config: Mapping[str, Any], needed: Iterable[str], only: Mapping[str, tuple[Any, ...]], ours: str
) -> list[str]:
    """List entries of a config.json that are missing, or have a value that our model has no option for.

    >>> entry_problems({"hidden_act": "relu"}, ["vocab_size"], {"hidden_act": ("gelu", "silu")}, "Decoder")
    ['vocab_size is missing', "hidden_act is 'relu'; Decoder has 'gelu' or 'silu' only"]
    """
    found = [f"{name} is missing" for name in needed if name not in config]
    for name, allowed in only.items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            found.append(f"{name} is {short(value)}; {ours} has {' or '.join(map(repr, allowed))} only")
    return found


SIZES = (
    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "max_position_embeddings",
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "type_vocab_size",
)  # fmt: skip
OPTIONAL = ("n_inner", "num_key_value_heads", "head_dim")
RANGES = {
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps"), (1e-30, 1.0)),
    "rope_theta": (1.0, 1e15),
}
TABLES = ("rope_parameters", "rope_scaling")
MOST_SIZE = 2**31 - 1


def value_problems(config: Mapping[str, Any]) -> list[str]:
    """List entries of a config.json that are of another type, or out of any range.

    >>> value_problems({"n_layer": "9", "n_inner": None, "rms_norm_eps": float("inf"), "rope_scaling": 3})
    ["n_layer is '9'; it is a whole number from 1 to 2147483647", \
'rms_norm_eps is inf; it is a number from 1e-30 to 1', 'rope_scaling is 3; it is an object, or null']
    """
    problems = []
    for name, value in config.items():
        if name in SIZES and not (value is None and name in OPTIONAL):
            problems += problem_of(whole_number, value, name, MOST_SIZE, 1)
        elif name in RANGES:
            least, most = RANGES[name]
            problems += problem_of(finite_number, value, name, most, least)
        elif name == "tie_word_embeddings" and type(value) is not bool:
            problems.append(f"{name} is {short(value)}; it is true or false")
        elif name in TABLES and value is not None:
            known = isinstance(value, Mapping)
            problems += (
                value_problems(value) if known else [f"{name} is {short(value)}; it is an object, or null"]
            )
    return problems


def problem_of(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """Return the message that a check raises as a list; empty if it raises none."""
    try:
        check(*arguments)
    except ValueError as error:
        return [str(error)]
    return []


def option_problems(config: Any, wanted: Mapping[str, tuple[Any, ...]], family: str) -> list[str]:
    """List options of our model that a family does not have."""
    return [
        f"{name} is {getattr(config, name)!r}; {family} has {' or '.join(map(repr, allowed))} only"
        for name, allowed in wanted.items()
        if getattr(config, name) not in allowed
    ]
