"""A Hugging Face config.json of the GPT-2 or Llama family as a `DecoderConfig`; no option is lost."""

from collections.abc import Mapping
from typing import Any

from shardtrain.models import checks
from shardtrain.models.decoder import DecoderConfig

GPT2_NEEDED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
GPT2_ONLY = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
LLAMA_NEEDED = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
LLAMA_ONLY = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_type": ("default",),
}


def read_config(config: Mapping[str, Any]) -> tuple[str, DecoderConfig]:
    """The family and our configuration of a config.json.

    Args:
      config: the dict of a config.json, with `model_type` "gpt2" or "llama".

    Returns:
      The family's name, and the configuration with options that a config.json lacks at their defaults.

    Raises:
      ValueError: listing every entry that is missing or that `Decoder` has no option for.
    """
    family = config.get("model_type", "")
    checks.refuse("Hugging Face config", checks.choice("model_type", family, ("gpt2", "llama")))
    needed = GPT2_NEEDED if family == "gpt2" else LLAMA_NEEDED
    found = [f"{name} is missing" for name in needed if name not in config]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    given = {**config, "rope_type": rope.get("rope_type", rope.get("type", "default"))}
    for name, allowed in (GPT2_ONLY if family == "gpt2" else LLAMA_ONLY).items():
        value = given.get(name, allowed[0])
        if value not in allowed:
            found.append(f"{name} is {value!r}; Decoder has {' or '.join(map(repr, allowed))} only")
    checks.refuse("Hugging Face config", found)
    return family, _gpt2_config(config) if family == "gpt2" else _llama_config(config, rope)


def _gpt2_config(config: Mapping[str, Any]) -> DecoderConfig:
    return DecoderConfig(
        vocab=config["vocab_size"],
        seq=config["n_positions"],
        embed=config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        mlp=config.get("n_inner"),
        eps=config.get("layer_norm_epsilon", 1e-5),
        tied=config.get("tie_word_embeddings", True),
    )


def _llama_config(config: Mapping[str, Any], rope: Mapping[str, Any]) -> DecoderConfig:
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
