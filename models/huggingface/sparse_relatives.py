"""The relatives of Llama with mixtures of experts: in what each family differs. See `relatives.py`.

`mixtures.py` has what they share. Published files have the entries that `read` reads; the defaults are those
of the configuration classes of transformers 5.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardtrain.axes import MLP
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts, read_experts
from shardtrain.models.huggingface.llama import Relative, family
from shardtrain.models.huggingface.mixtures import (
    ExpertNames,
    expert_problems,
    experts_option,
    foreign_experts,
    sums_to_one,
)
from shardtrain.models.huggingface.relatives import LIKE_LLAMA, MISTRAL, QWEN2, QWEN3

ALL_SPARSE = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
"""Every block has a mixture."""


def _options(config: DecoderConfig) -> Experts:
    found = read_experts(config.experts)
    assert found is not None, "what foreign lists is refused first"
    return found


def _of_experts(make: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    """Return a reader of the mixture, and of the hidden features of one expert."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {"mlp": config["moe_intermediate_size"]} if "moe_intermediate_size" in config else {}
        return {"experts": experts_option(make(config)), **sizes}

    return read


MIXTRAL = replace(
    MISTRAL,
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    chosen=("window", "experts"),
    read=lambda config: {
        **MISTRAL.read(config),
        **_of_experts(lambda c: {"num": c["num_local_experts"], "top": c["num_experts_per_tok"]})(config),
    },
    write=lambda config: {
        **MISTRAL.write(config),
        "num_local_experts": _options(config).num,
        "num_experts_per_tok": _options(config).top,
    },
    defaults={
        "sliding_window": None, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
    },
    problems=lambda config: expert_problems(config["num_local_experts"], config["num_experts_per_tok"]),
    foreign=lambda config: foreign_experts(config, "mixtral", ()),
    experts=ExpertNames(block="block_sparse_moe", maps={"up": "w3", "gate": "w1", "down": "w2"}),
)  # fmt: skip


def _qwen_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 writes the number of experts by another name than published files have
    num = config.get("num_experts", config.get("num_local_experts"))
    return {"num": num, "top": config["num_experts_per_tok"], **sums_to_one(config)}


def _qwen2_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    shared = config["shared_expert_intermediate_size"] // config["moe_intermediate_size"]
    return {**_qwen_experts(config), "shared": shared, "shared_gate": "sigmoid"}


def _qwen_entries(config: DecoderConfig) -> dict[str, Any]:
    options = _options(config)
    return {
        "num_experts": options.num,
        "num_experts_per_tok": options.top,
        "norm_topk_prob": options.normalised == "chosen",
        "moe_intermediate_size": config.sizes[MLP],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen_problems(config: Mapping[str, Any]) -> list[str]:
    found = _qwen_experts(config)
    return expert_problems(found["num"], found["top"], normalised=found["normalised"])


def _qwen2_problems(config: Mapping[str, Any]) -> list[str]:
    wide, one = config["shared_expert_intermediate_size"], config["moe_intermediate_size"]
    if wide % one == 0:
        return _qwen_problems(config)
    return [
        *_qwen_problems(config),
        f"shared_expert_intermediate_size is {wide}; Decoder has multiples of moe_intermediate_size, {one}",
    ]


def _qwen2_foreign(config: DecoderConfig) -> list[str]:
    found = foreign_experts(config, "qwen2_moe", ("normalised", "shared", "shared_gate"))
    options = read_experts(config.experts)
    if options and options.shared_gate != "sigmoid":
        found.append("experts: the shared feed-forward has no gate; qwen2_moe has shared_gate=sigmoid only")
    return QWEN2.foreign(config) + found


QWEN2_MOE = replace(
    QWEN2,
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    fixed=LIKE_LLAMA,
    chosen=("experts",),
    read=_of_experts(_qwen2_experts),
    write=lambda config: {
        **QWEN2.write(config),
        **_qwen_entries(config),
        "shared_expert_intermediate_size": _options(config).shared * config.sizes[MLP],
    },
    only={**QWEN2.only, **ALL_SPARSE},
    biases={"qkv_bias": "qkv_bias"},
    defaults={
        "qkv_bias": True,
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    },
    problems=_qwen2_problems,
    foreign=_qwen2_foreign,
    experts=ExpertNames(),
)  # fmt: skip

QWEN3_MOE = replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    chosen=("experts",),
    read=_of_experts(_qwen_experts),
    write=lambda config: {**QWEN3.write(config), **_qwen_entries(config)},
    only={**QWEN3.only, **ALL_SPARSE},
    defaults={
        "num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "num_local_experts": 128, "moe_intermediate_size": 768,
    },
    problems=_qwen_problems,
    foreign=lambda config: foreign_experts(config, "qwen3_moe", ("normalised",)),
    experts=ExpertNames(),
)  # fmt: skip

SPARSE: tuple[Relative, ...] = (MIXTRAL, QWEN2_MOE, QWEN3_MOE)
SPARSE_RELATIVES = tuple(map(family, SPARSE))
"""In the order in which a model is given the first that has all its options."""
