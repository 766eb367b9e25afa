"""Families of Hugging Face that are relatives of Llama, as `Decoder`: they name their arrays alike. See
`place.py`; `relatives.py` lists them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.gpt2 import HEAD, head_places
from shardtrain.models.huggingface.mixtures import ExpertNames, expert_places
from shardtrain.models.huggingface.place import KERNELS, Copy, Family, Place, entry_problems, option_problems
from shardtrain.models.huggingface.rope import rope_entries, rope_of, scaling_problems, scaling_text
from shardtrain.models.transformer_options import GATED, has_bias

PREFIX = "model."
NEEDED = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
SIZES = ("vocab", "seq", "embed", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp")
EVERYWHERE = (*SIZES, "theta", "rope_scaling", "eps", "tied")
"""Options that every relative lets one choose."""

OF_TRAINING = ("dropout", "remat", "scan", "dtype", "attention", "loss_chunk", "lora", "products")
"""Options that are no part of a pretrained model."""


@dataclass(frozen=True, kw_only=True)
class Relative:
    """In what a family differs from others.

    Args:
      model_type: in config.json.
      architecture: the class of `transformers` that loads it.
      fixed: options of ours that have this value in the whole family.
      chosen: options that it lets one choose beside those of `EVERYWHERE`.
      read: config.json -> the chosen options.
      write: configuration -> entries that others have not, or differently.
      only: entry -> the values that ours can follow.
      defaults: entry -> what it is where config.json has none.
      problems: config.json -> what else ours cannot follow.
      foreign: configuration -> what else the family does not have.
      fused: queries, keys and values are one array, and so are the two projections of a gated feed-forward.
      eps: the entry of that option.
      biases: switch in config.json -> the option of `BIASES` that it sets.
      experts: names of the arrays of its mixtures of experts; None: it has feed-forwards.
    """

    model_type: str
    architecture: str
    fixed: Mapping[str, Any]
    chosen: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    write: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    problems: Callable[[Mapping[str, Any]], list[str]] = lambda config: []
    foreign: Callable[[DecoderConfig], list[str]] = lambda config: []
    fused: bool = False
    eps: str = "rms_norm_eps"
    biases: Mapping[str, str] = field(default_factory=dict)
    experts: ExpertNames | None = None


FUSED = {
    "attention/q": ("self_attn.qkv_proj", 0, ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM))),
    "mlp/gate": ("mlp.gate_up_proj", 0, ((MLP,), (MLP,))),
}
FUSED["attention/k"] = (FUSED["attention/q"][0], 1, FUSED["attention/q"][2])
FUSED["attention/v"] = (FUSED["attention/q"][0], 2, FUSED["attention/q"][2])
FUSED["mlp/up"] = (FUSED["mlp/gate"][0], 1, FUSED["mlp/gate"][2])
"""Path of a map -> the array that it is a part of, which part, and the dims that each part writes."""


def _places(relative: Relative, config: DecoderConfig) -> Iterator[Place]:
    """List the places of a model, whose matrices are (out, in)."""
    yield Place(path="embedding", name=f"{PREFIX}embed_tokens.weight", dims=(VOCAB, EMBED))
    for path, name in _maps(config).items():
        into, out = KERNELS[path]
        name, part, parts = FUSED.get(path, (name, 0, ())) if relative.fused else (name, 0, ())
        stacked = f"{PREFIX}layers.{{}}.{name}"
        yield Place(
            path=f"blocks/{path}/kernel", name=f"{stacked}.weight", dims=(*into, *out), num_in=len(into),
            transposed=True, part=part, parts=parts,
        )  # fmt: skip
        if has_bias(config, _bias_option(path)):
            yield Place(path=f"blocks/{path}/bias", name=f"{stacked}.bias", dims=out, part=part, parts=parts)
    if relative.experts is not None:
        yield from expert_places(relative.experts, config, f"{PREFIX}layers.{{}}.")
    for path, name in _norms(config).items():
        yield Place(path=f"{path}/scale", name=f"{PREFIX}{name}.weight", dims=_normed(config, path))
        if config.norm == "layernorm" and has_bias(config, "norm_bias"):
            yield Place(path=f"{path}/bias", name=f"{PREFIX}{name}.bias", dims=(EMBED,))
    yield from head_places(config)


def _bias_option(path: str) -> str:
    """Return the option that says whether a linear map of a block has a bias."""
    if path[-1] in "qkv":
        return "qkv_bias"
    return "attention_bias" if path.startswith("attention/") else "bias"


def _maps(config: DecoderConfig) -> dict[str, str]:
    """Return the names of the linear maps of a block."""
    names = {f"attention/{which}": f"self_attn.{which}_proj" for which in "qkvo"}
    if config.experts:
        return names
    if config.activation not in GATED:
        return names | {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    return names | {f"mlp/{which}": f"mlp.{which}_proj" for which in ("up", "gate", "down")}


def _norms(config: DecoderConfig) -> dict[str, str]:
    """Return the names of the norms; behind the attention there is one, or another that comes before."""
    before, behind = "layers.{}.post_attention_layernorm", "layers.{}.pre_feedforward_layernorm"
    names = {"blocks/attention_norm": "layers.{}.input_layernorm", "blocks/mlp_norm": before}
    if config.only_post_norm:
        names = {"blocks/attention_post_norm": before}
        names |= {"blocks/mlp_post_norm": "layers.{}.post_feedforward_layernorm"}
    elif config.post_norm:
        names |= {
            "blocks/attention_post_norm": before,
            "blocks/mlp_norm": behind,
            "blocks/mlp_post_norm": "layers.{}.post_feedforward_layernorm",
        }
    if config.qk_norm:
        names |= {f"blocks/attention/{which}_norm": f"layers.{{}}.self_attn.{which}_norm" for which in "qk"}
    return names | {"final_norm": "norm"}


def _normed(config: DecoderConfig, path: str) -> tuple[str, ...]:
    """Return the dims that a norm is over."""
    if not path.endswith(("q_norm", "k_norm")):
        return (EMBED,)
    heads = HEADS if path.endswith("q_norm") else KV_HEADS
    return (heads, HEAD_DIM) if config.qk_norm_joint else (HEAD_DIM,)


def _copies(config: DecoderConfig) -> Iterator[Copy]:
    """List the second name of a tied head."""
    if config.tied:
        yield Copy(name=HEAD, of=f"{PREFIX}embed_tokens.weight", tied=True)


def _read(relative: Relative, config: Mapping[str, Any]) -> tuple[list[str], Callable[[], DecoderConfig]]:
    """See `Family.read`; the wavelengths of the positions are in one of two entries."""
    config = {**relative.defaults, **config}
    # of two kinds of blocks each has its own
    rope = rope_of(config)
    rope = rope.get("full_attention") or rope

    def made() -> DecoderConfig:
        options = {
            "vocab": config["vocab_size"],
            "seq": config["max_position_embeddings"],
            "embed": config["hidden_size"],
            "num_layers": config["num_hidden_layers"],
            "num_heads": config["num_attention_heads"],
            "num_kv_heads": config.get("num_key_value_heads"),
            "head_dim": config.get("head_dim"),
            "mlp": config["intermediate_size"],
            "theta": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
            "rope_scaling": scaling_text(rope),
            "eps": config.get(relative.eps, 1e-6),
            "tied": config.get("tie_word_embeddings", False),
        }
        biases = _read_biases(relative, config)
        return DecoderConfig(**{**options, **relative.fixed, **biases, **relative.read(config)})

    found = entry_problems(config, NEEDED, relative.only, "Decoder")
    if "rotary_dims" not in relative.chosen:
        # in the object of positions, or beside it
        found += entry_problems({**config, **rope}, (), {"partial_rotary_factor": (1.0,)}, "Decoder")
    return found + scaling_problems(rope) + relative.problems(config), made


def _read_biases(relative: Relative, config: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return the options of biases that a family lets one choose; None where `bias` says the same."""
    found = {option: bool(config.get(entry)) for entry, option in relative.biases.items()}
    bias = found.get("bias", relative.fixed.get("bias"))
    return {name: None if name != "bias" and value == bias else value for name, value in found.items()}


def _write(relative: Relative, config: DecoderConfig) -> dict[str, Any]:
    """See `Family.write`."""
    return {
        "vocab_size": config.vocab,
        "max_position_embeddings": config.seq,
        "hidden_size": config.embed,
        "intermediate_size": config.sizes[MLP],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.sizes[KV_HEADS],
        "head_dim": config.sizes[HEAD_DIM],
        "hidden_act": "silu",
        relative.eps: config.eps,
        **rope_entries(config),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
        **{entry: has_bias(config, option) for entry, option in relative.biases.items()},
        **relative.write(config),
    }


def _foreign(relative: Relative, config: DecoderConfig) -> list[str]:
    """See `Family.foreign`: options that the family does not let one choose."""
    chosen = {*EVERYWHERE, *OF_TRAINING, *relative.chosen, *relative.biases.values()} - relative.fixed.keys()
    defaults = {f.name: f.default for f in fields(DecoderConfig) if f.default is not MISSING}
    fixed = {name: (value,) for name, value in {**defaults, **relative.fixed}.items() if name not in chosen}
    return option_problems(config, fixed, relative.model_type) + relative.foreign(config)


def family(relative: Relative) -> Family:
    """Return the family as `families.py` has them."""
    return Family(
        model_type=relative.model_type,
        architecture=relative.architecture,
        kind=DecoderConfig,
        prefix=PREFIX,
        heads=("lm_head.",),
        places=lambda config: _places(relative, config),
        copies=_copies,
        read=lambda config: _read(relative, config),
        write=lambda config: _write(relative, config),
        foreign=lambda config: _foreign(relative, config),
    )
