"""The GPT-NeoX family of Hugging Face (Pythia) as `Decoder`: parallel halves, a part of each head rotated.
See `place.py`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, MLP, VOCAB
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.huggingface.llama import EVERYWHERE, OF_TRAINING
from shardtrain.models.huggingface.place import KERNELS, Copy, Family, Place, entry_problems, option_problems
from shardtrain.models.huggingface.rope import rope_entries, rope_of, scaling_problems, scaling_text
from shardtrain.models.transformer_options import has_bias

PREFIX = "gpt_neox."
HEAD = "embed_out.weight"
ACTIVATIONS = {"gelu": "gelu_erf", "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu"}
NEEDED = (
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads",
)  # fmt: skip
ONLY = {"hidden_act": tuple(ACTIVATIONS)}
CHOSEN = (*EVERYWHERE, *OF_TRAINING, "rotary_dims", "parallel", "activation", "attention_bias")
FIXED = {"positions": "rotary", "norm": "layernorm", "bias": True}


def places(config: DecoderConfig) -> Iterator[Place]:
    """List the places: matrices are (out, in); queries, keys and values are one array, head by head."""
    yield Place(path="embedding", name=f"{PREFIX}embed_in.weight", dims=(VOCAB, EMBED))
    one = {"attention/o": "attention.dense", "mlp/up": "mlp.dense_h_to_4h", "mlp/down": "mlp.dense_4h_to_h"}
    names: dict[str, tuple[str, int, Any]] = {path: (name, 0, ()) for path, name in one.items()}
    parts = ((HEADS, HEAD_DIM),) * 3
    names |= {
        f"attention/{which}": ("attention.query_key_value", part, parts) for part, which in enumerate("qkv")
    }
    for path, (name, part, of_array) in names.items():
        into, out = KERNELS[path]
        bias = Place(
            path=f"blocks/{path}/bias", name=f"{PREFIX}layers.{{}}.{name}.bias", dims=out, part=part,
            parts=of_array, by_head=bool(of_array),
        )  # fmt: skip
        if path.startswith("mlp/") or has_bias(config, "attention_bias"):
            yield bias
        yield replace(
            bias, path=f"blocks/{path}/kernel", name=f"{PREFIX}layers.{{}}.{name}.weight", dims=(*into, *out),
            num_in=len(into), transposed=True,
        )  # fmt: skip
    norms = {
        "blocks/attention_norm": "layers.{}.input_layernorm",
        "blocks/mlp_norm": "layers.{}.post_attention_layernorm",
        "final_norm": "final_layer_norm",
    }
    for path, name in norms.items():
        yield Place(path=f"{path}/scale", name=f"{PREFIX}{name}.weight", dims=(EMBED,))
        yield Place(path=f"{path}/bias", name=f"{PREFIX}{name}.bias", dims=(EMBED,))
    if not config.tied:
        yield Place(path="head/kernel", name=HEAD, dims=(EMBED, VOCAB), num_in=1, transposed=True)


def copies(config: DecoderConfig) -> Iterator[Copy]:
    """List the second name of a tied head."""
    if config.tied:
        yield Copy(name=HEAD, of=f"{PREFIX}embed_in.weight", tied=True)


def read(config: Mapping[str, Any]) -> tuple[list[str], Callable[[], DecoderConfig]]:
    """See `Family.read`; what is rotated is in an object, or beside it as in the first files."""
    rope = rope_of(config)
    part = rope.get("partial_rotary_factor", config.get("rotary_pct", 0.25))

    def made() -> DecoderConfig:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
        return DecoderConfig(
            vocab=config["vocab_size"],
            seq=config["max_position_embeddings"],
            embed=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            mlp=config["intermediate_size"],
            positions="rotary",
            theta=float(rope.get("rope_theta", config.get("rotary_emb_base", 10_000.0))),
            rope_scaling=scaling_text(rope),
            rotary_dims=None if part == 1 else int(head_dim * part),
            eps=config.get("layer_norm_eps", 1e-5),
            activation=ACTIVATIONS[config.get("hidden_act", "gelu")],  # type: ignore[arg-type]
            attention_bias=None if config.get("attention_bias", True) else False,
            parallel=config.get("use_parallel_residual", True),
            tied=config.get("tie_word_embeddings", False),
        )

    return entry_problems(config, NEEDED, ONLY, "Decoder") + scaling_problems(rope), made


def write(config: DecoderConfig) -> dict[str, Any]:
    """See `Family.write`."""
    rope = rope_entries(config)["rope_parameters"]
    part = rope.setdefault("partial_rotary_factor", 1.0)
    return {
        "vocab_size": config.vocab,
        "max_position_embeddings": config.seq,
        "hidden_size": config.embed,
        "intermediate_size": config.sizes[MLP],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": "gelu" if config.activation == "gelu_erf" else "gelu_pytorch_tanh",
        "layer_norm_eps": config.eps,
        "rotary_pct": part,
        "rotary_emb_base": config.theta,
        "rope_parameters": rope,
        "use_parallel_residual": config.parallel,
        "attention_bias": has_bias(config, "attention_bias"),
        "attention_dropout": 0.0,
        "hidden_dropout": config.dropout,
        "tie_word_embeddings": config.tied,
    }


def foreign(config: DecoderConfig) -> list[str]:
    """See `Family.foreign`."""
    defaults = {f.name: f.default for f in fields(DecoderConfig) if f.default is not MISSING}
    wanted = {name: (value,) for name, value in {**defaults, **FIXED}.items() if name not in CHOSEN}
    found = option_problems(config, {**wanted, "activation": ("gelu", "gelu_erf")}, "gpt_neox")
    size = config.sizes
    if size[KV_HEADS] != size[HEADS]:
        found.append(f"num_kv_heads is {size[KV_HEADS]}; gpt_neox has as many as query heads, {size[HEADS]}")
    if size[HEADS] * size[HEAD_DIM] != size[EMBED]:
        found.append(f"head_dim is {size[HEAD_DIM]}; gpt_neox has embed // num_heads only")
    return found


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    kind=DecoderConfig,
    prefix=PREFIX,
    heads=("embed_out.",),
    places=places,
    copies=copies,
    read=read,
    write=write,
    foreign=foreign,
)
