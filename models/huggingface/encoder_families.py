"""Map Hugging Face's BERT to `Encoder` and ViT to `Vit`, with the head and without a pooler."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardtrain.axes import EMBED, HEIGHT, SEGMENTS, SEQ, VOCAB, WIDTH
from shardtrain.models.encoder import EncoderConfig
from shardtrain.models.huggingface.entries import count_labels, label_problems, write_labels
from shardtrain.models.huggingface.place import (
    BLOCK_ENTRIES,
    TOKEN_ENTRIES,
    Copy,
    Family,
    Place,
    option_problems,
    place_linear,
    place_norm,
)
from shardtrain.models.vit import VitConfig

ACTIVATIONS = {"gelu": "gelu_erf", "gelu_python": "gelu_erf", "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"}
HEAD = "cls.predictions."


def _place_blocks(
    layer: str, attention: str, norms: tuple[str, str], *, qkv_bias: bool = True
) -> Iterator[Place]:
    """List the places of the blocks, whose matrices are (out, in)."""
    for which in ("query", "key", "value"):
        name = f"{layer}attention.{attention}.{which}"
        yield from place_linear(f"blocks/attention/{which[0]}", name, bias=qkv_bias)
    yield from place_linear("blocks/attention/o", f"{layer}attention.output.dense")
    yield from place_linear("blocks/mlp/up", f"{layer}intermediate.dense")
    yield from place_linear("blocks/mlp/down", f"{layer}output.dense")
    for path, name in zip(("attention_norm", "mlp_norm"), norms, strict=True):
        yield from place_norm(f"blocks/{path}", layer + name)


def _list_bert_places(config: EncoderConfig) -> Iterator[Place]:
    tables = {
        "embedding": ("word_embeddings", VOCAB),
        "positions": ("position_embeddings", SEQ),
        "segments": ("token_type_embeddings", SEGMENTS),
    }
    for path, (name, dim) in tables.items():
        yield Place(path=path, name=f"bert.embeddings.{name}.weight", dims=(dim, EMBED))
    yield from place_norm("embedding_norm", "bert.embeddings.LayerNorm")
    norms = "attention.output.LayerNorm", "output.LayerNorm"
    yield from _place_blocks("bert.encoder.layer.{}.", "self", norms)
    # last the head for masked tokens; state dicts have its bias under two names, of which one is used
    yield from place_linear("transform", f"{HEAD}transform.dense")
    yield from place_norm("transform_norm", f"{HEAD}transform.LayerNorm")
    bias = f"{HEAD}bias" if config.tied else f"{HEAD}decoder.bias"
    yield Place(path="head_bias", name=bias, dims=(VOCAB,))
    if not config.tied:
        yield from place_linear("head", f"{HEAD}decoder", bias=False)


def _list_bert_copies(config: EncoderConfig) -> Iterator[Copy]:
    """List the other names of arrays: a tied head and its bias, or the unused bias of an untied head."""
    if not config.tied:
        yield Copy(name=f"{HEAD}bias", of=f"{HEAD}decoder.bias", tied=False)
        return
    yield Copy(name=f"{HEAD}decoder.weight", of="bert.embeddings.word_embeddings.weight", tied=True)
    yield Copy(name=f"{HEAD}decoder.bias", of=f"{HEAD}bias", tied=True)


BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    kind=EncoderConfig,
    prefix="bert.",
    heads=("cls.",),
    places=_list_bert_places,
    copies=_list_bert_copies,
    left_out=("bert.pooler.", "cls.seq_relationship."),
    entries={
        **TOKEN_ENTRIES, "segments": "type_vocab_size", "eps": "layer_norm_eps",
        "tied": "tie_word_embeddings",
    },
    defaults={"type_vocab_size": 2, "layer_norm_eps": 1e-12, "tie_word_embeddings": True},
    activations=ACTIVATIONS,
    only={
        "position_embedding_type": ("absolute",), "is_decoder": (False,), "add_cross_attention": (False,),
    },
    constant={"attention_probs_dropout_prob": 0.0},
    write=lambda config: {"hidden_dropout_prob": config.dropout},
)  # fmt: skip


def _list_vit_places(config: VitConfig) -> Iterator[Place]:
    embeddings = "vit.embeddings."
    yield Place(path="token", name=f"{embeddings}cls_token", dims=(EMBED,), num_ones=2)
    yield Place(path="positions", name=f"{embeddings}position_embeddings", dims=(SEQ, EMBED), num_ones=1)
    patches = f"{embeddings}patch_embeddings.projection"
    yield Place(path="patches/kernel", name=f"{patches}.weight", dims=(HEIGHT, WIDTH, EMBED), is_window=True)
    yield Place(path="patches/bias", name=f"{patches}.bias", dims=(EMBED,))
    norms = "layernorm_before", "layernorm_after"
    yield from _place_blocks("vit.encoder.layer.{}.", "attention", norms, qkv_bias=config.qkv_bias)
    yield from place_linear("head", "classifier")
    yield from place_norm("final_norm", "vit.layernorm")


def _read_vit(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"width": config["image_size"], "classes": count_labels(config)}


VIT = Family(
    model_type="vit",
    architecture="ViTForImageClassification",
    kind=VitConfig,
    prefix="vit.",
    heads=("classifier.",),
    places=_list_vit_places,
    left_out=("vit.pooler.",),
    aliases=(
        ("vit.layers.", "vit.encoder.layer."),
        (".attention.q_proj.", ".attention.attention.query."),
        (".attention.k_proj.", ".attention.attention.key."),
        (".attention.v_proj.", ".attention.attention.value."),
        (".attention.o_proj.", ".attention.output.dense."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
    ),
    entries={
        "height": "image_size", "patch": "patch_size", "colours": "num_channels", **BLOCK_ENTRIES,
        "eps": "layer_norm_eps",
    },
    defaults={"layer_norm_eps": 1e-12, "qkv_bias": True},
    activations=ACTIVATIONS,
    biases={"qkv_bias": "qkv_bias"},
    chosen=("width", "classes"),
    constant={"attention_probs_dropout_prob": 0.0},
    read=_read_vit,
    write=lambda config: {"hidden_dropout_prob": config.dropout, **write_labels(config.classes)},
    problems=label_problems,
    foreign=lambda config, model_type: option_problems(config, {"width": (config.height,)}, model_type),
)  # fmt: skip
