"""List the families of decoders in files of Hugging Face, each by its differences from Llama.

`decoders.py` has what they share; `mixture_families.py` lists the families with experts. Entries and defaults
are those of the configuration classes of transformers 5; `read` also reads the entries of published files.
"""

import math
from typing import Any

from shardtrain.axes import HEAD_DIM
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.decoders import (
    ATTENTION,
    ATTENTION_BIAS,
    GATED_MLP,
    LIKE_LLAMA,
    NO_WINDOWS,
    PRE_NORMS,
    QK_NORMED,
    QK_NORMS,
    WINDOW,
    Json,
    Names,
    check_head_dim,
    make_family,
    make_llama_relative,
)
from shardtrain.models.huggingface.mixture_families import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from shardtrain.models.huggingface.place import TOKEN_ENTRIES, option_problems
from shardtrain.models.huggingface.rope import (
    read_rope,
    read_scaling,
    rope_entries,
    scaling_problems,
    window_entries,
    window_options,
    window_problems,
)
from shardtrain.models.transformer_options import has_bias
from shardtrain.system.excerpts import short

QKV = ("attention/q", "attention/k", "attention/v")


def _check_heads(config: DecoderConfig, model_type: str) -> list[str]:
    found = option_problems(config, {"num_kv_heads": (None, config.num_heads)}, model_type)
    return found + check_head_dim(config, model_type)


GPT2 = make_family(
    "gpt2",
    "GPT2LMHeadModel",
    Names(
        prefix="transformer.", embedding="wte", positions="wpe", layer="h.{}.", transposed=False,
        maps={
            **dict.fromkeys(QKV, "attn.c_attn"), "attention/o": "attn.c_proj", "mlp/up": "mlp.c_fc",
            "mlp/down": "mlp.c_proj",
        },
        norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"}, final_norm="ln_f",
    ),
    entries={
        "vocab": "vocab_size", "seq": "n_positions", "embed": "n_embd", "num_layers": "n_layer",
        "num_heads": "n_head", "mlp": "n_inner", "eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
    },
    defaults={"n_inner": None, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"},
    activation="activation_function",
    # without rotary positions theta means nothing
    chosen=("num_kv_heads", "head_dim", "theta"),
    only={
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    constant={"attn_pdrop": 0.0},
    write=lambda config: {"resid_pdrop": config.dropout, "embd_pdrop": config.dropout},
    foreign=_check_heads,
)  # fmt: skip


def _read_neox(config: Json) -> dict[str, Any]:
    """Read the rotary options, from an object or, in the first files, from entries next to it."""
    rope = read_rope(config)
    part = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "theta": float(rope.get("rope_theta", config.get("rotary_emb_base", 10_000.0))),
        "rope_scaling": read_scaling(rope),
        "rotary_dims": None if part == 1 else int(head_dim * part),
    }


def _write_neox(config: DecoderConfig) -> dict[str, Any]:
    rope = rope_entries(config)["rope_parameters"]
    part = rope.setdefault("partial_rotary_factor", 1.0)
    return {
        "rotary_pct": part, "rotary_emb_base": config.theta, "rope_parameters": rope,
        "hidden_dropout": config.dropout,
    }  # fmt: skip


GPT_NEOX = make_family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    Names(
        prefix="gpt_neox.", embedding="embed_in", by_head=True,
        maps={
            **dict.fromkeys(QKV, "attention.query_key_value"), "attention/o": "attention.dense",
            "mlp/up": "mlp.dense_h_to_4h", "mlp/down": "mlp.dense_4h_to_h",
        },
        final_norm="final_layer_norm", head="embed_out.weight",
    ),
    entries={
        **TOKEN_ENTRIES, "eps": "layer_norm_eps", "parallel": "use_parallel_residual",
        "tied": "tie_word_embeddings",
    },
    defaults={
        "layer_norm_eps": 1e-5, "use_parallel_residual": True, "tie_word_embeddings": False,
        "attention_bias": True,
    },
    activations={"gelu": "gelu_erf", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu"},
    biases=ATTENTION_BIAS,
    fixed={"positions": "rotary", "norm": "layernorm", "bias": True},
    chosen=("theta", "rope_scaling", "rotary_dims", "num_kv_heads", "head_dim"),
    constant={"attention_dropout": 0.0},
    read=_read_neox,
    write=_write_neox,
    problems=lambda config: scaling_problems(read_rope(config)),
    foreign=_check_heads,
)  # fmt: skip

LLAMA = make_llama_relative(
    "llama",
    "LlamaForCausalLM",
    fixed={name: value for name, value in LIKE_LLAMA.items() if name != "bias"},
    biases={**ATTENTION_BIAS, "mlp_bias": "bias"},
)

MISTRAL = make_llama_relative(
    "mistral",
    "MistralForCausalLM",
    entries=WINDOW,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)

QWEN2 = make_llama_relative(
    "qwen2",
    "Qwen2ForCausalLM",
    fixed={**LIKE_LLAMA, "qkv_bias": True},
    defaults={"num_key_value_heads": 32},
    foreign=check_head_dim,
    **NO_WINDOWS,
)

QWEN3 = make_llama_relative(
    "qwen3",
    "Qwen3ForCausalLM",
    QK_NORMED,
    fixed={**LIKE_LLAMA, "qk_norm": True},
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    biases=ATTENTION_BIAS,
    **NO_WINDOWS,
)

POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

OLMO2 = make_llama_relative(
    "olmo2",
    "Olmo2ForCausalLM",
    Names(norms={**POST_NORMS, **QK_NORMS}),
    fixed={
        **LIKE_LLAMA, "post_norm": True, "only_post_norm": True, "qk_norm": True, "qk_norm_joint": True,
    },
    defaults={"rms_norm_eps": 1e-5},
    foreign=check_head_dim,
    biases=ATTENTION_BIAS,
)  # fmt: skip


def _read_phi3(config: Json) -> dict[str, Any]:
    part = read_rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    return {"rotary_dims": None if part == 1 else int(head_dim * part)}


def _write_phi3(config: DecoderConfig) -> dict[str, Any]:
    rope = rope_entries(config)["rope_parameters"]
    original = "original_max_position_embeddings"
    part = rope.get("partial_rotary_factor", 1.0)
    return {"partial_rotary_factor": part, original: rope.get(original, config.seq)}


def _foreign_to_phi3(config: DecoderConfig, model_type: str) -> list[str]:
    found = check_head_dim(config, model_type)
    if config.rope_scaling and config.rope_scaling.kind != "longrope":
        found.append(f"rope_scaling is {config.rope_scaling}; phi3 has 'longrope' only")
    return found


PHI3 = make_llama_relative(
    "phi3",
    "Phi3ForCausalLM",
    Names(
        maps={
            **dict.fromkeys(QKV, "self_attn.qkv_proj"), "attention/o": ATTENTION["attention/o"],
            **dict.fromkeys(("mlp/gate", "mlp/up"), "mlp.gate_up_proj"), "mlp/down": GATED_MLP["mlp/down"],
        }
    ),
    entries=WINDOW,
    chosen=("rotary_dims",),
    read=_read_phi3,
    write=_write_phi3,
    defaults={"rms_norm_eps": 1e-5, "sliding_window": None},
    problems=lambda config: [
        f"rope_type is {kind!r}; Decoder has 'default' or 'longrope' only in this family"
        for kind in [read_rope(config).get("rope_type", read_rope(config).get("type", "default"))]
        if kind in ("linear", "llama3", "yarn")
    ],
    foreign=_foreign_to_phi3,
)  # fmt: skip


def _foreign_to_starcoder2(config: DecoderConfig, model_type: str) -> list[str]:
    found = check_head_dim(config, model_type)
    if not has_bias(config, "norm_bias"):
        norms = f"the layer norms of {model_type} have biases, use True"
        found.append(f"norm_bias is {config.norm_bias!r}; {norms}")
    return found


STARCODER2 = make_llama_relative(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Names(maps={**ATTENTION, "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}),
    fixed={"positions": "rotary", "norm": "layernorm"},
    entries=WINDOW,
    chosen=("norm_bias",),
    activations={"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"},
    # its norms have biases, whatever its projections have
    read=lambda config: {"norm_bias": None if config["use_bias"] else True},
    defaults={
        "num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True,
        "sliding_window": None,
    },
    foreign=_foreign_to_starcoder2,
    biases={"use_bias": "bias"},
    eps="norm_epsilon",
)  # fmt: skip


def _read_embed_scale(config: Json) -> dict[str, Any]:
    return {"embed_scale": math.sqrt(config["hidden_size"])}


def _foreign_to_gemma(config: DecoderConfig, model_type: str) -> list[str]:
    return option_problems(config, {"embed_scale": (math.sqrt(config.embed),)}, model_type)


LIKE_GEMMA = {"positions": "rotary", "norm": "rmsnorm_plus_one", "bias": False}
TANH = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
CAUSAL = {"use_bidirectional_attention": (False, None)}
OF_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}

GEMMA = make_llama_relative(
    "gemma",
    "GemmaForCausalLM",
    fixed=LIKE_GEMMA,
    chosen=("embed_scale",),
    read=_read_embed_scale,
    write=lambda config: {"hidden_activation": "gelu_pytorch_tanh"},
    # published files say gelu, and their models have the tanh
    activations={**TANH, "gelu": "geglu"},
    only={"hidden_activation": (*TANH, None), **CAUSAL},
    biases=ATTENTION_BIAS,
    defaults={**OF_GEMMA, "num_key_value_heads": 16},
    foreign=_foreign_to_gemma,
)

CAPS = {"soft_cap": "attn_logit_softcapping", "logits_soft_cap": "final_logit_softcapping"}


def _read_gemma2(config: Json, every: int = 2) -> dict[str, Any]:
    """Read the options that Gemma 2 and 3 have in addition to Gemma."""
    scalar = config["query_pre_attn_scalar"]
    own = scalar == (config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])
    return {
        **_read_embed_scale(config),
        **window_options(config, every),
        "query_scale": None if own else scalar**-0.5,
    }


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    scalar = config.sizes[HEAD_DIM] if config.query_scale is None else config.query_scale**-2.0
    if round(scalar) and round(scalar) ** -0.5 == config.query_scale:
        scalar = round(scalar)
    about = {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}
    return {**about, **window_entries(config)}


LATER_GEMMA = Names(norms={**PRE_NORMS, **POST_NORMS, "mlp_norm": "pre_feedforward_layernorm"})
CHOSEN_IN_GEMMA = ("embed_scale", "window", "full_every", "query_scale")
OF_LATER_GEMMA = {
    **OF_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip

GEMMA2 = make_llama_relative(
    "gemma2",
    "Gemma2ForCausalLM",
    LATER_GEMMA,
    fixed={**LIKE_GEMMA, "post_norm": True},
    entries=CAPS,
    chosen=CHOSEN_IN_GEMMA,
    read=_read_gemma2,
    write=_write_gemma2,
    activations=TANH,
    activation="hidden_activation",
    only=CAUSAL,
    biases=ATTENTION_BIAS,
    defaults={**OF_LATER_GEMMA, CAPS["soft_cap"]: 50.0, CAPS["logits_soft_cap"]: 30.0},
    problems=lambda config: window_problems(config, 2),
    foreign=_foreign_to_gemma,
)


def _read_gemma3(config: Json) -> dict[str, Any]:
    options = _read_gemma2(config, 6)
    rope = read_rope(config).get("sliding_attention") or {}
    theta = float(rope.get("rope_theta", config["rope_local_base_freq"]))
    return {**options, "window_theta": None if options["window"] is None else theta}


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    theta = config.theta if config.window_theta is None else config.window_theta
    rope = {
        "full_attention": rope_entries(config)["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }
    return {**_write_gemma2(config), "rope_parameters": rope, "rope_local_base_freq": theta}


def _gemma3_problems(config: Json) -> list[str]:
    rope = read_rope(config).get("sliding_attention") or {}
    kind = rope.get("rope_type", "default")
    found = window_problems(config, 6)
    if kind != "default":
        found.append(f"rope_type of sliding_attention is {short(kind)}; Decoder has 'default' only")
    return found


def _foreign_to_gemma3(config: DecoderConfig, model_type: str) -> list[str]:
    found = _foreign_to_gemma(config, model_type)
    if config.window is not None and config.rope_scaling and config.window_theta is None:
        found.append(
            "rope_scaling also stretches blocks with a window, which gemma3_text does not: set window_theta"
        )
    return found


GEMMA3 = make_llama_relative(
    "gemma3_text",
    "Gemma3ForCausalLM",
    Names(norms={**LATER_GEMMA.norms, **QK_NORMS}),
    fixed={**LIKE_GEMMA, "post_norm": True, "qk_norm": True},
    entries=CAPS,
    chosen=(*CHOSEN_IN_GEMMA, "window_theta"),
    read=_read_gemma3,
    write=_write_gemma3,
    activations=TANH,
    activation="hidden_activation",
    only=CAUSAL,
    biases=ATTENTION_BIAS,
    defaults={
        **OF_LATER_GEMMA, **dict.fromkeys(CAPS.values()), "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    problems=_gemma3_problems,
    foreign=_foreign_to_gemma3,
)  # fmt: skip


DECODERS = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, STARCODER2, OLMO2, GEMMA, GEMMA2, GEMMA3, GPT_NEOX, MIXTRAL,
    QWEN2_MOE, QWEN3_MOE,
)  # fmt: skip
"""A model is written as the first family that has all its options."""
