"""The relatives of Llama: in what each family differs. `llama.py` has what they share.

The entries and their defaults are those of the configuration classes of transformers 5.
"""

import math
from collections.abc import Mapping
from typing import Any

from shardtrain.axes import HEAD_DIM
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.llama import Relative, family
from shardtrain.models.huggingface.place import norm_bias_problems
from shardtrain.models.huggingface.rope import (
    rope_entries,
    rope_of,
    window_entries,
    window_options,
    window_problems,
)
from shardtrain.system.excerpts import short

LIKE_LLAMA = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
SILU = {"hidden_act": ("silu", "swish")}
BIASES = {"attention_bias": "attention_bias"}
CAUSAL = {"use_bidirectional_attention": (False, None)}
TANH = ("gelu_pytorch_tanh", "gelu_new")


def _derived_head_dim(config: DecoderConfig) -> list[str]:
    found, derived = config.sizes[HEAD_DIM], config.embed // config.num_heads
    return [] if found == derived else [f"head_dim is {found}; the family has embed // num_heads only"]


LLAMA = Relative(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fixed={name: value for name, value in LIKE_LLAMA.items() if name != "bias"},
    only=SILU,
    biases={**BIASES, "mlp_bias": "bias"},
)

MISTRAL = Relative(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fixed=LIKE_LLAMA,
    chosen=("window",),
    read=lambda config: {"window": config["sliding_window"]},
    write=lambda config: {"sliding_window": config.window},
    only=SILU,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)

QWEN2 = Relative(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={**LIKE_LLAMA, "qkv_bias": True},
    write=lambda config: {"use_sliding_window": False},
    only={**SILU, "use_sliding_window": (False,)},
    defaults={"num_key_value_heads": 32},
    foreign=_derived_head_dim,
)

QWEN3 = Relative(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**LIKE_LLAMA, "qk_norm": True},
    write=lambda config: {"use_sliding_window": False},
    only={**SILU, "use_sliding_window": (False,)},
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    biases=BIASES,
)


OLMO2 = Relative(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    fixed={
        **LIKE_LLAMA, "post_norm": True, "only_post_norm": True, "qk_norm": True, "qk_norm_joint": True,
    },
    only=SILU,
    defaults={"rms_norm_eps": 1e-5},
    foreign=_derived_head_dim,
    biases=BIASES,
)  # fmt: skip


def _rotary_dims(config: Mapping[str, Any]) -> dict[str, Any]:
    part = rope_of(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotated = int(head_dim * part)
    return {"window": config.get("sliding_window"), "rotary_dims": None if part == 1 else rotated}


def _phi3_entries(config: DecoderConfig) -> dict[str, Any]:
    rope = rope_entries(config)["rope_parameters"]
    original = "original_max_position_embeddings"
    return {
        "sliding_window": config.window,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        original: rope.get(original, config.seq),
    }


def _unlike_phi3(config: DecoderConfig) -> list[str]:
    kind = config.rope_scaling.partition(":")[0]
    scaled = [f"rope_scaling is {kind!r}; phi3 has 'longrope' only"] if kind not in ("", "longrope") else []
    return scaled + _derived_head_dim(config)


PHI3 = Relative(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    fixed=LIKE_LLAMA,
    chosen=("window", "rotary_dims"),
    read=_rotary_dims,
    write=_phi3_entries,
    only=SILU,
    defaults={"rms_norm_eps": 1e-5},
    problems=lambda config: [
        f"rope_type is {kind!r}; Decoder has 'default' or 'longrope' only in this family"
        for kind in [rope_of(config).get("rope_type", rope_of(config).get("type", "default"))]
        if kind in ("linear", "llama3", "yarn")
    ],
    foreign=_unlike_phi3,
    fused=True,
)

STARCODER2 = Relative(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    fixed={"positions": "rotary", "norm": "layernorm", "activation": "gelu"},
    chosen=("window", "norm_bias"),
    # its norms have biases, whatever its projections have
    read=lambda config: {
        "window": config.get("sliding_window"),
        "norm_bias": None if config["use_bias"] else True,
    },
    write=lambda config: {"sliding_window": config.window, "hidden_act": "gelu_pytorch_tanh"},
    only={"hidden_act": TANH},
    defaults={"num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True},
    foreign=lambda config: _derived_head_dim(config) + norm_bias_problems(config, "starcoder2"),
    biases={"use_bias": "bias"},
    eps="norm_epsilon",
)

LIKE_GEMMA = {"positions": "rotary", "norm": "rmsnorm_plus_one", "activation": "geglu", "bias": False}
OF_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
ACTIVATION = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _embed_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"embed_scale": math.sqrt(config["hidden_size"])}


def _unlike_gemma(config: DecoderConfig) -> list[str]:
    wanted = math.sqrt(config.embed)
    scale = config.embed_scale
    return [] if scale == wanted else [f"embed_scale is {scale}; gemma has the root of embed, {wanted}"]


GEMMA = Relative(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fixed=LIKE_GEMMA,
    chosen=("embed_scale",),
    read=_embed_scale,
    write=lambda config: ACTIVATION,
    # published files say gelu, and their models have the tanh
    only={"hidden_act": (*TANH, "gelu"), "hidden_activation": (*TANH, None), **CAUSAL},
    biases=BIASES,
    defaults={**OF_GEMMA, "num_key_value_heads": 16},
    foreign=_unlike_gemma,
)

CAPS = {"soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}


def _gemma2_options(config: Mapping[str, Any], every: int) -> dict[str, Any]:
    """Return what Gemma 2 and 3 let one choose."""
    scalar = config["query_pre_attn_scalar"]
    own = scalar == (config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])
    return {
        **_embed_scale(config),
        **window_options(config, every),
        **{name: config[entry] for name, entry in CAPS.items()},
        "query_scale": None if own else scalar**-0.5,
    }


def _gemma2_entries(config: DecoderConfig) -> dict[str, Any]:
    scalar = config.sizes[HEAD_DIM] if config.query_scale is None else config.query_scale**-2.0
    if round(scalar) and round(scalar) ** -0.5 == config.query_scale:
        scalar = round(scalar)
    caps = {entry: getattr(config, name) for name, entry in CAPS.items()}
    return {**ACTIVATION, **caps, **window_entries(config), "query_pre_attn_scalar": scalar}


GEMMA2 = Relative(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fixed={**LIKE_GEMMA, "post_norm": True},
    chosen=("embed_scale", "window", "full_every", "query_scale", *CAPS),
    read=lambda config: _gemma2_options(config, 2),
    write=_gemma2_entries,
    only={"hidden_activation": TANH, **CAUSAL},
    biases=BIASES,
    defaults={
        **OF_GEMMA,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    problems=lambda config: window_problems(config, 2),
    foreign=_unlike_gemma,
)


def _gemma3_options(config: Mapping[str, Any]) -> dict[str, Any]:
    options = _gemma2_options(config, 6)
    rope = rope_of(config).get("sliding_attention") or {}
    theta = float(rope.get("rope_theta", config["rope_local_base_freq"]))
    return {**options, "window_theta": None if options["window"] is None else theta}


def _gemma3_entries(config: DecoderConfig) -> dict[str, Any]:
    own = rope_entries(config)
    theta = config.theta if config.window_theta is None else config.window_theta
    rope = {
        "full_attention": own["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }
    return {**_gemma2_entries(config), **own, "rope_parameters": rope, "rope_local_base_freq": theta}


def _unlike_gemma3(config: DecoderConfig) -> list[str]:
    found = _unlike_gemma(config)
    if config.window is not None and config.rope_scaling and config.window_theta is None:
        found.append("rope_scaling stretches windows too, which gemma3_text has not: set window_theta")
    return found


def _scaled_windows(config: Mapping[str, Any]) -> list[str]:
    rope = rope_of(config).get("sliding_attention") or {}
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return []
    return [f"rope_type of sliding_attention is {short(kind)}; Decoder has 'default' only"]


GEMMA3 = Relative(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    fixed={**LIKE_GEMMA, "post_norm": True, "qk_norm": True},
    chosen=("embed_scale", "window", "full_every", "window_theta", "query_scale", *CAPS),
    read=_gemma3_options,
    write=_gemma3_entries,
    only={"hidden_activation": TANH, **CAUSAL},
    biases=BIASES,
    defaults={
        **OF_GEMMA,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    problems=lambda config: window_problems(config, 6) + _scaled_windows(config),
    foreign=_unlike_gemma3,
)

RELATIVES = tuple(map(family, (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, STARCODER2, OLMO2, GEMMA, GEMMA2, GEMMA3)))
"""In the order in which a model is given the first that has all its options."""
