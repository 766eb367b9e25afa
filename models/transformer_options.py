"""Options that the transformers share: their allowed values, their sizes, their problems.

`decoder.py`, `encoder.py` and `encoder_decoder.py` have a configuration each. Next: `transformer.py`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, Protocol, get_args

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, SEQ, VOCAB
from shardtrain.models import checks
from shardtrain.models.layers import Attentions, Norms
from shardtrain.models.lora import read_lora

Positions = Literal["learned", "rotary"]
Activations = Literal["gelu", "gelu_erf", "swiglu"]
Remats = Literal["none", "weights", "dots", "outputs", "full"]
Dtypes = Literal["float32", "bfloat16", "float16"]


class BlockOptions(Protocol):
    """The options of a configuration that the parts of a block read; `DecoderConfig` describes them."""

    @property
    def sizes(self) -> Mapping[str, int]: ...

    @property
    def embed(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def positions(self) -> Positions: ...

    @property
    def theta(self) -> float: ...

    @property
    def norm(self) -> Norms: ...

    @property
    def eps(self) -> float: ...

    @property
    def activation(self) -> Activations: ...

    @property
    def bias(self) -> bool: ...

    @property
    def dropout(self) -> float: ...

    @property
    def remat(self) -> Remats: ...

    @property
    def scan(self) -> bool: ...

    @property
    def dtype(self) -> Dtypes: ...

    @property
    def attention(self) -> Attentions: ...

    @property
    def loss_chunk(self) -> int | None: ...

    @property
    def lora(self) -> str: ...


def block_sizes(config: Any) -> dict[str, int]:
    """Return the size of each dim, by name, with the defaults of `DecoderConfig` filled in."""
    return {
        VOCAB: config.vocab,
        SEQ: config.seq,
        EMBED: config.embed,
        HEADS: config.num_heads,
        KV_HEADS: config.num_heads if config.num_kv_heads is None else config.num_kv_heads,
        HEAD_DIM: config.embed // config.num_heads if config.head_dim is None else config.head_dim,
        MLP: 4 * config.embed if config.mlp is None else config.mlp,
    }


def problems(config: Any) -> list[str]:
    """List the problems of a configuration: single values first, then the relations between sizes."""
    counts = {f.name: getattr(config, f.name) for f in fields(config) if f.type in (int, int | None)}
    found = checks.positive({name: value for name, value in counts.items() if value is not None})
    if not found:
        sizes = block_sizes(config)
        found += checks.multiple("num_heads", config.num_heads, "num_kv_heads", sizes[KV_HEADS])
        if config.head_dim is None:
            found += checks.multiple("embed", config.embed, "num_heads", config.num_heads)
        if config.positions == "rotary" and sizes[HEAD_DIM] % 2:
            odd = sizes[HEAD_DIM]
            found.append(f"head_dim is {odd}; rotary positions turn pairs. Use head_dim={odd + 1}.")
    found += checks.positive({"theta": float(config.theta), "eps": float(config.eps)})
    found += checks.dropout_rate("dropout", config.dropout)
    found += _lora_problems(config)
    choices = {f.name: get_args(f.type) for f in fields(config) if get_args(f.type) and f.name not in counts}
    for name, allowed in choices.items():
        found += checks.choice(name, getattr(config, name), allowed)
    return found


def _lora_problems(config: Any) -> list[str]:
    try:
        lora = read_lora(config.lora)
    except ValueError as error:
        return [str(error)]
    if lora is not None and lora.on == ("gate",) and config.activation != "swiglu":
        return [
            f"lora is {config.lora!r}, and a feed-forward with {config.activation} has no gate; use"
            " activation='swiglu', or other projections"
        ]
    return []
