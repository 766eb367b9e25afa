"""Map Hugging Face's T5 families to `EncoderDecoder`: versions 1.0 and 1.1, and mT5.

Their files do not have a longest sequence, as relative positions allow any length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardtrain.axes import EMBED, HEADS, VOCAB
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.huggingface.place import Copy, Family, Place, option_problems, place_linear, place_norm
from shardtrain.models.transformer_options import GATED

SHARED, HEAD = "shared.weight", "lm_head.weight"
BUCKETS, DISTANCE = "relative_attention_num_buckets", "relative_attention_max_distance"


def _list_places(config: EncoderDecoderConfig) -> Iterator[Place]:
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
            layer = f"{theirs}.layer.{number}"
            yield from place_norm(f"{ours}/{half}_norm", f"{layer}.layer_norm", bias=False)
            for which in "qkvo":
                yield from place_linear(f"{ours}/{half}/{which}", f"{layer}.{attention}.{which}", bias=False)
        last = f"{theirs}.layer.{len(halves)}"
        yield from place_norm(f"{ours}/mlp_norm", f"{last}.layer_norm", bias=False)
        gated = config.activation in GATED
        names = {"gate": "wi_0", "up": "wi_1", "down": "wo"} if gated else {"up": "wi", "down": "wo"}
        for which, name in names.items():
            yield from place_linear(f"{ours}/mlp/{which}", f"{last}.DenseReluDense.{name}", bias=False)
        if at == -1:
            yield from place_norm(f"{ours}/source_norm", "encoder.final_layer_norm", bias=False)
    yield from place_norm("final_norm", "decoder.final_layer_norm", bias=False)
    if not config.tied:
        yield from place_linear("head", "lm_head", bias=False)


def _list_copies(config: EncoderDecoderConfig) -> Iterator[Copy]:
    """List the other names of the embedding: in each half, and as a tied head."""
    for stack in ("encoder", "decoder"):
        yield Copy(name=f"{stack}.embed_tokens.weight", of=SHARED, tied=True)
    if config.tied:
        yield Copy(name=HEAD, of=SHARED, tied=True)


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    scaled = config.get("scale_decoder_outputs", config["tie_word_embeddings"])
    return {
        "num_decoder_layers": config["num_decoder_layers"] or config["num_layers"],
        "head_scale": config["d_model"] ** -0.5 if scaled else None,
    }


def _write(config: EncoderDecoderConfig) -> dict[str, Any]:
    buckets, furthest = config.distances
    scaled = config.head_scale is not None
    return {
        BUCKETS: buckets, DISTANCE: furthest, "dropout_rate": config.dropout, "scale_decoder_outputs": scaled,
    }  # fmt: skip


def _list_foreign(config: EncoderDecoderConfig, model_type: str) -> list[str]:
    wanted = {"num_kv_heads": (None, config.num_heads), "head_scale": (None, config.embed**-0.5)}
    return option_problems(config, wanted, model_type)


T5 = Family(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    kind=EncoderDecoderConfig,
    prefix="",
    heads=(HEAD,),
    places=_list_places,
    copies=_list_copies,
    # in files of version 1.0, and never used
    left_out=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    entries={
        "vocab": "vocab_size", "embed": "d_model", "head_dim": "d_kv", "mlp": "d_ff",
        "num_encoder_layers": "num_layers", "num_heads": "num_heads", "seq": "n_positions",
        "num_decoder_layers": "num_decoder_layers", "eps": "layer_norm_epsilon",
        "tied": "tie_word_embeddings", "relative_buckets": BUCKETS, "relative_distance": DISTANCE,
    },
    # the models were trained with sequences of 512
    defaults={
        "n_positions": 512, "num_decoder_layers": None, "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": True, BUCKETS: 32, DISTANCE: 128,
    },
    activations={
        "relu": "relu", "gelu": "gelu_erf", "gelu_new": "gelu", "gated-gelu": "geglu", "gated-silu": "swiglu",
    },
    activation="feed_forward_proj",
    fixed={"positions": "relative", "norm": "rmsnorm", "bias": False, "query_scale": 1.0},
    # without rotary positions theta means nothing
    chosen=("num_kv_heads", "head_scale", "theta"),
    only={"is_encoder_decoder": (True,)},
    constant={"is_encoder_decoder": True, "decoder_start_token_id": 0},
    read=_read,
    write=_write,
    foreign=_list_foreign,
)  # fmt: skip
MT5 = replace(T5, model_type="mt5", architecture="MT5ForConditionalGeneration")
