"""The T5 families of Hugging Face as `EncoderDecoder`: versions 1.0 and 1.1, and mT5. See `place.py`.

Their files say nothing of the longest sequence; positions are relative, so that any will do.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, MLP, VOCAB
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.huggingface.place import (
    KERNELS,
    Copy,
    Family,
    Place,
    entry_problems,
    option_problems,
)
from shardtrain.models.transformer_options import GATED

SHARED, HEAD = "shared.weight", "lm_head.weight"
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gated-gelu": "geglu",
    "gated-silu": "swiglu",
}
"""feed_forward_proj -> activation."""
NEEDED = ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
ONLY = {"feed_forward_proj": tuple(ACTIVATIONS), "is_encoder_decoder": (True,)}
POSITIONS = 512
"""Longest sequence of a configuration that names none, as the models were trained."""
EXTRA = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
"""In files of version 1.0, and never used."""


def places(config: EncoderDecoderConfig) -> Iterator[Place]:
    """List the places of a T5, whose matrices are (out, in), without biases."""
    yield Place(path="embedding", name=SHARED, dims=(VOCAB, EMBED))
    for side, stack in (("source", "encoder"), ("target", "decoder")):
        name = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Place(path=f"{side}_relative", name=name, dims=(config.distances[0], HEADS))
    for i in range(config.num_blocks):
        ours, at = f"blocks/{i}", i - config.num_encoder_layers
        theirs = f"encoder.block.{i}" if at < 0 else f"decoder.block.{at}"
        halves = [("attention", "SelfAttention")]
        halves += [] if at < 0 else [("cross", "EncDecAttention")]
        for number, (half, attention) in enumerate(halves):
            yield from _norm(f"{ours}/{half}_norm", f"{theirs}.layer.{number}.layer_norm")
            for which in "qkvo":
                dims = KERNELS[f"attention/{which}"]
                yield _linear(f"{ours}/{half}/{which}", f"{theirs}.layer.{number}.{attention}.{which}", *dims)
        last = f"{theirs}.layer.{len(halves)}"
        yield from _norm(f"{ours}/mlp_norm", f"{last}.layer_norm")
        gated = config.activation in GATED
        names = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
        for which, name in names.items():
            yield _linear(f"{ours}/mlp/{which}", f"{last}.DenseReluDense.{name}", *KERNELS[f"mlp/{which}"])
        if at == -1:
            yield from _norm(f"{ours}/source_norm", "encoder.final_layer_norm")
    yield from _norm("final_norm", "decoder.final_layer_norm")
    if not config.tied:
        yield _linear("head", "lm_head", (EMBED,), (VOCAB,))


def _norm(path: str, name: str) -> Iterator[Place]:
    yield Place(path=f"{path}/scale", name=f"{name}.weight", dims=(EMBED,))


def _linear(path: str, name: str, into: tuple[str, ...], out: tuple[str, ...]) -> Place:
    return Place(
        path=f"{path}/kernel", name=f"{name}.weight", dims=(*into, *out), num_in=len(into), transposed=True
    )


def copies(config: EncoderDecoderConfig) -> Iterator[Copy]:
    """List the second names of the embedding: those of each half, and of a tied head."""
    for stack in ("encoder", "decoder"):
        yield Copy(name=f"{stack}.embed_tokens.weight", of=SHARED, tied=True)
    if config.tied:
        yield Copy(name=HEAD, of=SHARED, tied=True)


def read(config: Mapping[str, Any]) -> tuple[list[str], Callable[[], EncoderDecoderConfig]]:
    """See `Family.read`."""
    tied = config.get("tie_word_embeddings") is not False

    def made() -> EncoderDecoderConfig:
        scaled = config.get("scale_decoder_outputs", tied)
        return EncoderDecoderConfig(
            vocab=config["vocab_size"],
            seq=config.get("n_positions", POSITIONS),
            embed=config["d_model"],
            num_encoder_layers=config["num_layers"],
            num_decoder_layers=config.get("num_decoder_layers") or config["num_layers"],
            num_heads=config["num_heads"],
            head_dim=config["d_kv"],
            mlp=config["d_ff"],
            positions="relative",
            norm="rmsnorm",
            eps=config.get("layer_norm_epsilon", 1e-6),
            activation=ACTIVATIONS[config.get("feed_forward_proj", "relu")],  # type: ignore[arg-type]
            bias=False,
            tied=tied,
            relative_buckets=config.get("relative_attention_num_buckets", 32),
            relative_distance=config.get("relative_attention_max_distance", 128),
            query_scale=1.0,
            head_scale=config["d_model"] ** -0.5 if scaled else None,
        )

    return entry_problems(config, NEEDED, ONLY, "EncoderDecoder"), made


def write(config: EncoderDecoderConfig) -> dict[str, Any]:
    """See `Family.write`."""
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    return {
        "vocab_size": config.vocab,
        "n_positions": config.seq,
        "d_model": config.embed,
        "d_kv": config.sizes[HEAD_DIM],
        "d_ff": config.sizes[MLP],
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.distances[0],
        "relative_attention_max_distance": config.distances[1],
        "feed_forward_proj": names[config.activation],
        "layer_norm_epsilon": config.eps,
        "dropout_rate": config.dropout,
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.head_scale is not None,
        "is_encoder_decoder": True,
        "decoder_start_token_id": 0,
    }


def foreign(config: EncoderDecoderConfig) -> list[str]:
    """See `Family.foreign`."""
    wanted = {
        "positions": ("relative",),
        "norm": ("rmsnorm",),
        "bias": (False,),
        "num_kv_heads": (None, config.num_heads),
        "query_scale": (1.0,),
        "head_scale": (None, config.embed**-0.5),
    }
    return option_problems(config, wanted, "t5")


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    kind=EncoderDecoderConfig,
    prefix="",
    heads=(HEAD,),
    places=places,
    copies=copies,
    left_out=(EXTRA,),
    read=read,
    write=write,
    foreign=foreign,
)
MT5 = replace(T5, model_type="mt5", architecture="MT5ForConditionalGeneration")
