"""Options that the transformers share: their allowed values, their sizes, their problems.

`decoder.py`, `encoder.py` and `encoder_decoder.py` have a configuration each. Next: `transformer.py`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, Protocol, get_args, get_origin

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, SEQ, VOCAB
from shardtrain.models import checks
from shardtrain.models.attention import Attentions
from shardtrain.models.experts_options import read_experts
from shardtrain.models.float8 import Products
from shardtrain.models.layers import Norms
from shardtrain.models.lora import read_lora
from shardtrain.models.rotary import read_scaling, scaling_fits

Positions = Literal["learned", "rotary"]
Activations = Literal["gelu", "gelu_erf", "relu", "swiglu", "geglu"]
GATED = ("swiglu", "geglu")
Remats = Literal["none", "weights", "dots", "outputs", "full", "offload"]
Dtypes = Literal["float32", "bfloat16", "float16"]

RARE = (
    *("head_dim", "theta", "rope_scaling", "rotary_dims", "eps", "query_scale", "head_scale", "embed_scale"),
    *("post_norm", "only_post_norm", "parallel", "qk_norm", "qk_norm_joint", "window_theta", "full_every"),
    *("attention_bias", "qkv_bias", "norm_bias", "soft_cap", "logits_soft_cap", "tied", "scan"),
    *("positions", "norm", "bias", "activation", "relative_buckets", "relative_distance"),
)
"""Options that differ between families of models: a run file sets them, not the command line."""


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
    def rope_scaling(self) -> str: ...

    @property
    def rotary_dims(self) -> int | None: ...

    @property
    def post_norm(self) -> bool: ...

    @property
    def only_post_norm(self) -> bool: ...

    @property
    def parallel(self) -> bool: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def qk_norm_joint(self) -> bool: ...

    @property
    def attention_bias(self) -> bool | None: ...

    @property
    def qkv_bias(self) -> bool | None: ...

    @property
    def norm_bias(self) -> bool | None: ...

    @property
    def query_scale(self) -> float | None: ...

    @property
    def soft_cap(self) -> float | None: ...

    @property
    def logits_soft_cap(self) -> float | None: ...

    @property
    def window(self) -> int | None: ...

    @property
    def window_theta(self) -> float | None: ...

    @property
    def loss_chunk(self) -> int | None: ...

    @property
    def lora(self) -> str: ...

    @property
    def products(self) -> Products: ...


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


BIASES = {
    "qkv_bias": ("qkv_bias", "attention_bias", "bias"),
    "attention_bias": ("attention_bias", "bias"),
    "norm_bias": ("norm_bias", "bias"),
    "bias": ("bias",),
}
"""Option of biases -> the options of which the first that is not None says whether there are biases."""


def has_bias(config: Any, option: str) -> bool:
    """Return whether the parts of a block that an option of `BIASES` is about have biases."""
    return next(value for name in BIASES[option] if (value := getattr(config, name)) is not None)


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
    found += _lora_problems(config) + _experts_problems(config)
    choices = {f.name: get_args(f.type) for f in fields(config) if get_origin(f.type) is Literal}
    for name, allowed in choices.items():
        found += checks.choice(name, getattr(config, name), allowed)
    return found


def _lora_problems(config: Any) -> list[str]:
    try:
        lora = read_lora(config.lora)
    except ValueError as error:
        return [str(error)]
    if lora is not None and lora.on == ("gate",) and config.activation not in GATED:
        return [
            f"lora is {config.lora!r}, and a feed-forward with {config.activation} has no gate; use"
            " activation='swiglu', or other projections"
        ]
    return []


def _experts_problems(config: Any) -> list[str]:
    try:
        experts = read_experts(getattr(config, "experts", ""))
        lora = read_lora(config.lora)
    except ValueError as error:
        return [str(error)] if str(error).startswith("experts") else []
    if experts and not experts.shared and lora and not set(lora.on) - {"up", "gate", "down"}:
        return [f"lora is {config.lora!r}, and experts have no adapters; use on=q+v, of attention"]
    return []


def decoder_problems(config: Any) -> list[str]:
    """List the problems of the options that only a `DecoderConfig` has."""
    names = ("query_scale", "soft_cap", "logits_soft_cap", "embed_scale", "window_theta")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    found = checks.positive({name: float(value) for name, value in given.items()})
    rotary = {name: getattr(config, name) for name in ("rope_scaling", "rotary_dims", "window_theta")}
    if config.positions != "rotary":
        found += [f"{name} is {x!r}; it needs positions='rotary'" for name, x in rotary.items() if x]
    head_dim = block_sizes(config)[HEAD_DIM] if config.num_heads > 0 else 0
    try:
        scaling = read_scaling(config.rope_scaling)
        if scaling is not None and scaling.kind == "yarn" and config.theta <= 1:
            found.append(f"theta is {config.theta}; yarn needs it above 1. Use theta=10000.")
        if scaling is not None and head_dim:
            found += scaling_fits(scaling, config.rotary_dims or head_dim)
    except ValueError as error:
        found.append(str(error))
    if (rotated := config.rotary_dims) and (rotated % 2 or rotated > head_dim):
        allowed = f"it is even and at most head_dim, {head_dim}"
        use = f"rotary_dims={min(rotated + rotated % 2, head_dim - head_dim % 2)}"
        found.append(f"rotary_dims is {rotated}; {allowed}. Use {use}.")
    if config.window is None:
        needing = [name for name in ("full_every", "window_theta") if getattr(config, name) is not None]
        found += [f"{name} is {getattr(config, name)}; it needs a window" for name in needing]
    if config.experts and config.activation in ("geglu", "relu"):
        found.append(f"experts have gelu or swiglu, not {config.activation!r}. Use activation='swiglu'.")
    if config.experts and config.products:
        found.append(f"experts compute in dtype, and products is {config.products!r}. Leave out one of them.")
    if config.full_every == 1:
        found.append("full_every is 1, so that no block has the window; use 2 or more, or window=None")
    needs = {"only_post_norm": "post_norm", "qk_norm_joint": "qk_norm"}
    found += [
        f"{name} is True; it needs {other}=True"
        for name, other in needs.items()
        if getattr(config, name) and not getattr(config, other)
    ]
    if config.qk_norm and config.norm == "layernorm":
        found.append("qk_norm needs norm='rmsnorm' or 'rmsnorm_plus_one', and norm is 'layernorm'")
    if config.attention == "cudnn":
        lacking = [name for name in ("soft_cap", "full_every") if getattr(config, name) is not None]
        found += [f"attention 'cudnn' has no {name}; use attention='auto' or 'xla'" for name in lacking]
    return found


def encoder_decoder_problems(config: Any) -> list[str]:
    """List the problems of the options that only an `EncoderDecoderConfig` has."""
    names = ("query_scale", "head_scale")
    found = checks.positive({n: float(x) for n in names if (x := getattr(config, n)) is not None})
    buckets, furthest = config.distances
    if config.positions != "relative" or buckets < 1 or furthest < 1:
        return found
    if buckets % 4:
        use = max(4, buckets - buckets % 4)
        found.append(f"relative_buckets is {buckets}; it is a multiple of 4. Use relative_buckets={use}.")
    if furthest <= buckets // 2:
        found.append(
            f"relative_distance is {furthest}; it is above half of relative_buckets,"
            f" {buckets}. Use relative_distance={buckets // 2 + 1} or more."
        )
    if config.attention == "cudnn":
        found.append("attention 'cudnn' has no relative positions; use attention='auto' or 'xla'")
    return found
