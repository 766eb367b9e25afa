"""Options that transformers share, the sizes that follow from them, and checks of their values.

The configurations in `decoder.py`, `encoder.py`, `encoder_decoder.py` and `vit.py` extend them.
Next: `transformer.py`.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from shardtrain.axes import EMBED, HEAD_DIM, HEADS, KV_HEADS, LAYERS, MLP, SEQ, VOCAB
from shardtrain.errors.options import CheckedOptions
from shardtrain.functional.remat_counts import RematCounts, Remats
from shardtrain.models import checks
from shardtrain.models.attention import ATTENTIONS
from shardtrain.models.experts_options import Experts
from shardtrain.models.float8 import Products
from shardtrain.models.layers import Norms
from shardtrain.models.lora import Lora
from shardtrain.models.rotary import RopeScaling

Positions = Literal["learned", "rotary"]
Activations = Literal["gelu", "gelu_erf", "relu", "swiglu", "geglu"]
GATED = ("swiglu", "geglu")
Dtypes = Literal["float32", "bfloat16", "float16"]

FIELDS_WITHOUT_OPTION = (
    *("head_dim", "theta", "rope_scaling", "rotary_dims", "eps", "query_scale", "head_scale", "embed_scale"),
    *("post_norm", "only_post_norm", "parallel", "qk_norm", "qk_norm_joint", "window_theta", "full_every"),
    *("attention_bias", "qkv_bias", "norm_bias", "soft_cap", "logits_soft_cap", "tied", "scan"),
    *("positions", "norm", "bias", "activation", "relative_buckets", "relative_distance", "dtype", "remat"),
)
"""Options that describe a family of models, which run files set, and those that a strategy sets."""


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(CheckedOptions):
    """Options of all transformers.

    Args:
      embed: number of features of each position between blocks.
      num_heads: number of attention heads (of queries, if keys have fewer).
      mlp: number of hidden features of the feed-forward. None means 4 * embed.
      dropout: dropout rate of the embedding and of the outputs of attention and feed-forward. It needs a
        random stream "dropout".
      remat: what the backward pass recomputes. "none" recomputes nothing. "weights" recomputes casts and
        copies, so that no gathered weight is kept. "dots" recomputes everything except matrix products.
        "outputs" keeps only the outputs of attention and feed-forward, which tensor parallelism reduces over
        devices. "full" keeps only the input of each block. "offload" does so too, and keeps the inputs in
        host memory. Numbers of blocks, such as full=6,none=18 (`RematCounts`), give them different policies.
      dtype: compute dtype; parameters, norms, softmax and logits are float32.
      attention: a name in `ATTENTIONS`: "xla"; "blockwise", which needs less memory for long sequences;
        "cudnn" for flash attention on NVIDIA GPUs. "auto" takes "cudnn" if device, dtype and head_dim allow
        it, else "blockwise" for long sequences and "xla" for short ones.
      lora: low-rank adapters of the blocks' projections, such as rank=8 or rank=8,alpha=16,on=q+v; with
        adapters nothing else is trained. None means no adapters.

    Raises:
      ValueError: listing every option that is out of range or does not fit another.
    """

    FIELDS_WITHOUT_OPTION: ClassVar[tuple[str, ...]] = FIELDS_WITHOUT_OPTION

    embed: int
    num_heads: int
    mlp: int | None = None
    dropout: float = 0.0
    remat: Remats | RematCounts = "weights"
    dtype: Dtypes = "float32"
    attention: str = "auto"
    lora: Lora | None = None

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        found = checks.numbers(self)
        if not found:
            sizes = block_sizes(self)
            found += checks.multiple("num_heads", self.num_heads, "num_kv_heads", sizes[KV_HEADS])
            if getattr(self, "head_dim", None) is None:
                found += checks.multiple("embed", self.embed, "num_heads", self.num_heads)
            if getattr(self, "positions", "learned") == "rotary" and sizes[HEAD_DIM] % 2:
                odd = sizes[HEAD_DIM]
                found.append(f"head_dim is {odd}; rotary positions turn pairs. Use head_dim={odd + 1}.")
        found += checks.choice("attention", self.attention, ("auto", *ATTENTIONS))
        num_blocks = getattr(self, "num_layers", 0)
        if isinstance(self.remat, RematCounts) and self.remat.num_blocks != num_blocks:
            found.append(
                f"remat is '{self.remat}', which are {self.remat.num_blocks} blocks, and the model has"
                f" {num_blocks}; use numbers that add up to {num_blocks}"
            )
        return found + _find_adapter_problems(self)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim, by name, with the defaults filled in."""
        return block_sizes(self)

    @property
    def parts(self) -> "BlockOptions":
        """Options of the parts of a block."""
        return self.block_options()

    def block_options(self, **changes: Any) -> "BlockOptions":
        """Return the options of the parts of a block: this configuration, with changes."""
        known = {f.name for f in fields(BlockOptions)}
        options = {name: value for name, value in vars(self).items() if name in known}
        return BlockOptions(**{**options, **changes})


@dataclass(frozen=True, kw_only=True)
class TextOptions(TransformerOptions):
    """Options of the transformers of text.

    Args:
      vocab: number of tokens in the vocabulary.
      seq: maximum length of a sequence.
      tied: whether the head uses the embedding table.
      loss_chunk: compute logits, loss and their gradients for this number of tokens of a device at a time,
        to save memory. None means all tokens at once.
      products: "float8" rounds the operands of the blocks' matrix products to 8 bits, for NVIDIA GPUs from
        Ada on; gradients of kernels, attention and the head stay in `dtype`. Empty means that all stay in
        `dtype`.
    """

    vocab: int
    seq: int
    tied: bool = True
    loss_chunk: int | None = None
    products: Products = ""


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(TextOptions):
    """Options of the transformers that generate text.

    Args:
      num_kv_heads: number of key and value heads (grouped-query attention). None means `num_heads`.
      head_dim: number of features of each head. None means embed // num_heads.
      theta: base of the rotary wavelengths.
      norm: kind of norm before the parts of a block and the head; "rmsnorm_plus_one" adds 1 to its scale.
      eps: added to the variance in the norms.
      activation: "gelu" (tanh approximation, as GPT-2), "gelu_erf" (exact, as BERT), "relu"; or, with a
        gating projection, "swiglu" or "geglu" (tanh approximation, as Gemma).
      bias: whether projections and layer norms have biases (the head has none).
      query_scale: factor of the attention scores. None means 1 / sqrt(head_dim).
    """

    num_kv_heads: int | None = None
    head_dim: int | None = None
    theta: float = 10_000.0
    norm: Norms = "layernorm"
    eps: float = 1e-5
    activation: Activations = "gelu"
    bias: bool = True
    query_scale: float | None = None


@dataclass(frozen=True, kw_only=True)
class BlockOptions(DecodingOptions):
    """Options of a decoder, which are those of the parts of any block.

    Args:
      num_layers: number of blocks.
      positions: "learned" adds a table of embeddings, "rotary" rotates queries and keys.
      rope_scaling: stretches rotary wavelengths for longer sequences: a `LinearScaling`, `Llama3Scaling`,
        `YarnScaling` or `LongropeScaling` of `rotary.py`. None means no scaling.
      rotary_dims: number of features of each head that are rotated, from the first. None means all.
      post_norm: whether a norm also follows each half of a block, before its output is added.
      only_post_norm: whether the norms before the halves are left out (as OLMo 2).
      parallel: whether both halves of a block read the block's input (as GPT-NeoX); otherwise the
        feed-forward reads the output of attention.
      qk_norm: whether each head of queries and keys is normed, before positions.
      qk_norm_joint: whether that norm is over all heads together.
      attention_bias: whether the projections of attention have biases. None means the value of `bias`.
      qkv_bias: whether the projections to queries, keys and values have biases. None means the value of
        `attention_bias`.
      norm_bias: whether layer norms have biases. None means the value of `bias`.
      soft_cap: replaces attention scores x by soft_cap * tanh(x / soft_cap); "cudnn" does not support it.
        None disables it.
      logits_soft_cap: replaces logits likewise. None disables it.
      embed_scale: factor of the embedded tokens. None means 1.
      scan: whether blocks run in `jax.lax.scan`, so that compile time does not grow with their number (up to
        8 blocks are plain code on one CPU); otherwise they are unrolled.
      window: number of tokens that a token attends to: itself and those just before it (sliding window). None
        means all.
      full_every: every n-th block has no window; 6 means five blocks with a window, then one without. None
        means that all blocks have it.
      window_theta: base of the rotary wavelengths in blocks with a window, without scaling. None means the
        same wavelengths as in other blocks.
      experts: replaces each feed-forward by a mixture of experts, such as num=8,top=2, with any of capacity,
        shared, scores, normalised, scale, balance, over, bias, z, shared_gate, groups and top_groups; `mlp`
        is then the number of hidden features of one expert. None means no experts.
    """

    num_layers: int
    positions: Positions = "learned"
    rope_scaling: RopeScaling | None = None
    rotary_dims: int | None = None
    post_norm: bool = False
    only_post_norm: bool = False
    parallel: bool = False
    qk_norm: bool = False
    qk_norm_joint: bool = False
    attention_bias: bool | None = None
    qkv_bias: bool | None = None
    norm_bias: bool | None = None
    soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embed_scale: float | None = None
    scan: bool = True
    window: int | None = None
    full_every: int | None = None
    window_theta: float | None = None
    experts: Experts | None = None

    def list_problems(self) -> list[str]:
        """List the options that are out of range or do not fit another."""
        return super().list_problems() + _find_decoder_problems(self)


def block_sizes(config: Any) -> dict[str, int]:
    """Return the size of each dim of a transformer, by name, with the defaults filled in."""
    num_kv_heads, head_dim = (getattr(config, name, None) for name in ("num_kv_heads", "head_dim"))
    layers = {LAYERS: config.num_layers} if hasattr(config, "num_layers") else {}
    return layers | {
        VOCAB: config.vocab,
        SEQ: config.seq,
        EMBED: config.embed,
        HEADS: config.num_heads,
        KV_HEADS: config.num_heads if num_kv_heads is None else num_kv_heads,
        HEAD_DIM: config.embed // config.num_heads if head_dim is None else head_dim,
        MLP: 4 * config.embed if config.mlp is None else config.mlp,
    }


BIASES = {
    "qkv_bias": ("qkv_bias", "attention_bias", "bias"),
    "attention_bias": ("attention_bias", "bias"),
    "norm_bias": ("norm_bias", "bias"),
    "bias": ("bias",),
}
"""Option about biases -> options to look up; the first that is not None says whether there are biases."""


def has_bias(config: Any, option: str) -> bool:
    """Return whether parts of a block have biases, by an option of `BIASES` and its defaults."""
    return next(value for name in BIASES[option] if (value := getattr(config, name)) is not None)


def _find_adapter_problems(config: Any) -> list[str]:
    """List the projections in `lora` that no block has."""
    lora, experts = config.lora, getattr(config, "experts", None)
    found: list[str] = []
    if lora and lora.on == ("gate",) and config.activation not in GATED:
        found.append(
            f"lora is on 'gate', and a feed-forward with {config.activation} has no gate; use"
            " activation='swiglu', or other projections"
        )
    if lora and experts and not experts.shared and not set(lora.on) - {"up", "gate", "down"}:
        found.append(f"lora is on {lora.on}, and experts have no adapters; use on=('q', 'v'), of attention")
    return found


def _find_decoder_problems(config: BlockOptions) -> list[str]:
    """List the problems of the options that only decoders have."""
    needs = {
        "positions='rotary'": (config.positions == "rotary", ("rope_scaling", "rotary_dims", "window_theta")),
        "a window": (config.window, ("full_every", "window_theta")),
        "post_norm=True": (config.post_norm, ("only_post_norm",)),
        "qk_norm=True": (config.qk_norm, ("qk_norm_joint",)),
    }
    found = [
        f"{name} is {value!r}; it needs {what}"
        for what, (is_there, names) in needs.items()
        for name in names
        if not is_there and (value := getattr(config, name))
    ]
    head_dim = block_sizes(config)[HEAD_DIM] if config.num_heads > 0 else 0
    if config.rope_scaling is not None and head_dim:
        found += config.rope_scaling.list_misfits(config.theta, config.rotary_dims or head_dim)
    if (rotated := config.rotary_dims) and (rotated % 2 or rotated > head_dim):
        allowed = f"it is even and at most head_dim, {head_dim}"
        use = f"rotary_dims={min(rotated + rotated % 2, head_dim - head_dim % 2)}"
        found.append(f"rotary_dims is {rotated}; {allowed}. Use {use}.")
    if config.experts and config.activation in ("geglu", "relu"):
        found.append(f"experts have gelu or swiglu, not {config.activation!r}. Use activation='swiglu'.")
    if config.experts and config.products:
        found.append(f"experts compute in dtype, and products is {config.products!r}. Leave out one of them.")
    if config.full_every == 1:
        found.append("full_every is 1, so that no block has the window; use 2 or more, or window=None")
    if config.qk_norm and config.norm == "layernorm":
        found.append("qk_norm needs norm='rmsnorm' or 'rmsnorm_plus_one', and norm is 'layernorm'")
    if config.attention == "cudnn":
        lacking = [name for name in ("soft_cap", "full_every") if getattr(config, name) is not None]
        found += [f"attention 'cudnn' has no {name}; use attention='auto' or 'xla'" for name in lacking]
    return found
