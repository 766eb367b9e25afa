"""Check the entries of a Hugging Face config.json: types, ranges, and values that our models support."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import check_whole_number, finite_number


def label_problems(config: Mapping[str, Any]) -> list[str]:
    """List problems of the names of classes in a config.json."""
    labels = config.get("id2label")
    if labels is None or (isinstance(labels, Mapping) and labels):
        return []
    return [f"id2label is {short(labels)}; it is an object with the name of each class"]


def count_labels(config: Mapping[str, Any]) -> int:
    """Return the number of classes of a config.json, two if it names none."""
    labels = config.get("id2label")
    return 2 if labels is None else len(labels)


def write_labels(num: int) -> dict[str, Any]:
    """Return the entries of config.json with a name for each class."""
    names = [f"LABEL_{i}" for i in range(num)]
    return {
        "id2label": dict(zip(map(str, range(num)), names, strict=True)),
        "label2id": {name: i for i, name in enumerate(names)},
    }


def entry_problems(
    config: Mapping[str, Any], needed: Iterable[str], only: Mapping[str, tuple[Any, ...]], ours: str
) -> list[str]:
    """List entries of a config.json that are missing, or have a value that our model does not support.

    >>> entry_problems({"hidden_act": "relu"}, ["vocab_size"], {"hidden_act": ("gelu", "silu")}, "Decoder")
    ['vocab_size is missing', "hidden_act is 'relu'; Decoder has 'gelu' or 'silu' only"]
    """
    found = [f"{name} is missing" for name in needed if name not in config]
    for name, allowed in only.items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            found.append(f"{name} is {short(value)}; {ours} has {' or '.join(map(repr, allowed))} only")
    return found


SIZES = (
    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "max_position_embeddings",
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "type_vocab_size", "sliding_window", "sliding_window_pattern", "max_window_layers",
    "original_max_position_embeddings", "image_size", "patch_size", "num_channels", "num_experts",
    "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "embedding_size", "image_height", "image_width",
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
    "relative_attention_num_buckets", "relative_attention_max_distance",
)  # fmt: skip
OPTIONAL = (
    "n_inner", "attention_bias", "mlp_bias", "use_bias", "qkv_bias",
    "num_key_value_heads", "num_decoder_layers", "head_dim", "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
RANGES = {
    **dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "norm_epsilon"), (1e-30, 1.0)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base", "factor"), (1.0, 1e15)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (1e-6, 1e15)),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), (1e-6, 1e15)),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "query_pre_attn_scalar"), (1e-6, 1e15)),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1e-6, 1.0)),
}
FACTORS = ("short_factor", "long_factor")
SWITCHES = (
    "tie_word_embeddings", "norm_topk_prob", "scale_decoder_outputs", "use_parallel_residual",
    "attention_bias", "mlp_bias", "use_bias", "qkv_bias",
)  # fmt: skip
TABLES = ("rope_parameters", "rope_scaling", "full_attention", "sliding_attention")
MOST_SIZE = 2**31 - 1


def value_problems(config: Mapping[str, Any]) -> list[str]:
    """List entries of a config.json that have a wrong type, or are out of range.

    >>> value_problems({"n_layer": "9", "n_inner": None, "rms_norm_eps": float("inf"), "rope_scaling": 3})
    ["n_layer is '9'; it is a whole number from 1 to 2147483647", \
'rms_norm_eps is inf; it is a number from 1e-30 to 1', 'rope_scaling is 3; it is an object, or null']
    """
    problems = []
    for name, value in config.items():
        if value is None and name in OPTIONAL:
            continue
        if name in SIZES:
            # where transformers writes no window as 0
            least = 0 if name == "sliding_window" else 1
            problems += find_problem(check_whole_number, value, name, MOST_SIZE, least)
        elif name in RANGES:
            least, most = RANGES[name]
            problems += find_problem(finite_number, value, name, most, least)
        elif name in FACTORS:
            numbers = value if isinstance(value, list) else []
            if not numbers or any(find_problem(finite_number, x, name, 1e15, 1e-6) for x in numbers):
                problems.append(f"{name} is {short(value)}; it is a list of numbers from 1e-6 to 1e15")
        elif name in SWITCHES and type(value) is not bool:
            problems.append(f"{name} is {short(value)}; it is true or false")
        elif name in TABLES and value is not None:
            known = isinstance(value, Mapping)
            problems += (
                value_problems(value) if known else [f"{name} is {short(value)}; it is an object, or null"]
            )
    return problems


def find_problem(check: Callable[..., Any], *arguments: Any) -> list[str]:
    """Call a check that raises ValueError; return its message in a list, empty if it passes."""
    try:
        check(*arguments)
    except ValueError as error:
        return [str(error)]
    return []
