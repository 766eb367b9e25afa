"""The mapping between parameters of this package and a Hugging Face state dict, as a table for each family.

Each family is a table of places, read in both directions, and two functions for its config.json; they stand
in `gpt2.py`, `gpt_neox.py`, `llama.py`, `relatives.py`, `bert.py`, `vit.py`, `resnet.py` and `t5.py`. Next:
`families.py`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP
from shardtrain.models.transformer_options import has_bias
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import finite_number, whole_number

STATE = "model_state/"
"""Beginning of the paths of running statistics; those of parameters have none."""


def num_blocks(config: Any) -> int:
    """Return the number of blocks of a model, whether they are stacked or not."""
    return config.num_layers if hasattr(config, "num_layers") else config.num_blocks


FLAT = ("kernel", "bias", "q_norm/scale", "k_norm/scale")
"""Endings of the paths of parameters whose dims are fewer over there."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The mapping of one parameter of this package to arrays of a state dict.

    Args:
      path: in our nested dict, joined by "/"; below `STATE` what changes without being trained.
      name: in the state dict; "{}" stands for the number of the layer, a second one for that of the expert.
      dims: what its sizes are, without layers and experts: names of dims, or numbers.
      num_in: how many of the dims a linear map contracts; their product is one dim over there.
      transposed: whether the matrix over there is (out, in).
      part: which slice of the last dim it is.
      parts: the dims that each slice writes, of queries, keys and values in one matrix; empty: it is all.
      by_head: whether these slices are of each head, one head after the other, in place of all heads.
      num_ones: dims of size 1 over there, before all others.
      num_experts: how many arrays of each layer are stacked behind the layers; 0: one, which is not stacked.
      is_window: whether it is a kernel of a convolution with a square window: over there (out, in, height,
        width), here (height, width, in, out), or (height, width * in, out).
    """

    path: str
    name: str
    dims: tuple[str | int, ...]
    num_in: int = 0
    transposed: bool = False
    part: int = 0
    parts: tuple[tuple[str, ...], ...] = ()
    by_head: bool = False
    num_ones: int = 0
    num_experts: int = 0
    is_window: bool = False

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter has all layers stacked along a first dim."""
        return "{}" in self.name

    def names(self, num_layers: int) -> list[str]:
        """The names in the state dict, one for each layer, or for each expert of each layer."""
        return [self.name.format(*numbers) for numbers in np.ndindex(*self.stack(num_layers))]

    def stack(self, num_layers: int) -> tuple[int, ...]:
        """The sizes along which arrays of the state dict are stacked: of layers, and of experts."""
        return ((num_layers, self.num_experts) if self.num_experts else (num_layers,)) * self.is_stacked

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the parameter, without layers and experts."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole array in the state dict."""
        shape = self.shape(sizes)
        if self.is_window:
            height, *rest, out = shape
            return (out, math.prod(rest) // height, height, height)
        if self.path.endswith(FLAT):
            matrix = _matrix(shape, self.num_in)
            shape = (*matrix[:-1], sum(self._widths(sizes)) or matrix[-1])
        return (1,) * self.num_ones + (shape[::-1] if self.transposed else shape)

    def ours(self, theirs: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Return the parameter of one layer, or expert, from the array of the state dict."""
        if self.is_window:
            return theirs.transpose(2, 3, 1, 0).reshape(self.shape(sizes))
        theirs = theirs.T if self.transposed else theirs
        if self.by_head:
            heads, head_dim = (sizes[dim] for dim in self.parts[0])
            by_head = theirs.reshape(*theirs.shape[:-1], heads, len(self.parts), head_dim)
            return by_head[..., self.part, :].reshape(self.shape(sizes))
        ends = np.cumsum(self._widths(sizes))[:-1]
        return np.split(theirs, ends, axis=-1)[self.part].reshape(self.shape(sizes))

    def joined(self, slices: list[np.ndarray], sizes: Mapping[str, int]) -> np.ndarray:
        """Return their array, untransposed, of the slices that the places of it gave."""
        if len(slices) == 1:
            return slices[0]
        if not self.by_head:
            return np.concatenate(slices, axis=-1)
        heads, head_dim = (sizes[dim] for dim in self.parts[0])
        each = [x.reshape(*x.shape[:-1], heads, head_dim) for x in slices]
        return np.stack(each, axis=-2).reshape(*slices[0].shape[:-1], -1)

    def _widths(self, sizes: Mapping[str, int]) -> list[int]:
        """The size of each slice of the last dim."""
        return [math.prod(sizes[dim] for dim in dims) for dims in self.parts]

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """Return the parameter of one layer, or expert, as its slice of their array, untransposed."""
        if self.is_window:
            height, out = ours.shape[0], ours.shape[-1]
            return ours.reshape(height, height, -1, out).transpose(3, 2, 0, 1)
        if self.path.endswith(FLAT):
            return ours.reshape(_matrix(ours.shape, self.num_in))
        return ours.reshape((1,) * self.num_ones + ours.shape)


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
      aliases: pairs of a part of a name in newer or older state dicts, and what it is in files.
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
    aliases: tuple[tuple[str, str], ...] = ()
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
    "head_dim", "type_vocab_size", "sliding_window", "sliding_window_pattern", "max_window_layers",
    "original_max_position_embeddings", "image_size", "patch_size", "num_channels", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "embedding_size", "image_height", "image_width",
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
    "relative_attention_num_buckets", "relative_attention_max_distance",
)  # fmt: skip
OPTIONAL = (
    "n_inner", "attention_bias", "mlp_bias", "use_bias", "qkv_bias",
    "num_key_value_heads", "num_decoder_layers", "head_dim", "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
RANGES = {
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "norm_epsilon"), (1e-30, 1.0)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base", "factor"), (1.0, 1e15)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (1e-6, 1e15)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), (1e-6, 1e15)),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "query_pre_attn_scalar"), (1e-6, 1e15)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1e-6, 1.0)),
}
FACTORS = ("short_factor", "long_factor")
SWITCHES = (
    "tie_word_embeddings", "norm_topk_prob", "scale_decoder_outputs", "use_parallel_residual",
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias",
)  # fmt: skip
TABLES = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
MOST_SIZE = 2**31 - 1


def value_problems(config: Mapping[str, Any]) -> list[str]:
    """List entries of a config.json that are of another type, or out of any range.

    >>> value_problems({"n_layer": "9", "n_inner": None, "rms_norm_eps": float("inf"), "rope_scaling": 3})
    ["n_layer is '9'; it is a whole number from 1 to 2147483647", \
'rms_norm_eps is inf; it is a number from 1e-30 to 1', 'rope_scaling is 3; it is an object, or null']
    """
    problems = []
    for name, value in config.items():
        if value is None and name in OPTIONAL:
            continue
        if name in SIZES:
            # where transformers writes no window as 0
            least = 0 if name == "sliding_window" else 1
            problems += problem_of(whole_number, value, name, MOST_SIZE, least)
        elif name in RANGES:
            least, most = RANGES[name]
            problems += problem_of(finite_number, value, name, most, least)
        elif name in FACTORS:
            numbers = value if isinstance(value, list) else []
            if not numbers or any(problem_of(finite_number, x, name, 1e15, 1e-6) for x in numbers):
                problems.append(f"{name} is {short(value)}; it is a list of numbers from 1e-6 to 1e15")
        elif name in SWITCHES and type(value) is not bool:
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


def norm_bias_problems(config: Any, family: str) -> list[str]:
    """Return the problem of layer norms without biases, which a family does not have."""
    if has_bias(config, "norm_bias"):
        return []
    return [f"norm_bias is {config.norm_bias!r}; the layer norms of {family} have biases, use True"]


def option_problems(config: Any, wanted: Mapping[str, tuple[Any, ...]], family: str) -> list[str]:
    """List options of our model that a family does not have."""
    return [
        f"{name} is {getattr(config, name)!r}; {family} has {' or '.join(map(repr, allowed))} only"
        for name, allowed in wanted.items()
        if getattr(config, name) not in allowed
    ]
