"""Map parameters and configurations of this package to those of Hugging Face, in both directions.

A `Family` describes both mappings: `decoder_families.py`, `mixture_families.py`, `encoder_families.py`,
`t5.py` and `resnet.py` list them. Next: `families.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import numpy as np

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB
from shardtrain.errors.messages import refuse
from shardtrain.models.huggingface.entries import entry_problems
from shardtrain.models.transformer_options import has_bias

STATE = "model_state/"
"""Prefix of the paths of running statistics; paths of parameters have no prefix."""


def num_blocks(config: Any) -> int:
    """Return the number of blocks of a model, stacked or not."""
    return config.num_layers if hasattr(config, "num_layers") else config.num_blocks


FLAT = ("kernel", "bias", "q_norm/scale", "k_norm/scale")
"""Endings of the paths of parameters that have fewer dims in the state dict."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The mapping of one parameter of this package to arrays of a state dict.

    Args:
      path: path in our nested dict, joined by "/"; below `STATE` for running statistics.
      name: name in the state dict; "{}" stands for the number of the layer, a second "{}" for the expert.
      dims: names of dims, or sizes, without layers and experts.
      num_in: number of dims that a linear map contracts; in the state dict they are one dim.
      transposed: whether the matrix in the state dict is (out, in).
      part: the number of the slice, if the array has several parameters in its last dim.
      parts: the output dims of each slice, such as queries, keys and values in one matrix; empty without
        slices.
      by_head: whether each head has all slices, head after head; otherwise each slice has all heads.
      num_ones: number of leading dims of size 1 in the state dict.
      num_experts: number of arrays of each layer, stacked after the layers; 0 means one that is not stacked.
      is_window: whether this is a kernel of a convolution with a square window: (out, in, height, width) in
        the state dict, here (height, width, in, out) or (height, width * in, out).
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
        """Return the names in the state dict, one for each layer, or for each expert of each layer."""
        return [self.name.format(*numbers) for numbers in np.ndindex(*self.stack(num_layers))]

    def stack(self, num_layers: int) -> tuple[int, ...]:
        """Return the sizes along which arrays of the state dict are stacked: layers, and experts."""
        return ((num_layers, self.num_experts) if self.num_experts else (num_layers,)) * self.is_stacked

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the parameter, without layers and experts."""
        return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in self.dims)

    def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the whole array in the state dict."""
        shape = self.shape(sizes)
        if self.is_window:
            height, *rest, out = shape
            return (out, math.prod(rest) // height, height, height)
        if self.path.endswith(FLAT):
            matrix = _flatten_shape(shape, self.num_in)
            shape = (*matrix[:-1], sum(self._widths(sizes)) or matrix[-1])
        return (1,) * self.num_ones + (shape[::-1] if self.transposed else shape)

    def convert_to_ours(self, theirs: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Convert an array of the state dict to the parameter of one layer, or expert."""
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
        """Join slices from `convert_to_theirs` to the array of the state dict, untransposed."""
        if len(slices) == 1:
            return slices[0]
        if not self.by_head:
            return np.concatenate(slices, axis=-1)
        heads, head_dim = (sizes[dim] for dim in self.parts[0])
        each = [x.reshape(*x.shape[:-1], heads, head_dim) for x in slices]
        return np.stack(each, axis=-2).reshape(*slices[0].shape[:-1], -1)

    def _widths(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the size of each slice of the last dim."""
        return [math.prod(sizes[dim] for dim in dims) for dims in self.parts]

    def convert_to_theirs(self, ours: np.ndarray) -> np.ndarray:
        """Convert the parameter of one layer, or expert, to its slice of the state dict, untransposed."""
        if self.is_window:
            height, out = ours.shape[0], ours.shape[-1]
            return ours.reshape(height, height, -1, out).transpose(3, 2, 0, 1)
        if self.path.endswith(FLAT):
            return ours.reshape(_flatten_shape(ours.shape, self.num_in))
        return ours.reshape((1,) * self.num_ones + ours.shape)


def _flatten_shape(shape: tuple[int, ...], num_in: int) -> tuple[int, ...]:
    """Return the shape of a kernel as a matrix (in, out), or of a bias as a vector (num_in 0)."""
    out = math.prod(shape[num_in:])
    return (math.prod(shape[:num_in]), out) if num_in else (out,)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A second name in the state dict for an array that is mapped already.

    Args:
      name: the name of the copy.
      of: the name of the mapped array.
      tied: whether both are the same array: the copy is not written, and must be equal if files have it.
        Otherwise the copy is written, and ignored when files are read.
    """

    name: str
    of: str
    tied: bool


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of Hugging Face models, and the class of our configurations that it maps to.

    Args:
      model_type: the entry of config.json that names the family.
      architecture: the class of `transformers` that loads the model, for config.json.
      kind: the class of our configurations.
      prefix: prefix of all names except the head's; files of a model without its head lack it.
      heads: prefixes of the names of the head.
      places: configuration -> places of all parameters.
      copies: configuration -> second names.
      left_out: prefixes of names that our model does not have, and that are not read.
      aliases: pairs of a part of a name in newer or older state dicts, and its name in files.
      entries: our option -> the entry of config.json with the same value.
      needed: other entries that must be present.
      defaults: entry -> its default; entries of `entries` without a default must be present.
      activations: value of the entry of the activation -> our activation; the first is the default, and the
        first that fits is written.
      activation: the entry of the activation.
      biases: switch in config.json -> the option of `BIASES` that it sets.
      fixed: our options that have this value in the whole family.
      chosen: options that may have any value, in addition to those of `entries` and `biases`.
      only: entry -> the values that our model supports.
      constant: entries that are always written, and not read.
      read: config.json with its defaults -> more options.
      write: configuration -> more entries.
      problems: config.json with its defaults -> more problems.
      foreign: (configuration, model_type) -> more options that the family does not have.
    """

    model_type: str
    architecture: str
    kind: type
    prefix: str
    heads: tuple[str, ...]
    places: Callable[[Any], Iterable[Place]]
    copies: Callable[[Any], Iterable[Copy]] = lambda config: ()
    left_out: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    entries: Mapping[str, str]
    needed: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    activation: str = "hidden_act"
    biases: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    chosen: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    constant: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    problems: Callable[[Mapping[str, Any]], list[str]] = lambda config: []
    foreign: Callable[[Any, str], list[str]] = lambda config, model_type: []

    def read_config(self, config: Mapping[str, Any]) -> Any:
        """Convert a config.json to our configuration.

        Raises:
          ValueError: lists every entry that is missing or that our model does not support.
        """
        config = {**self.defaults, **config}
        needed = [each for each in (*self.entries.values(), *self.needed) if each not in self.defaults]
        only = {**({self.activation: tuple(self.activations)} if self.activations else {}), **self.only}
        found = entry_problems(config, needed, only, self.kind.__name__.removesuffix("Config"))
        refuse("Hugging Face config", found + self.problems(config))
        options = {option: config[entry] for option, entry in self.entries.items()}
        if self.activations:
            given = config.get(self.activation, next(iter(self.activations)))
            options["activation"] = self.activations[given]
        biases = {option: bool(config.get(entry)) for entry, option in self.biases.items()}
        # None if it equals `bias`
        bias = biases.get("bias", self.fixed.get("bias"))
        biases = {name: None if name != "bias" and x == bias else x for name, x in biases.items()}
        return self.kind(**{**options, **self.fixed, **biases, **self.read(config)})

    def write_config(self, config: Any) -> dict[str, Any]:
        """Convert our configuration to a config.json; `list_foreign` must have found nothing."""
        about = {"model_type": self.model_type, "architectures": [self.architecture], **self.constant}
        for option, entry in self.entries.items():
            size = SIZES_OF_OPTIONS.get(option)
            about[entry] = getattr(config, option) if size is None else config.sizes[size]
        if self.activations:
            about[self.activation] = next(
                x for x, ours in self.activations.items() if ours == config.activation
            )
        about |= {entry: has_bias(config, option) for entry, option in self.biases.items()}
        return about | self.write(config)

    def list_foreign(self, config: Any) -> list[str]:
        """List options of our configuration that the family does not have."""
        chosen = {*self.entries, *OF_TRAINING, *self.chosen, *self.biases.values()} - self.fixed.keys()
        defaults = {f.name: f.default for f in fields(self.kind) if f.default is not MISSING}
        wanted = {name: (x,) for name, x in {**defaults, **self.fixed}.items() if name not in chosen}
        if self.activations:
            wanted["activation"] = tuple(dict.fromkeys(self.activations.values()))
        return option_problems(config, wanted, self.model_type) + self.foreign(config, self.model_type)


OF_TRAINING = ("dropout", "remat", "scan", "dtype", "attention", "loss_chunk", "lora", "products")
"""Options that are not part of a pretrained model."""

SIZES_OF_OPTIONS = {"mlp": MLP, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
"""Option that may be None -> the dim whose size is written then."""

BLOCK_ENTRIES = {
    "embed": "hidden_size",
    "mlp": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
TOKEN_ENTRIES = {"vocab": "vocab_size", "seq": "max_position_embeddings", **BLOCK_ENTRIES}
"""The `Family.entries` that most families have."""

KERNELS = {
    "q": ((EMBED,), (HEADS, HEAD_DIM)),
    "k": ((EMBED,), (KV_HEADS, HEAD_DIM)),
    "v": ((EMBED,), (KV_HEADS, HEAD_DIM)),
    "o": ((HEADS, HEAD_DIM), (EMBED,)),
    "up": ((EMBED,), (MLP,)),
    "gate": ((EMBED,), (MLP,)),
    "down": ((MLP,), (EMBED,)),
    "head": ((EMBED,), (VOCAB,)),
    "transform": ((EMBED,), (EMBED,)),
}
"""Name of a linear map -> its input dims and its output dims."""


def place_linear(path: str, name: str, *, bias: bool = True, **layout: Any) -> Iterator[Place]:
    """List the places of a linear map of `KERNELS`: its kernel, by default (out, in), and its bias."""
    into, out = KERNELS[path.rpartition("/")[2]]
    layout = {"transposed": True, **layout}
    yield Place(path=f"{path}/kernel", name=f"{name}.weight", dims=(*into, *out), num_in=len(into), **layout)
    if bias:
        yield Place(path=f"{path}/bias", name=f"{name}.bias", dims=out, **layout)


def place_norm(
    path: str, name: str, *, bias: bool = True, dims: tuple[str | int, ...] = (EMBED,)
) -> Iterator[Place]:
    """List the places of a norm: its scale, and its bias."""
    yield Place(path=f"{path}/scale", name=f"{name}.weight", dims=dims)
    if bias:
        yield Place(path=f"{path}/bias", name=f"{name}.bias", dims=dims)


def option_problems(config: Any, wanted: Mapping[str, tuple[Any, ...]], family: str) -> list[str]:
    """List options of our model with values that a family does not have."""
    return [
        f"{name} is {getattr(config, name)!r}; {family} has {' or '.join(map(repr, allowed))} only"
        for name, allowed in wanted.items()
        if getattr(config, name) not in allowed
    ]
