"""The Llama family of Hugging Face as `Decoder`: rotary positions, grouped queries, swiglu. See
`huggingface_place.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, KV_HEADS, MLP, VOCAB
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface_gpt2 import HEAD, head_places
from shardtrain.models.huggingface_place import KERNELS, Copy, Family, Place, entry_problems, option_problems

PREFIX = "model."
NEEDED = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
ONLY = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_type": ("default",),
}


def places(config: DecoderConfig) -> Iterator[Place]:
    """List the places of a Llama model, whose matrices are (out, in), without biases."""
    yield Place(path="embedding", name=f"{PREFIX}embed_tokens.weight", dims=(VOCAB, EMBED))
    names = {f"attention/{which}": f"self_attn.{which}_proj" for which in "qkvo"}
    names |= {f"mlp/{which}": f"mlp.{which}_proj" for which in ("up", "gate", "down")}
    for path, name in names.items():
        into, out = KERNELS[path]
        yield Place(
            path=f"blocks/{path}/kernel",
            name=f"{PREFIX}layers.{{}}.{name}.weight",
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
        yield Place(path=f"{path}/scale", name=f"{PREFIX}{name}.weight", dims=(EMBED,))
    yield from head_places(config)


def copies(config: DecoderConfig) -> Iterator[Copy]:
    """List the second name of a tied head."""
    if config.tied:
        yield Copy(name=HEAD, of=f"{PREFIX}embed_tokens.weight", tied=True)


def read(config: Mapping[str, Any]) -> tuple[list[str], Callable[[], DecoderConfig]]:
    """See `Family.read`; the wavelengths of the positions are in one of two entries."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))

    def made() -> DecoderConfig:
        return DecoderConfig(
            vocab=config["vocab_size"],
            seq=config["max_position_embeddings"],
            embed=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config.get("num_key_value_heads"),
            head_dim=config.get("head_dim"),
            mlp=config["intermediate_size"],
            positions="rotary",
            theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
            norm="rmsnorm",
            eps=config.get("rms_norm_eps", 1e-6),
            activation="swiglu",
            bias=False,
            tied=config.get("tie_word_embeddings", False),
        )

    return entry_problems({**config, "rope_type": rope_type}, NEEDED, ONLY, "Decoder"), made


def write(config: DecoderConfig) -> dict[str, Any]:
    """See `Family.write`; theta is in the entry of transformers 5, and in that of earlier versions."""
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
        "rms_norm_eps": config.eps,
        "rope_theta": config.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.theta},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": config.tied,
    }


def foreign(config: DecoderConfig) -> list[str]:
    """See `Family.foreign`."""
    wanted = {
        "positions": ("rotary",),
        "norm": ("rmsnorm",),
        "activation": ("swiglu",),
        "bias": (False,),
    }
    return option_problems(config, wanted, "llama")


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    kind=DecoderConfig,
    prefix=PREFIX,
    heads=("lm_head.",),
    places=places,
    copies=copies,
    read=read,
    write=write,
    foreign=foreign,
)
