"""Map decoders to files of Hugging Face: names of arrays, and what most families share.

`decoder_families.py` and `mixture_families.py` list the families; `rope.py` has the entries about positions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, SEQ, VOCAB
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.entries import entry_problems
from shardtrain.models.huggingface.place import (
    KERNELS,
    TOKEN_ENTRIES,
    Copy,
    Family,
    Place,
    option_problems,
    place_linear,
    place_norm,
)
from shardtrain.models.huggingface.rope import read_rope, read_scaling, rope_entries, scaling_problems
from shardtrain.models.transformer_options import has_bias

Json = Mapping[str, Any]

ATTENTION = {f"attention/{which}": f"self_attn.{which}_proj" for which in "qkvo"}
GATED_MLP = {f"mlp/{which}": f"mlp.{which}_proj" for which in ("up", "gate", "down")}
PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
QK_NORMS = {f"attention/{which}_norm": f"self_attn.{which}_norm" for which in "qk"}
WINDOW = {"window": "sliding_window"}
ATTENTION_BIAS = {"attention_bias": "attention_bias"}
NO_WINDOWS: dict[str, Any] = {
    "only": {"use_sliding_window": (False,)},
    "write": lambda config: {"use_sliding_window": False},
}


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of the arrays of a family of decoders.

    Args:
      prefix: prefix of all names except the head's.
      embedding: the table of tokens.
      positions: the table of positions; empty if there is none.
      layer: beginning of the names in a layer.
      maps: path of a linear map in a block -> its name. Maps with the same name are slices of one array, in
        this order.
      norms: path of a norm in a block -> its name.
      final_norm: the norm before the head.
      head: the head; if it is tied, a second name of the table of tokens.
      transposed: whether matrices are (out, in).
      by_head: whether maps with the same name are sliced within each head.
      experts: the mixture of experts; `expert_maps` names its maps.
      expert_maps: map of an expert -> its name.
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = ""
    layer: str = "layers.{}."
    maps: Mapping[str, str] = field(default_factory=lambda: {**ATTENTION, **GATED_MLP})
    norms: Mapping[str, str] = field(default_factory=lambda: PRE_NORMS)
    final_norm: str = "norm"
    head: str = "lm_head.weight"
    transposed: bool = True
    by_head: bool = False
    experts: str = "mlp"
    expert_maps: Mapping[str, str] = field(
        default_factory=lambda: {w: f"{w}_proj" for w in ("up", "gate", "down")}
    )


QK_NORMED = Names(norms={**PRE_NORMS, **QK_NORMS})


def list_places(names: Names, config: DecoderConfig) -> Iterator[Place]:
    """List the places of a decoder."""
    yield Place(path="embedding", name=f"{names.prefix}{names.embedding}.weight", dims=(VOCAB, EMBED))
    if names.positions:
        yield Place(path="positions", name=f"{names.prefix}{names.positions}.weight", dims=(SEQ, EMBED))
    layer = f"{names.prefix}{names.layer}"
    for path, name in names.maps.items():
        half, _, which = path.partition("/")
        if half == "mlp" and config.experts:
            continue
        joined = [each for each, other in names.maps.items() if other == name]
        slices = {}
        if len(joined) > 1:
            parts = tuple(KERNELS[each.rpartition("/")[2]][1] for each in joined)
            slices = {"part": joined.index(path), "parts": parts, "by_head": names.by_head}
        option = "qkv_bias" if which in ("q", "k", "v") else "attention_bias" if which == "o" else "bias"
        bias = has_bias(config, option)
        yield from place_linear(
            f"blocks/{path}", layer + name, bias=bias, transposed=names.transposed, **slices
        )
    if config.experts:
        yield from _list_expert_places(names, config, layer)
    bias = config.norm == "layernorm" and has_bias(config, "norm_bias")
    for path, name in names.norms.items():
        dims = {"attention/q_norm": (HEADS, HEAD_DIM), "attention/k_norm": (KV_HEADS, HEAD_DIM)}.get(path)
        dims = (EMBED,) if dims is None else dims if config.qk_norm_joint else dims[1:]
        yield from place_norm(f"blocks/{path}", layer + name, bias=bias, dims=dims)
    yield from place_norm("final_norm", names.prefix + names.final_norm, bias=bias)
    if not config.tied:
        yield from place_linear("head", names.head.removesuffix(".weight"), bias=False)


def _list_expert_places(names: Names, config: DecoderConfig, layer: str) -> Iterator[Place]:
    """List the places of a mixture of experts; in files each expert has its own arrays, (out, in)."""
    options = config.experts
    assert options is not None
    block, path = f"{layer}{names.experts}", "blocks/mlp"
    dims = (EMBED, options.num)
    yield Place(path=f"{path}/router", name=f"{block}.gate.weight", dims=dims, transposed=True)
    for which, name in names.expert_maps.items():
        dims = (MLP, EMBED) if which == "down" else (EMBED, MLP)
        each = f"{block}.experts.{{}}.{name}.weight"
        yield Place(path=f"{path}/{which}", name=each, dims=dims, transposed=True, num_experts=options.num)
    wide = options.shared * config.sizes[MLP]
    for which in ("up", "gate", "down") if wide else ():
        dims = (wide, EMBED) if which == "down" else (EMBED, wide)
        name = f"{block}.shared_expert.{which}_proj.weight"
        yield Place(path=f"{path}/shared/{which}/kernel", name=name, dims=dims, num_in=1, transposed=True)
    if options.shared_gate != "none":
        name = f"{block}.shared_expert_gate.weight"
        yield Place(path=f"{path}/shared_gate", name=name, dims=(EMBED,), num_ones=1)


def _list_copies(names: Names, config: DecoderConfig) -> Iterator[Copy]:
    """List the second name of a tied head."""
    if config.tied:
        yield Copy(name=names.head, of=f"{names.prefix}{names.embedding}.weight", tied=True)


def make_family(model_type: str, architecture: str, names: Names, **differences: Any) -> Family:
    """Make a family of decoders with these names of arrays; see `Family` for the other arguments."""
    return Family(
        model_type=model_type,
        architecture=architecture,
        kind=DecoderConfig,
        prefix=names.prefix,
        heads=(names.head.partition(".")[0] + ".",),
        places=partial(list_places, names),
        copies=partial(_list_copies, names),
        **differences,
    )


LIKE_LLAMA = {"positions": "rotary", "norm": "rmsnorm", "bias": False}
SILU = {"silu": "swiglu", "swish": "swiglu"}


def make_llama_relative(
    model_type: str,
    architecture: str,
    names: Names = Names(),
    *,
    eps: str = "rms_norm_eps",
    fixed: Json = LIKE_LLAMA,
    chosen: tuple[str, ...] = (),
    activations: Mapping[str, str] = SILU,
    entries: Mapping[str, str] | None = None,
    defaults: Json | None = None,
    read: Callable[[Json], dict[str, Any]] = lambda config: {},
    write: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {},
    problems: Callable[[Json], list[str]] = lambda config: [],
    **differences: Any,
) -> Family:
    """Make a family with the entries of Llama and rotary positions; the arguments say how it differs.

    Args:
      eps: the entry of the option `eps`.
      entries: more options -> entries, in addition to Llama's.
      model_type, architecture, names, fixed, chosen, activations, defaults, read, write, problems,
      differences:
        see `make_family` and `Family`.
    """

    def read_all(config: Json) -> dict[str, Any]:
        rope = _rope_of_full_blocks(config)
        theta = float(rope.get("rope_theta", config.get("rope_theta", 10_000.0)))
        return {"theta": theta, "rope_scaling": read_scaling(rope), **read(config)}

    def list_problems(config: Json) -> list[str]:
        rope, found = _rope_of_full_blocks(config), []
        if "rotary_dims" not in chosen:
            # in the object of positions, or beside it
            found = entry_problems({**config, **rope}, (), {"partial_rotary_factor": (1.0,)}, "Decoder")
        return found + scaling_problems(rope) + problems(config)

    others = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "tied": "tie_word_embeddings"}
    none = {"num_key_value_heads": None, "head_dim": None, "tie_word_embeddings": False, eps: 1e-6}
    return make_family(
        model_type,
        architecture,
        names,
        entries={**TOKEN_ENTRIES, **others, "eps": eps, **(entries or {})},
        defaults={**none, **(defaults or {})},
        activations=activations,
        fixed=fixed,
        chosen=("theta", "rope_scaling", *chosen),
        constant={"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False},
        read=read_all,
        write=lambda config: {**rope_entries(config), **write(config)},
        problems=list_problems,
        **differences,
    )


def _rope_of_full_blocks(config: Json) -> Json:
    """Return the entries about positions; for models with windows in some blocks, those of the others."""
    rope = read_rope(config)
    return rope.get("full_attention") or rope


def check_head_dim(config: DecoderConfig, model_type: str) -> list[str]:
    """List a head size that differs from embed // num_heads, in families without an entry for it."""
    return option_problems(config, {"head_dim": (None, config.embed // config.num_heads)}, model_type)
