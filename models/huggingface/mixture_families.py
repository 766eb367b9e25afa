"""List the families of decoders with a mixture of experts in files of Hugging Face.

`decoder_families.py` lists the families without experts; `decoders.py` has what all share.
"""

from dataclasses import fields
from functools import partial
from typing import Any

from shardtrain.axes import MLP
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.models.huggingface.decoders import (
    ATTENTION_BIAS,
    LIKE_LLAMA,
    NO_WINDOWS,
    QK_NORMED,
    WINDOW,
    Json,
    Names,
    check_head_dim,
    make_llama_relative,
)
from shardtrain.models.huggingface.place import option_problems


def _list_foreign(
    config: DecoderConfig, model_type: str, chosen: tuple[str, ...] = (), **fixed: Any
) -> list[str]:
    """List the options of a mixture that a family does not have.

    Args:
      config: the configuration of the model.
      model_type: the family.
      chosen: keys of `experts` that may have any value in the family, in addition to `num`, `top` and the
        keys for training.
      fixed: the values of other keys and properties in the family; all others have their defaults.
    """
    options = config.experts
    if options is None:
        return [f"experts is None; {model_type} has a mixture in each block"]
    # the last four are only for training, and not in files
    free = {"num", "top", *chosen, "capacity", "balance", "over", "z"}
    wanted = {f.name: f.default for f in fields(Experts) if f.name not in free} | fixed
    allowed = {name: (value,) for name, value in wanted.items()}
    return [f"experts: {problem}" for problem in option_problems(options, allowed, model_type)]


def _read_choice(config: Json) -> dict[str, Any]:
    # transformers 5 and published files name the number of experts differently
    num = config.get("num_experts", config.get("num_local_experts"))
    normalised = "chosen" if config.get("norm_topk_prob", True) else "all"
    return {"num": num, "top": config["num_experts_per_tok"], "normalised": normalised}


def _write_choice(config: Any, num: str) -> dict[str, Any]:
    return {num: config.experts.num, "num_experts_per_tok": config.experts.top}


def _find_problems(config: Json) -> list[str]:
    """List why a mixture of experts cannot be trained.

    >>> _find_problems({"num_experts": 2, "num_experts_per_tok": 4})
    ['num_experts_per_tok is 4, and there are 2 experts']
    """
    choice = _read_choice(config)
    if choice["top"] > choice["num"]:
        return [f"num_experts_per_tok is {choice['top']}, and there are {choice['num']} experts"]
    if choice["top"] == 1 and choice["normalised"] == "chosen":
        return ["num_experts_per_tok is 1, and weights that add up to 1 train no router"]
    return []


MIXTRAL = make_llama_relative(
    "mixtral",
    "MixtralForCausalLM",
    Names(experts="block_sparse_moe", expert_maps={"up": "w3", "gate": "w1", "down": "w2"}),
    entries=WINDOW,
    chosen=("experts",),
    read=lambda config: {"experts": Experts(**_read_choice(config))},
    write=partial(_write_choice, num="num_local_experts"),
    defaults={
        "sliding_window": None, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    },
    problems=_find_problems,
    foreign=partial(_list_foreign, is_normalised=True),
)  # fmt: skip


def _read_qwen_moe(config: Json, **keys: Any) -> dict[str, Any]:
    """Read the experts and the hidden features of one expert."""
    return {"experts": Experts(**_read_choice(config), **keys), "mlp": config["moe_intermediate_size"]}


def _read_qwen2_moe(config: Json) -> dict[str, Any]:
    shared = config["shared_expert_intermediate_size"] // config["moe_intermediate_size"]
    return _read_qwen_moe(config, shared=shared, shared_gate="sigmoid")


def _write_qwen_moe(config: Any) -> dict[str, Any]:
    return {
        **_write_choice(config, "num_experts"),
        "use_sliding_window": False,
        "norm_topk_prob": config.experts.is_normalised,
        "moe_intermediate_size": config.sizes[MLP],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _write_qwen2_moe(config: Any) -> dict[str, Any]:
    shared = config.experts.shared * config.sizes[MLP]
    return {**_write_qwen_moe(config), "shared_expert_intermediate_size": shared}


def _qwen2_problems(config: Json) -> list[str]:
    wide, one = config["shared_expert_intermediate_size"], config["moe_intermediate_size"]
    found = _find_problems(config)
    if wide % one:
        multiples = f"multiples of moe_intermediate_size, {one}"
        found.append(f"shared_expert_intermediate_size is {wide}; Decoder has {multiples}")
    return found


def _foreign_to_qwen2_moe(config: DecoderConfig, model_type: str) -> list[str]:
    found = _list_foreign(config, model_type, ("normalised", "shared"), shared_gate="sigmoid")
    return check_head_dim(config, model_type) + found


# every block has experts, and none has a window
ALL_SPARSE = {**NO_WINDOWS["only"], "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}

QWEN2_MOE = make_llama_relative(
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

QWEN3_MOE = make_llama_relative(
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
    problems=_find_problems,
    foreign=partial(_list_foreign, chosen=("normalised",)),
)  # fmt: skip
