"""The ViT family of Hugging Face as `Vit`: with its classifier, without a pooler. See `place.py`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardtrain.axes import EMBED, HEIGHT, MLP, SEQ, VOCAB, WIDTH
from shardtrain.models.huggingface.bert import ACTIVATIONS
from shardtrain.models.huggingface.place import (
    KERNELS,
    Copy,
    Family,
    Place,
    entry_problems,
    option_problems,
)
from shardtrain.models.vit import VitConfig
from shardtrain.system.excerpts import short

EMBEDDINGS, LAYER = "vit.embeddings.", "vit.encoder.layer.{}."
NEEDED = (
    "image_size", "patch_size", "num_channels", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads",
)  # fmt: skip
ONLY = {"hidden_act": tuple(ACTIVATIONS)}
NUM_LABELS = 2
"""Classes of a configuration that names none."""


def places(config: VitConfig) -> Iterator[Place]:
    """List the places of a vision transformer, whose matrices are (out, in), each with a bias."""
    yield Place(path="token", name=f"{EMBEDDINGS}cls_token", dims=(EMBED,), num_ones=2)
    yield Place(path="positions", name=f"{EMBEDDINGS}position_embeddings", dims=(SEQ, EMBED), num_ones=1)
    patches = f"{EMBEDDINGS}patch_embeddings.projection"
    yield Place(path="patches/kernel", name=f"{patches}.weight", dims=(HEIGHT, WIDTH, EMBED), is_window=True)
    yield Place(path="patches/bias", name=f"{patches}.bias", dims=(EMBED,))
    # the linear maps of the blocks, and the classifier
    names = {f"attention/{w[0]}": f"{LAYER}attention.attention.{w}" for w in ("query", "key", "value")}
    names |= {
        "attention/o": f"{LAYER}attention.output.dense",
        "mlp/up": f"{LAYER}intermediate.dense",
        "mlp/down": f"{LAYER}output.dense",
    }
    for path, name in names.items():
        bias = config.qkv_bias or path[-1] not in "qkv"
        yield from _linear(f"blocks/{path}", name, *KERNELS[path], bias=bias)
    yield from _linear("head", "classifier", (EMBED,), (VOCAB,))
    norms = {
        "blocks/attention_norm": f"{LAYER}layernorm_before",
        "blocks/mlp_norm": f"{LAYER}layernorm_after",
        "final_norm": "vit.layernorm",
    }
    for path, name in norms.items():
        yield Place(path=f"{path}/scale", name=f"{name}.weight", dims=(EMBED,))
        yield Place(path=f"{path}/bias", name=f"{name}.bias", dims=(EMBED,))


def _linear(
    path: str, name: str, into: tuple[str, ...], out: tuple[str, ...], bias: bool = True
) -> Iterator[Place]:
    yield Place(
        path=f"{path}/kernel", name=f"{name}.weight", dims=(*into, *out), num_in=len(into), transposed=True
    )
    if bias:
        yield Place(path=f"{path}/bias", name=f"{name}.bias", dims=out)


def copies(config: VitConfig) -> tuple[Copy, ...]:
    """List the second names: none."""
    return ()


def read(config: Mapping[str, Any]) -> tuple[list[str], Callable[[], VitConfig]]:
    """See `Family.read`."""
    problems = entry_problems(config, NEEDED, ONLY, "Vit")
    labels = config.get("id2label")
    if labels is not None and not (isinstance(labels, Mapping) and labels):
        problems.append(f"id2label is {short(labels)}; it is an object with the name of each class")

    def made() -> VitConfig:
        return VitConfig(
            height=config["image_size"],
            width=config["image_size"],
            colours=config["num_channels"],
            classes=NUM_LABELS if labels is None else len(labels),
            patch=config["patch_size"],
            embed=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            mlp=config["intermediate_size"],
            eps=config.get("layer_norm_eps", 1e-12),
            qkv_bias=bool(config.get("qkv_bias", True)),
            activation=ACTIVATIONS[config.get("hidden_act", "gelu")],  # type: ignore[arg-type]
        )

    return problems, made


def write(config: VitConfig) -> dict[str, Any]:
    """See `Family.write`."""
    names = [f"LABEL_{i}" for i in range(config.classes)]
    return {
        "image_size": config.height,
        "patch_size": config.patch,
        "num_channels": config.colours,
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "hidden_size": config.embed,
        "intermediate_size": config.sizes[MLP],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "gelu" if config.activation == "gelu_erf" else "gelu_new",
        "layer_norm_eps": config.eps,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": 0.0,
        "qkv_bias": config.qkv_bias,
    }


def foreign(config: VitConfig) -> list[str]:
    """See `Family.foreign`."""
    return option_problems(config, {"pooling": ("token",), "width": (config.height,)}, "vit")


VIT = Family(
    model_type="vit",
    architecture="ViTForImageClassification",
    kind=VitConfig,
    prefix="vit.",
    heads=("classifier.",),
    places=places,
    copies=copies,
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
    read=read,
    write=write,
    foreign=foreign,
)
