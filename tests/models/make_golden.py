"""Write golden/*.npz: tiny random GPT-2, Llama and BERT models of Hugging Face transformers, with logits and
gradients.

Needs torch and transformers, which the tests do not: `python tests/models/make_golden.py [NAME...]` from
anywhere. `test_parity.py` compares our models with what stands in these files. Float32, on the CPU, seeded.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]

GOLDEN = Path(__file__).parent / "golden"
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


def llama() -> transformers.PreTrainedModel:
    """A Llama: rotary positions, grouped queries, swiglu, untied head, a head_dim of its own."""
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocab"],
        max_position_embeddings=SIZES["seq"],
        hidden_size=SIZES["embed"],
        intermediate_size=24,
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=2,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


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


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw every parameter, large enough that it matters: norms around 1, the rest, biases too, around 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_scale = parameter.ndim == 1 and name.endswith("weight")
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if is_scale else 0.2 * noise)


def write(name: str, model: transformers.PreTrainedModel, seed: int, run: Callable[..., dict]) -> None:
    """Run one model forward and backward and store all that a comparison needs."""
    randomise(model.float().eval(), seed)
    tokens = torch.randint(
        0, SIZES["vocab"], (2, SIZES["seq"]), generator=torch.Generator().manual_seed(seed)
    )
    found = run(model, tokens, seed)
    found["loss"].backward()
    arrays = {f"weight/{key}": parameter.detach() for key, parameter in model.named_parameters()}
    arrays |= {f"gradient/{key}": parameter.grad for key, parameter in model.named_parameters()}
    arrays |= {"tokens": tokens.int()} | {name: value.detach() for name, value in found.items()}
    about = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    np.savez_compressed(
        GOLDEN / f"{name}.npz",
        config=json.dumps(model.config.to_dict(), default=str),
        versions=json.dumps(about),
        **{key: value.numpy() for key, value in arrays.items()},
    )


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    torch.use_deterministic_algorithms(True)
    for name, make, seed, run in (
        ("gpt2", gpt2, 1, causal_loss),
        ("llama", llama, 2, causal_loss),
        ("bert", bert, 3, masked_loss),
    ):
        if name in (sys.argv[1:] or [name]):
            write(name, make(), seed, run)
