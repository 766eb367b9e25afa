"""The GPT-2 family of Hugging Face as `Decoder`: learned positions, layer norms, biases. See
`place.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, SEQ, VOCAB
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.place import KERNELS, Copy, Family, Place, entry_problems, option_problems

PREFIX = "transformer."
HEAD = "lm_head.weight"
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}
NEEDED = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
ONLY = {
    "activation_function": tuple(ACTIVATIONS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def places(config: DecoderConfig) -> Iterator[Place]:
    """List the places of a GPT-2 model: matrices are (in, out); queries, keys and values are one array."""
    yield Place(path="embedding", name=f"{PREFIX}wte.weight", dims=(VOCAB, EMBED))
    yield Place(path="positions", name=f"{PREFIX}wpe.weight", dims=(SEQ, EMBED))
    names = {"attention/o": "attn.c_proj", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"}
    names = {path: (name, 0, ()) for path, name in names.items()}
    parts = ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM))
    names |= {f"attention/{which}": ("attn.c_attn", part, parts) for part, which in enumerate("qkv")}
    for path, (name, part, parts) in names.items():
        into, out = KERNELS[path]
        bias = Place(
            path=f"blocks/{path}/bias",
            name=f"{PREFIX}h.{{}}.{name}.bias",
            dims=out,
            part=part,
            parts=parts,
        )
        yield bias
        yield replace(
            bias,
            path=f"blocks/{path}/kernel",
            name=f"{PREFIX}h.{{}}.{name}.weight",
            dims=(*into, *out),
            num_in=len(into),
        )
    norms = {"blocks/attention_norm": "h.{}.ln_1", "blocks/mlp_norm": "h.{}.ln_2", "final_norm": "ln_f"}
    for path, name in norms.items():
        yield Place(path=f"{path}/scale", name=f"{PREFIX}{name}.weight", dims=(EMBED,))
        yield Place(path=f"{path}/bias", name=f"{PREFIX}{name}.bias", dims=(EMBED,))
    yield from head_places(config)


def head_places(config: DecoderConfig) -> Iterator[Place]:
    """List the place of an untied head, if there is one."""
    if not config.tied:
        yield Place(path="head/kernel", name=HEAD, dims=(EMBED, VOCAB), num_in=1, transposed=True)


def copies(config: DecoderConfig) -> Iterator[Copy]:
    """List the second name of a tied head."""
    if config.tied:
        yield Copy(name=HEAD, of=f"{PREFIX}wte.weight", tied=True)


def read(config: Mapping[str, Any]) -> tuple[list[str], Callable[[], DecoderConfig]]:
    """See `Family.read`."""

    def made() -> DecoderConfig:
        return DecoderConfig(
            vocab=config["vocab_size"],
            seq=config["n_positions"],
            embed=config["n_embd"],
            num_layers=config["n_layer"],
            num_heads=config["n_head"],
            mlp=config.get("n_inner"),
            eps=config.get("layer_norm_epsilon", 1e-5),
            activation=ACTIVATIONS[config.get("activation_function", "gelu_new")],  # type: ignore[arg-type]
            tied=config.get("tie_word_embeddings", True),
        )

    return entry_problems(config, NEEDED, ONLY, "Decoder"), made


def write(config: DecoderConfig) -> dict[str, Any]:
    """See `Family.write`."""
    return {
        "vocab_size": config.vocab,
        "n_positions": config.seq,
        "n_embd": config.embed,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.sizes[MLP],
        "activation_function": "gelu_new" if config.activation == "gelu" else "gelu",
        "layer_norm_epsilon": config.eps,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tied,
    }


def foreign(config: DecoderConfig) -> list[str]:
    """See `Family.foreign`."""
    wanted = {
        "positions": ("learned",),
        "norm": ("layernorm",),
        "activation": ("gelu", "gelu_erf"),
        "bias": (True,),
    }
    size, found = config.sizes, option_problems(config, wanted, "gpt2")
    if size[KV_HEADS] != size[HEADS]:
        found.append(f"num_kv_heads is {size[KV_HEADS]}; gpt2 has as many as query heads, {size[HEADS]}")
    if size[HEADS] * size[HEAD_DIM] != size[EMBED]:
        found.append(f"head_dim is {size[HEAD_DIM]}; gpt2 has embed // num_heads only")
    return found


GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    kind=DecoderConfig,
    prefix=PREFIX,
    heads=("lm_head.",),
    places=places,
    copies=copies,
    read=read,
    write=write,
    foreign=foreign,
)
