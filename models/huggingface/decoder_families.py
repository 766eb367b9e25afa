"""The families of decoders in files of Hugging Face: in what each differs. `decoders.py` has what they share.

The entries and their defaults are those of the configuration classes of transformers 5; published files have
the entries that `read` reads.
"""

import math
from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts, experts_text, read_experts
from shardtrain.models.huggingface.decoders import (
    ATTENTION,
    GATED_MLP,
    LIKE_LLAMA,
    PRE_NORMS,
    QK_NORMS,
    Json,
    Names,
    expert_problems,
    list_foreign_experts,
    make_family,
    make_relative,
)
from shardtrain.models.huggingface.place import TOKEN_ENTRIES
from shardtrain.models.huggingface.rope import (
    read_rope,
    rope_entries,
    scaling_problems,
    scaling_text,
    window_entries,
    window_options,
    window_problems,
)
from shardtrain.models.transformer_options import has_bias
from shardtrain.system.excerpts import short

QKV = ("attention/q", "attention/k", "attention/v")
ATTENTION_BIAS = {"attention_bias": "attention_bias"}


def _find_derived_head_dim(config: DecoderConfig, model_type: str) -> list[str]:
    found, derived = config.sizes[HEAD_DIM], config.sizes[EMBED] // config.sizes[HEADS]
    return [] if found == derived else [f"head_dim is {found}; {model_type} has embed // num_heads only"]


def _equal_heads(config: DecoderConfig, model_type: str) -> list[str]:
    size, found = config.sizes, []
    if size[KV_HEADS] != size[HEADS]:
        heads = f"as many as query heads, {size[HEADS]}"
        found = [f"num_kv_heads is {size[KV_HEADS]}; {model_type} has {heads}"]
    if size[HEADS] * size[HEAD_DIM] != size[EMBED]:
        found.append(f"head_dim is {size[HEAD_DIM]}; {model_type} has embed // num_heads only")
    return found


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
    foreign=_equal_heads,
)  # fmt: skip


def _read_neox(config: Json) -> dict[str, Any]:
    """What is rotated is in an object, or beside it as in the first files."""
    rope = read_rope(config)
    part = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return {
        "theta": float(rope.get("rope_theta", config.get("rotary_emb_base", 10_000.0))),
        "rope_scaling": scaling_text(rope),
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
    foreign=_equal_heads,
)  # fmt: skip

LLAMA = make_relative(
    "llama",
    "LlamaForCausalLM",
    fixed={name: value for name, value in LIKE_LLAMA.items() if name != "bias"},
    biases={**ATTENTION_BIAS, "mlp_bias": "bias"},
)

MISTRAL = make_relative(
    "mistral",
    "MistralForCausalLM",
    chosen=("window",),
    read=lambda config: {"window": config["sliding_window"]},
    write=lambda config: {"sliding_window": config.window},
    defaults={"sliding_window": 4096, "num_key_value_heads": 8},
)

NO_WINDOWS: dict[str, Any] = {
    "only": {"use_sliding_window": (False,)},
    "write": lambda config: {"use_sliding_window": False},
}

QWEN2 = make_relative(
    "qwen2",
    "Qwen2ForCausalLM",
    fixed={**LIKE_LLAMA, "qkv_bias": True},
    defaults={"num_key_value_heads": 32},
    foreign=_find_derived_head_dim,
    **NO_WINDOWS,
)

QK_NORMED = Names(norms={**PRE_NORMS, **QK_NORMS})

QWEN3 = make_relative(
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

OLMO2 = make_relative(
    "olmo2",
    "Olmo2ForCausalLM",
    Names(norms={**POST_NORMS, **QK_NORMS}),
    fixed={
        **LIKE_LLAMA, "post_norm": True, "only_post_norm": True, "qk_norm": True, "qk_norm_joint": True,
    },
    defaults={"rms_norm_eps": 1e-5},
    foreign=_find_derived_head_dim,
    biases=ATTENTION_BIAS,
)  # fmt: skip


def _read_phi3(config: Json) -> dict[str, Any]:
    part = read_rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    rotated = None if part == 1 else int(head_dim * part)
    return {"window": config.get("sliding_window"), "rotary_dims": rotated}


def _write_phi3(config: DecoderConfig) -> dict[str, Any]:
    rope = rope_entries(config)["rope_parameters"]
    original = "original_max_position_embeddings"
    return {
        "sliding_window": config.window,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        original: rope.get(original, config.seq),
    }


def _foreign_to_phi3(config: DecoderConfig, model_type: str) -> list[str]:
    kind = config.rope_scaling.partition(":")[0]
    scaled = [f"rope_scaling is {kind!r}; phi3 has 'longrope' only"] if kind not in ("", "longrope") else []
    return scaled + _find_derived_head_dim(config, model_type)


PHI3 = make_relative(
    "phi3",
    "Phi3ForCausalLM",
    Names(
        maps={
            **dict.fromkeys(QKV, "self_attn.qkv_proj"), "attention/o": ATTENTION["attention/o"],
            **dict.fromkeys(("mlp/gate", "mlp/up"), "mlp.gate_up_proj"), "mlp/down": GATED_MLP["mlp/down"],
        }
    ),
    chosen=("window", "rotary_dims"),
    read=_read_phi3,
    write=_write_phi3,
    defaults={"rms_norm_eps": 1e-5},
    problems=lambda config: [
        f"rope_type is {kind!r}; Decoder has 'default' or 'longrope' only in this family"
        for kind in [read_rope(config).get("rope_type", read_rope(config).get("type", "default"))]
        if kind in ("linear", "llama3", "yarn")
    ],
    foreign=_foreign_to_phi3,
)  # fmt: skip


def _foreign_to_starcoder2(config: DecoderConfig, model_type: str) -> list[str]:
    found = _find_derived_head_dim(config, model_type)
    if not has_bias(config, "norm_bias"):
        norms = f"the layer norms of {model_type} have biases, use True"
        found.append(f"norm_bias is {config.norm_bias!r}; {norms}")
    return found


STARCODER2 = make_relative(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Names(maps={**ATTENTION, "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}),
    fixed={"positions": "rotary", "norm": "layernorm"},
    chosen=("window", "norm_bias"),
    activations={"gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"},
    # its norms have biases, whatever its projections have
    read=lambda config: {
        "window": config.get("sliding_window"), "norm_bias": None if config["use_bias"] else True,
    },
    write=lambda config: {"sliding_window": config.window},
    defaults={"num_key_value_heads": 2, "tie_word_embeddings": True, "norm_epsilon": 1e-5, "use_bias": True},
    foreign=_foreign_to_starcoder2,
    biases={"use_bias": "bias"},
    eps="norm_epsilon",
)  # fmt: skip


def _read_embed_scale(config: Json) -> dict[str, Any]:
    return {"embed_scale": math.sqrt(config["hidden_size"])}


def _foreign_to_gemma(config: DecoderConfig, model_type: str) -> list[str]:
    scale, wanted = config.embed_scale, math.sqrt(config.embed)
    return [] if scale == wanted else [f"embed_scale is {scale}; gemma has the root of embed, {wanted}"]


LIKE_GEMMA = {"positions": "rotary", "norm": "rmsnorm_plus_one", "bias": False}
TANH = {"gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
CAUSAL = {"use_bidirectional_attention": (False, None)}
OF_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}

GEMMA = make_relative(
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
    """Return what Gemma 2 and 3 let one choose."""
    scalar = config["query_pre_attn_scalar"]
    own = scalar == (config["head_dim"] or config["hidden_size"] // config["num_attention_heads"])
    return {
        **_read_embed_scale(config),
        **window_options(config, every),
        **{name: config[entry] for name, entry in CAPS.items()},
        "query_scale": None if own else scalar**-0.5,
    }


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    scalar = config.sizes[HEAD_DIM] if config.query_scale is None else config.query_scale**-2.0
    if round(scalar) and round(scalar) ** -0.5 == config.query_scale:
        scalar = round(scalar)
    caps = {entry: getattr(config, name) for name, entry in CAPS.items()}
    about = {"hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": scalar}
    return {**about, **caps, **window_entries(config)}


LATER_GEMMA = Names(norms={**PRE_NORMS, **POST_NORMS, "mlp_norm": "pre_feedforward_layernorm"})
CHOSEN_IN_GEMMA = ("embed_scale", "window", "full_every", "query_scale", *CAPS)
OF_LATER_GEMMA = {
    **OF_GEMMA, "num_key_value_heads": 4, "sliding_window": 4096, "query_pre_attn_scalar": 256,
}  # fmt: skip

GEMMA2 = make_relative(
    "gemma2",
    "Gemma2ForCausalLM",
    LATER_GEMMA,
    fixed={**LIKE_GEMMA, "post_norm": True},
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
        found.append("rope_scaling stretches windows too, which gemma3_text has not: set window_theta")
    return found


GEMMA3 = make_relative(
    "gemma3_text",
    "Gemma3ForCausalLM",
    Names(norms={**LATER_GEMMA.norms, **QK_NORMS}),
    fixed={**LIKE_GEMMA, "post_norm": True, "qk_norm": True},
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


def _experts_of(config: DecoderConfig) -> Experts:
    found = read_experts(config.experts)
    assert found is not None, "what foreign lists is refused first"
    return found


MIXTRAL = make_relative(
    "mixtral",
    "MixtralForCausalLM",
    Names(experts="block_sparse_moe", expert_maps={"up": "w3", "gate": "w1", "down": "w2"}),
    chosen=("window", "experts"),
    read=lambda config: {
        "window": config["sliding_window"],
        "experts": experts_text(Experts(num=config["num_local_experts"], top=config["num_experts_per_tok"])),
    },
    write=lambda config: {
        "sliding_window": config.window, "num_local_experts": _experts_of(config).num,
        "num_experts_per_tok": _experts_of(config).top,
    },
    defaults={
        "sliding_window": None, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    },
    problems=lambda config: expert_problems(config["num_local_experts"], config["num_experts_per_tok"]),
    foreign=list_foreign_experts,
)  # fmt: skip


def _qwen_experts(config: Json) -> dict[str, Any]:
    # transformers 5 writes the number of experts by another name than published files have
    num = config.get("num_experts", config.get("num_local_experts"))
    normalised = "chosen" if config["norm_topk_prob"] else "all"
    return {"num": num, "top": config["num_experts_per_tok"], "normalised": normalised}


def _read_qwen_moe(config: Json, **keys: Any) -> dict[str, Any]:
    """Return the mixture, and the hidden features of one expert."""
    experts = experts_text(Experts(**_qwen_experts(config), **keys))
    return {"experts": experts, "mlp": config["moe_intermediate_size"]}


def _read_qwen2_moe(config: Json) -> dict[str, Any]:
    shared = config["shared_expert_intermediate_size"] // config["moe_intermediate_size"]
    return _read_qwen_moe(config, shared=shared, shared_gate="sigmoid")


def _write_qwen_moe(config: DecoderConfig) -> dict[str, Any]:
    options = _experts_of(config)
    return {
        "use_sliding_window": False,
        "num_experts": options.num,
        "num_experts_per_tok": options.top,
        "norm_topk_prob": options.normalised == "chosen",
        "moe_intermediate_size": config.sizes[MLP],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_qwen2_moe(config: DecoderConfig) -> dict[str, Any]:
    shared = _experts_of(config).shared * config.sizes[MLP]
    return {**_write_qwen_moe(config), "shared_expert_intermediate_size": shared}


def _qwen2_problems(config: Json) -> list[str]:
    wide, one = config["shared_expert_intermediate_size"], config["moe_intermediate_size"]
    found = expert_problems(**_qwen_experts(config))
    if wide % one:
        multiples = f"multiples of moe_intermediate_size, {one}"
        found.append(f"shared_expert_intermediate_size is {wide}; Decoder has {multiples}")
    return found


def _foreign_to_qwen2_moe(config: DecoderConfig, model_type: str) -> list[str]:
    found = list_foreign_experts(config, model_type, ("normalised", "shared", "shared_gate"))
    options = read_experts(config.experts)
    if options and options.shared_gate != "sigmoid":
        found.append("experts: the shared feed-forward has no gate; qwen2_moe has shared_gate=sigmoid only")
    return _find_derived_head_dim(config, model_type) + found


# every block has a mixture, and no window
ALL_SPARSE = {**NO_WINDOWS["only"], "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}

QWEN2_MOE = make_relative(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    chosen=("experts",),
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
    only=ALL_SPARSE,
    biases={"qkv_bias": "qkv_bias"},
    defaults={
        "qkv_bias": True, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "norm_topk_prob": False, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    problems=_qwen2_problems,
    foreign=_foreign_to_qwen2_moe,
)  # fmt: skip

QWEN3_MOE = make_relative(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    QK_NORMED,
    fixed={**LIKE_LLAMA, "qk_norm": True},
    chosen=("experts",),
    read=_read_qwen_moe,
    write=_write_qwen_moe,
    only=ALL_SPARSE,
    biases=ATTENTION_BIAS,
    defaults={
        "num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "num_local_experts": 128, "moe_intermediate_size": 768,
    },
    problems=lambda config: expert_problems(**_qwen_experts(config)),
    foreign=lambda config, model_type: list_foreign_experts(config, model_type, ("normalised",)),
)  # fmt: skip

DECODERS = (
    GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, STARCODER2, OLMO2, GEMMA, GEMMA2, GEMMA3, GPT_NEOX, MIXTRAL,
    QWEN2_MOE, QWEN3_MOE,
)  # fmt: skip
"""In the order in which a model is given the first that has all its options."""
