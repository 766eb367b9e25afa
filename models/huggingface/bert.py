"""The BERT family of Hugging Face as `Encoder`: with its head for masked tokens, without a pooler. See
`place.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardtrain.axes import EMBED, MLP, SEGMENTS, SEQ, VOCAB
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.huggingface.place import KERNELS, Copy, Family, Place, entry_problems

EMBEDDINGS, LAYER, HEAD = "bert.embeddings.", "bert.encoder.layer.{}.", "cls.predictions."
ACTIVATIONS = {
    "gelu": "gelu_erf",
    "gelu_python": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
NEEDED = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
ONLY = {
    "hidden_act": tuple(ACTIVATIONS),
    "position_embedding_type": ("absolute",),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
}


def places(config: EncoderConfig) -> Iterator[Place]:
    """List the places of a BERT model, whose matrices are (out, in), each with a bias."""
    # embeddings
    tables = {
        "embedding": ("word_embeddings", VOCAB),
        "positions": ("position_embeddings", SEQ),
        "segments": ("token_type_embeddings", SEGMENTS),
    }
    for path, (name, dim) in tables.items():
        yield Place(path=path, name=f"{EMBEDDINGS}{name}.weight", dims=(dim, EMBED))
    # the linear maps of the blocks
    names = {f"attention/{w[0]}": f"{LAYER}attention.self.{w}" for w in ("query", "key", "value")}
    names |= {
        "attention/o": f"{LAYER}attention.output.dense",
        "mlp/up": f"{LAYER}intermediate.dense",
        "mlp/down": f"{LAYER}output.dense",
    }
    for path, name in names.items():
        yield from _linear(f"blocks/{path}", name, *KERNELS[path])
    # norms, and last the head for masked tokens
    norms = {
        "embedding_norm": f"{EMBEDDINGS}LayerNorm",
        "blocks/attention_norm": f"{LAYER}attention.output.LayerNorm",
        "blocks/mlp_norm": f"{LAYER}output.LayerNorm",
        "transform_norm": f"{HEAD}transform.LayerNorm",
    }
    for path, name in norms.items():
        yield Place(path=f"{path}/scale", name=f"{name}.weight", dims=(EMBED,))
        yield Place(path=f"{path}/bias", name=f"{name}.bias", dims=(EMBED,))
    yield from _linear("transform", f"{HEAD}transform.dense", (EMBED,), (EMBED,))
    yield Place(path="head_bias", name=_bias_name(config), dims=(VOCAB,))
    if not config.tied:
        name = f"{HEAD}decoder.weight"
        yield Place(path="head/kernel", name=name, dims=(EMBED, VOCAB), num_in=1, transposed=True)


def _linear(path: str, name: str, into: tuple[str, ...], out: tuple[str, ...]) -> Iterator[Place]:
    yield Place(
        path=f"{path}/kernel", name=f"{name}.weight", dims=(*into, *out), num_in=len(into), transposed=True
    )
    yield Place(path=f"{path}/bias", name=f"{name}.bias", dims=out)


def _bias_name(config: EncoderConfig) -> str:
    """Return the name under which the head's bias is used; state dicts have it under two names."""
    return f"{HEAD}bias" if config.tied else f"{HEAD}decoder.bias"


def copies(config: EncoderConfig) -> Iterator[Copy]:
    """List the second names: a tied head and its bias, or the unused bias of an untied head."""
    if not config.tied:
        yield Copy(name=f"{HEAD}bias", of=f"{HEAD}decoder.bias", tied=False)
        return
    yield Copy(name=f"{HEAD}decoder.weight", of=f"{EMBEDDINGS}word_embeddings.weight", tied=True)
    yield Copy(name=f"{HEAD}decoder.bias", of=f"{HEAD}bias", tied=True)


def read(config: Mapping[str, Any]) -> tuple[list[str], Callable[[], EncoderConfig]]:
    """See `Family.read`."""

    def made() -> EncoderConfig:
        return EncoderConfig(
            vocab=config["vocab_size"],
            seq=config["max_position_embeddings"],
            embed=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            mlp=config["intermediate_size"],
            segments=config.get("type_vocab_size", 2),
            eps=config.get("layer_norm_eps", 1e-12),
            activation=ACTIVATIONS[config.get("hidden_act", "gelu")],  # type: ignore[arg-type]
            tied=config.get("tie_word_embeddings", True),
        )

    return entry_problems(config, NEEDED, ONLY, "Encoder"), made


def write(config: EncoderConfig) -> dict[str, Any]:
    """See `Family.write`."""
    return {
        "vocab_size": config.vocab,
        "max_position_embeddings": config.seq,
        "hidden_size": config.embed,
        "intermediate_size": config.sizes[MLP],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "type_vocab_size": config.segments,
        "hidden_act": "gelu" if config.activation == "gelu_erf" else "gelu_new",
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "tie_word_embeddings": config.tied,
    }


BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    kind=EncoderConfig,
    prefix="bert.",
    heads=("cls.",),
    places=places,
    copies=copies,
    left_out=("bert.pooler.", "cls.seq_relationship."),
    read=read,
    write=write,
    foreign=lambda config: [],
)
