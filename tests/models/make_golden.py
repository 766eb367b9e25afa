"""Write golden/*.npz: tiny random models of Hugging Face transformers, with logits and gradients; and in
golden/generated/*.npz the likeliest continuations of prompts.

Needs torch and transformers, which the tests do not: `python tests/models/make_golden.py [NAME...]` from
anywhere. `test_parity.py` compares our models with what stands in these files. Float32, on the CPU, seeded.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from transformers.core_model_loading import (  # pyright: ignore[reportMissingImports]
    revert_weight_conversion,
)

GOLDEN = Path(__file__).parent / "golden"
GENERATING = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "starcoder2",
    "mixtral", "olmo2", "gpt_neox",
)  # fmt: skip
"""Models whose continuations of prompts are written too."""
BUFFERS = ("running_mean", "running_var")
"""Endings of names of arrays that are no parameters, and written all the same."""
SIZES = {"vocab": 32, "seq": 12, "embed": 16, "layers": 2, "heads": 4}


def gpt2() -> transformers.PreTrainedModel:
    """A GPT-2: learned positions, layer norm, gelu, biases, tied head."""
    config = transformers.GPT2Config(
        vocab_size=SIZES["vocab"],
        n_positions=SIZES["seq"],
        n_embd=SIZES["embed"],
        n_layer=SIZES["layers"],
        n_head=SIZES["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def relative(name: str, **changes: Any) -> transformers.PreTrainedModel:
    """A model of Llama's kind, of class NAMEForCausalLM: grouped queries, a head_dim of its own, untied."""
    options = {
        "vocab_size": SIZES["vocab"],
        "max_position_embeddings": SIZES["seq"],
        "hidden_size": SIZES["embed"],
        "intermediate_size": 24,
        "num_hidden_layers": SIZES["layers"],
        "num_attention_heads": SIZES["heads"],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        # the only kind that has soft caps
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")
    options = {**options, **changes}
    options = {key: value for key, value in options.items() if (key, value) != ("head_dim", None)}
    return getattr(transformers, f"{name}ForCausalLM")(config(**options))


def llama() -> transformers.PreTrainedModel:
    """A Llama."""
    return relative("Llama")


def llama3() -> transformers.PreTrainedModel:
    """A Llama 3: some wavelengths are left, some stretched, some in between."""
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "original_max_position_embeddings": 40, **scaling}
    return relative("Llama", rope_parameters=rope, tie_word_embeddings=True)


def mistral() -> transformers.PreTrainedModel:
    """A Mistral: sliding windows."""
    return relative("Mistral", sliding_window=4)


def qwen2() -> transformers.PreTrainedModel:
    """A Qwen 2.5: biases of queries, keys and values, wavelengths by YaRN, a head_dim that is not its own."""
    scaling = {"factor": 3.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.25}
    rope = {"rope_type": "yarn", "rope_theta": 100.0, **scaling}
    return relative("Qwen2", rope_parameters=rope, hidden_size=32, head_dim=None)


def qwen3() -> transformers.PreTrainedModel:
    """A Qwen 3: norms of each query and key head."""
    return relative("Qwen3")


def gemma() -> transformers.PreTrainedModel:
    """A Gemma: scales of norms around 0, gated tanh-gelu, a scaled embedding, tied head."""
    return relative("Gemma", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)


def gemma2() -> transformers.PreTrainedModel:
    """A Gemma 2: windows in every second block, soft caps, norms behind both halves, a query scale."""
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 5}
    return relative("Gemma2", **caps, sliding_window=4, num_hidden_layers=3, tie_word_embeddings=True)


def gemma3() -> transformers.PreTrainedModel:
    """A Gemma 3: two windowed blocks to one without, which has wavelengths of its own, stretched."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    }
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    windows = {"sliding_window": 4, "layer_types": kinds, "num_hidden_layers": 4, "query_pre_attn_scalar": 8}
    return relative("Gemma3", rope_parameters=rope, **windows, tie_word_embeddings=True)


def phi3() -> transformers.PreTrainedModel:
    """A Phi-3: queries, keys and values in one matrix, half of each head rotated."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    return relative("Phi3", rope_parameters=rope, hidden_size=32, head_dim=None, sliding_window=4)


def phi3_long(seq: int = 24, original: int = 8) -> transformers.PreTrainedModel:
    """A Phi-3 with LongRoPE, on more positions than it was first trained on: by the long factors."""
    rope = {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    factors = {"short_factor": [1.0, 1.25], "long_factor": [1.5, 7.0]}
    seqs = {"max_position_embeddings": seq, "original_max_position_embeddings": original}
    return relative("Phi3", rope_parameters=rope | factors, hidden_size=32, head_dim=None, **seqs)


def phi3_short() -> transformers.PreTrainedModel:
    """The same on no more positions than that: by the short factors."""
    return phi3_long(original=12)


def mixtral() -> transformers.PreTrainedModel:
    """A Mixtral: two of four experts for each token."""
    return relative("Mixtral", num_local_experts=4, num_experts_per_tok=2)


def qwen2_moe() -> transformers.PreTrainedModel:
    """A Qwen2-MoE: weights that do not add up to 1, and a shared expert behind a gate of its own."""
    experts = {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": False}
    sizes = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 24}
    return relative("Qwen2Moe", **experts, **sizes, hidden_size=32, head_dim=None)


def qwen3_moe() -> transformers.PreTrainedModel:
    """A Qwen3-MoE: norms of each query and key head, weights that add up to 1."""
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return relative("Qwen3Moe", **experts, moe_intermediate_size=12)


def starcoder2() -> transformers.PreTrainedModel:
    """A StarCoder 2: layer norms, biases everywhere, rotary positions."""
    return relative("Starcoder2", hidden_size=32, head_dim=None, sliding_window=4, tie_word_embeddings=True)


def olmo2() -> transformers.PreTrainedModel:
    """An OLMo 2: norms behind the halves alone, and of all heads of queries and of keys together."""
    return relative("Olmo2", hidden_size=32, head_dim=None)


def gpt_neox() -> transformers.PreTrainedModel:
    """A GPT-NeoX: halves that read the same stream, a quarter of each head rotated, biases."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    config = transformers.GPTNeoXConfig(
        vocab_size=SIZES["vocab"], max_position_embeddings=SIZES["seq"], hidden_size=32, intermediate_size=24,
        num_hidden_layers=SIZES["layers"], num_attention_heads=SIZES["heads"], rope_parameters=rope,
        hidden_dropout=0.0, attention_dropout=0.0, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


def bert() -> transformers.PreTrainedModel:
    """A BERT with its head for masked tokens: token types, norms behind the blocks' halves, tied head."""
    config = transformers.BertConfig(
        vocab_size=SIZES["vocab"],
        max_position_embeddings=SIZES["seq"],
        hidden_size=SIZES["embed"],
        intermediate_size=24,
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        type_vocab_size=3,
        pad_token_id=None,  # its embedding would get no gradient from the input
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def vit() -> transformers.PreTrainedModel:
    """A ViT with its classifier: a class token, norms before the blocks' halves, images of 2 x 2 patches."""
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=3,
        hidden_size=SIZES["embed"],
        intermediate_size=24,
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def resnet(kind: str, depths: list[int], filters: int) -> transformers.PreTrainedModel:
    """A ResNet with its classifier, whose norms have running statistics."""
    sizes = [filters * (4 if kind == "bottleneck" else 1) * 2**group for group in range(4)]
    config = transformers.ResNetConfig(
        embedding_size=filters, hidden_sizes=sizes, depths=depths, layer_type=kind, num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def resnet18() -> transformers.PreTrainedModel:
    """Blocks of two convolutions."""
    return resnet("basic", [2, 2, 2, 2], 2)


def resnet50() -> transformers.PreTrainedModel:
    """Blocks of three convolutions, the widest ones outside."""
    return resnet("bottleneck", [3, 4, 6, 3], 1)


def t5() -> transformers.PreTrainedModel:
    """A T5 1.0: relative positions, relu, tied head with a scale, unequal numbers of layers."""
    return encoder_decoder("relu")


def t5_v1_1() -> transformers.PreTrainedModel:
    """A T5 1.1: gated gelu, and a head of its own without a scale, as the published files have it."""
    model = encoder_decoder("gated-gelu", tie_word_embeddings=False)
    model.lm_head.weight = torch.nn.Parameter(model.shared.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


def encoder_decoder(activation: str, **changes: Any) -> transformers.PreTrainedModel:
    """A T5 whose distances reach all buckets."""
    config = transformers.T5Config(
        vocab_size=SIZES["vocab"], d_model=SIZES["embed"], d_kv=8, d_ff=24, num_layers=SIZES["layers"],
        num_decoder_layers=3, num_heads=SIZES["heads"], relative_attention_num_buckets=8,
        relative_attention_max_distance=10, dropout_rate=0.0, feed_forward_proj=activation,
        decoder_start_token_id=0, **changes,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def causal_loss(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Cross-entropy of each next token."""
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return {"logits": logits, "loss": loss}


def masked_loss(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Cross-entropy of some tokens of which others stand in their place; the second text ends in padding."""
    generator = torch.Generator().manual_seed(seed)
    mask, segments = torch.ones_like(tokens), torch.zeros_like(tokens)
    mask[1, -4:] = 0
    segments[:, 5:] = 1
    segments[:, 9:] = 2
    chosen = (torch.rand(tokens.shape, generator=generator) < 0.4) & (mask > 0)
    targets = torch.randint(0, SIZES["vocab"], tokens.shape, generator=generator)
    logits = model(tokens, attention_mask=mask, token_type_ids=segments).logits
    loss = torch.nn.functional.cross_entropy(logits[chosen], targets[chosen])
    inputs = {"mask": mask, "segments": segments, "targets": targets, "chosen": chosen}
    return {"logits": logits, "loss": loss} | {name: value.int() for name, value in inputs.items()}


def image_loss(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Cross-entropy of the classes of random images (batch, colours, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn((3, 3, 8, 8), generator=generator)
    label = torch.tensor([4, 0, 2])
    logits = model(image).logits
    loss = torch.nn.functional.cross_entropy(logits, label)
    return {"logits": logits, "loss": loss, "image": image, "label": label.int()}


def image_logits(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Logits of random images (batch, colours, height, width) by the running statistics."""
    image = torch.randn((2, 3, 40, 32), generator=torch.Generator().manual_seed(seed))
    return {"logits": model(image).logits, "image": image}


def pair_loss(
    model: transformers.PreTrainedModel, tokens: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Cross-entropy of each next token of targets, of sources of which one ends in padding; and the likeliest
    targets."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, SIZES["vocab"], (2, 11), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, -4:] = 0
    logits = model(tokens, attention_mask=mask, decoder_input_ids=target[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
    likeliest = {"do_sample": False, "min_new_tokens": 9, "max_new_tokens": 9, "use_cache": False}
    generated = model.generate(tokens, attention_mask=mask, **likeliest)
    found = {"target": target, "mask": mask, "generated": generated}
    return {"logits": logits, "loss": loss} | {name: value.int() for name, value in found.items()}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter, large enough that it matters: norms around 1, or Gemma's 0, the rest around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias") or name.endswith("running_mean"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator)
            middle = 0 if "Gemma" in type(model).__name__ else 1
            if "ResNet" in type(model).__name__ and parameter.ndim == 4:
                # few channels: a signal that does not fade
                noise *= 5 * (2 / parameter[0].numel()) ** 0.5
            parameter.copy_(middle + 0.3 * noise if is_scale else 0.2 * noise)


def write(name: str, model: transformers.PreTrainedModel, seed: int, run: Callable[..., dict]) -> None:
    """Run one model forward and backward and store all that a comparison needs."""
    randomise(model.float().eval(), seed)
    tokens = torch.randint(
        0, SIZES["vocab"], (2, SIZES["seq"]), generator=torch.Generator().manual_seed(seed)
    )
    found = run(model, tokens, seed)
    weights = {key: parameter.detach() for key, parameter in model.named_parameters()}
    weights |= {key: x for key, x in model.named_buffers() if key.endswith(BUFFERS)}
    gradients = {}
    if "loss" in found:
        found["loss"].backward()
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    # in memory experts are one array; in files they are one each
    arrays = {f"weight/{key}": x for key, x in revert_weight_conversion(model, weights).items()}
    arrays |= {f"gradient/{key}": x for key, x in revert_weight_conversion(model, gradients).items()}
    arrays |= {"tokens": tokens.int()} | {name: value.detach() for name, value in found.items()}
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    np.savez_compressed(
        GOLDEN / f"{name}.npz",
        config=json.dumps(model.config.to_dict(), default=str),
        versions=json.dumps(about),
        **{key: value.numpy() for key, value in arrays.items()},
    )


def write_generated(name: str, model: transformers.PreTrainedModel, seed: int) -> None:
    """Store prompts of several lengths, and the likeliest continuation of each, by the weights of `name`."""
    randomise(model.float().eval(), seed)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for length in (1, 3, 6):
        prompt = torch.randint(0, SIZES["vocab"], (1, length), generator=generator)
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=SIZES["seq"] - length,
            max_new_tokens=SIZES["seq"] - length,
            pad_token_id=0,
        )
        found |= {f"prompt{length}": prompt[0].int().numpy(), f"tokens{length}": tokens[0].int().numpy()}
    np.savez_compressed(GOLDEN / "generated" / f"{name}.npz", **found)


if __name__ == "__main__":
    (GOLDEN / "generated").mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(True)
    of_llama = (llama3, mistral, qwen2, qwen3, gemma, gemma2, gemma3, phi3, starcoder2)
    of_llama = (*of_llama, phi3_long, phi3_short)
    # seeds with which every expert has tokens
    of_experts = ((201, mixtral), (201, qwen2_moe), (201, qwen3_moe))
    losses = {bert: masked_loss, vit: image_loss, resnet18: image_logits, resnet50: image_logits}
    losses |= {t5: pair_loss, t5_v1_1: pair_loss}
    of_images = ((100, vit), (101, resnet18), (102, resnet50))
    seeded = [
        *enumerate((gpt2, llama, bert, *of_llama), 1),
        *of_images,
        (103, t5),
        (104, t5_v1_1),
        (105, olmo2),
        (106, gpt_neox),
        *of_experts,
    ]
    for seed, make in seeded:
        if make.__name__ in (sys.argv[1:] or [make.__name__]):
            write(make.__name__, make(), seed, losses.get(make, causal_loss))
            if make.__name__ in GENERATING:
                write_generated(make.__name__, make(), seed)
