"""Weights of Hugging Face's GPT-2 and Llama families into `Decoder` parameters, and back.

Pure numpy on state dicts (name -> array); reading files is the user's. Each family is a table of places, read
in both directions; every value comes through unchanged. `huggingface_config.py` reads the options.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, SEQ, VOCAB
from shardtrain.models import checks
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface_config import read_config

State = Mapping[str, np.ndarray]
Params = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a parameter of ours stands in a state dict.

    Args:
      path: in our nested dict, joined by "/".
      name: in the state dict; "{}" stands for the number of the layer.
      dims: of our parameter, without layers.
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

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of our parameter, without layers."""
        return tuple(sizes[dim] for dim in self.dims)

    def their_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the whole array that holds it over there."""
        shape = self.shape(sizes)
        if self.path.endswith(("kernel", "bias")):
            shape = (*_matrix(shape, self.num_in)[:-1], _matrix(shape, self.num_in)[-1] * self.num_parts)
        return shape[::-1] if self.transposed else shape

    def ours(self, theirs: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """Our parameter out of the array over there."""
        theirs = theirs.T if self.transposed else theirs
        return np.split(theirs, self.num_parts, axis=-1)[self.part].reshape(self.shape(sizes))

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """Our parameter as its slice of the array over there, untransposed."""
        return (
            ours.reshape(_matrix(ours.shape, self.num_in)) if self.path.endswith(("kernel", "bias")) else ours
        )


def _matrix(shape: tuple[int, ...], num_in: int) -> tuple[int, ...]:
    """The shape of a kernel as a matrix (in, out), or of a bias as a vector (num_in 0)."""
    out = math.prod(shape[num_in:])
    return (math.prod(shape[:num_in]), out) if num_in else (out,)


KERNELS = {
    "attention/q": ((EMBED,), (HEADS, HEAD_DIM)),
    "attention/k": ((EMBED,), (KV_HEADS, HEAD_DIM)),
    "attention/v": ((EMBED,), (KV_HEADS, HEAD_DIM)),
    "attention/o": ((HEADS, HEAD_DIM), (EMBED,)),
    "mlp/up": ((EMBED,), (MLP,)),
    "mlp/gate": ((EMBED,), (MLP,)),
    "mlp/down": ((MLP,), (EMBED,)),
}

GPT2_PREFIX, LLAMA_PREFIX = "transformer.", "model."


def _gpt2_places(config: DecoderConfig) -> Iterator[Place]:
    """GPT-2 keeps matrices as (in, out), and queries, keys and values as one."""
    yield Place(path="embedding", name=f"{GPT2_PREFIX}wte.weight", dims=(VOCAB, EMBED))
    yield Place(path="positions", name=f"{GPT2_PREFIX}wpe.weight", dims=(SEQ, EMBED))
    names = {"attention/o": "attn.c_proj", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    names = {path: (name, 0, 1) for path, name in names.items()}
    names |= {f"attention/{which}": ("attn.c_attn", part, 3) for part, which in enumerate("qkv")}
    for path, (name, part, num_parts) in names.items():
        into, out = KERNELS[path]
        bias = Place(
            path=f"blocks/{path}/bias",
            name=f"{GPT2_PREFIX}h.{{}}.{name}.bias",
            dims=out,
            part=part,
            num_parts=num_parts,
        )
        yield bias
        yield replace(
            bias,
            path=f"blocks/{path}/kernel",
            name=f"{GPT2_PREFIX}h.{{}}.{name}.weight",
            dims=(*into, *out),
            num_in=len(into),
        )
    norms = {"blocks/attention_norm": "h.{}.ln_1", "blocks/mlp_norm": "h.{}.ln_2", "final_norm": "ln_f"}
    for path, name in norms.items():
        yield Place(path=f"{path}/scale", name=f"{GPT2_PREFIX}{name}.weight", dims=(EMBED,))
        yield Place(path=f"{path}/bias", name=f"{GPT2_PREFIX}{name}.bias", dims=(EMBED,))
    yield from _head_places(config)


def _llama_places(config: DecoderConfig) -> Iterator[Place]:
    """Llama keeps matrices as (out, in), without biases."""
    yield Place(path="embedding", name=f"{LLAMA_PREFIX}embed_tokens.weight", dims=(VOCAB, EMBED))
    names = {f"attention/{which}": f"self_attn.{which}_proj" for which in "qkvo"}
    names |= {f"mlp/{which}": f"mlp.{which}_proj" for which in ("up", "gate", "down")}
    for path, name in names.items():
        into, out = KERNELS[path]
        yield Place(
            path=f"blocks/{path}/kernel",
            name=f"{LLAMA_PREFIX}layers.{{}}.{name}.weight",
            dims=(*into, *out),
            num_in=len(into),
            transposed=True,
        )
    norms = {
        "blocks/attention_norm": "layers.{}.input_layernorm",
        "blocks/mlp_norm": "layers.{}.post_attention_layernorm",
        "final_norm": "norm",
    }
    for path, name in norms.items():
        yield Place(path=f"{path}/scale", name=f"{LLAMA_PREFIX}{name}.weight", dims=(EMBED,))
    yield from _head_places(config)


def _head_places(config: DecoderConfig) -> Iterator[Place]:
    if not config.tied:
        yield Place(path="head/kernel", name="lm_head.weight", dims=(EMBED, VOCAB), num_in=1, transposed=True)


FAMILIES = {"gpt2": (GPT2_PREFIX, _gpt2_places), "llama": (LLAMA_PREFIX, _llama_places)}
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Endings of names that older state dicts hold beside the weights."""


def from_huggingface(config: Mapping[str, Any], state: State) -> tuple[DecoderConfig, Params]:
    """Turn a Hugging Face model into a configuration and parameters.

    Args:
      config: the dict of its config.json, with `model_type` "gpt2" or "llama".
      state: its state dict as numpy arrays; GPT-2's names with or without "transformer.".

    Returns:
      The configuration (dropout 0, other options of ours at their defaults: change them with
      `dataclasses.replace`), and a nested dict of arrays with the dtypes of `state`, blocks stacked.

    Raises:
      ValueError: listing every option of `config` that `Decoder` does not have; or every missing, extra and
        misshaped name of `state`.
    """
    family, decoder_config = read_config(config)
    prefix, places = FAMILIES[family]
    tensors = _canonical(state, prefix)
    places = list(places(decoder_config))
    checks.refuse(f"state dict of a {family} model", _state_problems(places, decoder_config, tensors))
    params: Params = {}
    for place in places:
        arrays = [place.ours(tensors[name], decoder_config.sizes) for name in _names(place, decoder_config)]
        _put(params, place.path, np.stack(arrays) if "{}" in place.name else np.ascontiguousarray(arrays[0]))
    return decoder_config, params


def to_huggingface(config: DecoderConfig, params: Params) -> dict[str, np.ndarray]:
    """Turn parameters of a decoder into a Hugging Face state dict (GPT-2 if its positions are learned, else
    Llama).

    Args:
      config: of the decoder.
      params: nested dict of arrays, blocks stacked.

    Returns:
      name -> array with the dtypes of `params`. A tied head is written once, as the embedding.

    Raises:
      ValueError: listing every option that neither family has; or every missing, extra and misshaped
        parameter.
    """
    family = "gpt2" if config.positions == "learned" else "llama"
    checks.refuse(f"DecoderConfig written as a {family} model", _foreign(family, config))
    places = list(FAMILIES[family][1](config))
    flat = dict(_flat(params))
    checks.refuse("params", _param_problems(places, config, flat))
    slices: dict[str, list[np.ndarray]] = {}
    transposed = {}
    for place in sorted(places, key=lambda place: place.part):
        array = np.asarray(flat[place.path])
        names = _names(place, config)
        for name, layer in zip(names, array if "{}" in place.name else [array], strict=True):
            slices.setdefault(name, []).append(place.theirs(layer))
            transposed[name] = place.transposed
    joined = {name: np.concatenate(parts, axis=-1) for name, parts in slices.items()}
    return {name: np.ascontiguousarray(x.T if transposed[name] else x) for name, x in joined.items()}


def _names(place: Place, config: DecoderConfig) -> list[str]:
    return [place.name.format(i) for i in range(config.num_layers)] if "{}" in place.name else [place.name]


def _canonical(state: State, prefix: str) -> dict[str, np.ndarray]:
    """The state dict with its family's prefix on every name, without buffers."""
    is_bare = not any(name.startswith(prefix) for name in state)
    return {
        (prefix + name if is_bare and name != "lm_head.weight" else name): np.asarray(array)
        for name, array in state.items()
        if not name.endswith(BUFFERS)
    }


def _state_problems(places: list[Place], config: DecoderConfig, tensors: dict[str, np.ndarray]) -> list[str]:
    shapes = {name: place.their_shape(config.sizes) for place in places for name in _names(place, config)}
    given = dict(tensors)
    found = []
    if config.tied and "lm_head.weight" in given:
        embedding = given.get(places[0].name)
        if not np.array_equal(given.pop("lm_head.weight"), np.asarray(embedding)):
            found = [
                "lm_head.weight differs from the embedding. Set tie_word_embeddings to false in the config."
            ]
    return found + _differences(shapes, {name: array.shape for name, array in given.items()})


def _param_problems(places: list[Place], config: DecoderConfig, flat: dict[str, Any]) -> list[str]:
    shapes = {
        place.path: (config.num_layers,) * ("{}" in place.name) + place.shape(config.sizes)
        for place in places
    }
    return _differences(shapes, {path: np.shape(array) for path, array in flat.items()})


def _differences(wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Every missing, extra and misshaped name.

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


def _foreign(family: str, config: DecoderConfig) -> list[str]:
    """Options of ours that a family does not have."""
    gpt2 = {"norm": "layernorm", "activation": "gelu", "bias": True}
    llama = {"norm": "rmsnorm", "activation": "swiglu", "bias": False}
    wanted = gpt2 if family == "gpt2" else llama
    found = [
        f"{name} is {getattr(config, name)!r}; {family} has {value!r} only"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
    size = config.sizes
    if family == "gpt2" and size[KV_HEADS] != size[HEADS]:
        found.append(f"num_kv_heads is {size[KV_HEADS]}; gpt2 has as many as query heads, {size[HEADS]}")
    if family == "gpt2" and size[HEADS] * size[HEAD_DIM] != size[EMBED]:
        found.append(f"head_dim is {size[HEAD_DIM]}; gpt2 has embed // num_heads only")
    return found
