"""Runs of models built as published ones are: Gemma, lm1b, an ImageNet ResNet, and nnx without any names.

Each `Case` also has the same loss in plain Flax, which knows nothing of shardtrain.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, struct
from jax.sharding import PartitionSpec as P

from shardtrain import Layout, Run, Strategy, from_linen, from_nnx
from shardtrain.checkpoints.policy import CheckpointPolicy

ROWS, SEQ, VOCAB, STEPS, SEED = 8, 8, 16, 2, 3
RANDOM = np.random.default_rng(0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays by name, the same for training always; nothing is held out."""

    arrays: dict[str, np.ndarray]

    def __len__(self) -> int:
        return STEPS * ROWS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self.arrays.items()}

    def train(self, folder: Any) -> "Rows":
        return self

    def heldout(self, folder: Any) -> None:
        return None


TEXT = Rows({"tokens": RANDOM.integers(1, VOCAB, (STEPS * ROWS, SEQ), np.int32)})
IMAGES = Rows(
    {
        "image": RANDOM.normal(size=(STEPS * ROWS, 16, 16, 3)).astype(np.float32),
        "label": RANDOM.integers(0, 4, STEPS * ROWS, np.int32),
    }
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A run, and its model in plain Flax.

    Args:
      run: of shardtrain.
      init: key -> (parameters, state), each a nested dict with string keys.
      apply: (parameters, state, loss, batch) -> ((sum, count), state), the loss being that of the run.
    """

    run: Run
    init: Callable[[jax.Array], tuple[Any, Any]]
    apply: Callable[..., Any]


def a_run(model: Any, data: Rows, loss: Any, **changes: Any) -> Run:
    return Run(
        model=model,
        data=data,
        loss=loss,
        # its state is the sum of all gradients so far
        optimizer=optax.sgd(0.05, momentum=1.0),
        batch=ROWS,
        steps=STEPS,
        seed=SEED,
        log_every=1,
        evaluate_every=None,
        checkpoints=CheckpointPolicy(every_steps=None),
        unit="examples",
        **changes,
    )


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), jnp.float32(losses.size)


# -- Gemma: nnx, PartitionSpecs of mesh axes in a table, masks and positions in the call, remat


@dataclasses.dataclass(frozen=True, slots=True)
class ShardingConfig:
    """Which mesh axes shard what; a table in the config, as Gemma and Qwen of Tunix have it."""

    emb_vd: P
    q_weight_ndh: P
    kv_weight_cndh: P
    o_weight_nhd: P
    ffw_weight_df: P
    ffw_weight_fd: P
    rms_norm_weight: P

    @staticmethod
    def default() -> "ShardingConfig":
        return ShardingConfig(
            emb_vd=P("tp", "fsdp"),
            q_weight_ndh=P("tp", "fsdp", None),
            kv_weight_cndh=P(None, "tp", "fsdp", None),
            o_weight_nhd=P("tp", None, "fsdp"),
            ffw_weight_df=P("fsdp", "tp"),
            ffw_weight_fd=P("tp", "fsdp"),
            rms_norm_weight=P(
                "tp",
            ),
        )


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    vocab: int = VOCAB
    embed: int = 16
    hidden: int = 24
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    window: tuple[int | None, ...] = (4,)
    softcap: float = 30.0
    shd_config: ShardingConfig = dataclasses.field(default_factory=ShardingConfig.default)


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], sharding: P) -> nnx.Param:
    return nnx.Param(0.2 * jax.random.normal(rngs.params(), shape), out_sharding=sharding)


class Einsum(nnx.Module):
    def __init__(self, equation: str, shape: tuple[int, ...], sharding: P, rngs: nnx.Rngs):
        self.equation = equation
        self.w = weight(rngs, shape, sharding)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(self.equation, x, self.w[...])


class GemmaNorm(nnx.Module):
    def __init__(self, features: int, sharding: P, rngs: nnx.Rngs):
        self.scale = nnx.Param(
            nnx.initializers.zeros_init()(rngs.params(), (features,)), out_sharding=sharding
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + self.scale[...])


def rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    timescale = 10_000 ** (2 * jnp.arange(x.shape[-1] // 2) / x.shape[-1])
    angle = positions[..., None, None] / timescale
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


class GemmaBlock(nnx.Module):
    def __init__(self, config: GemmaConfig, window: int | None, rngs: nnx.Rngs):
        c, shd = config, config.shd_config
        self.window = window
        self.q = Einsum("BTD,NDH->BTNH", (c.heads, c.embed, c.head_dim), shd.q_weight_ndh, rngs)
        self.kv = Einsum("BSD,CKDH->CBSKH", (2, c.kv_heads, c.embed, c.head_dim), shd.kv_weight_cndh, rngs)
        self.out = Einsum("BTNH,NHD->BTD", (c.heads, c.head_dim, c.embed), shd.o_weight_nhd, rngs)
        self.norms = nnx.List([GemmaNorm(c.embed, shd.rms_norm_weight, rngs) for _ in range(2)])
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        into, back = ({"out_sharding": spec} for spec in (shd.ffw_weight_df, shd.ffw_weight_fd))
        self.gate, self.up = (linear(c.embed, c.hidden, kernel_metadata=into) for _ in range(2))
        self.down = linear(c.hidden, c.embed, kernel_metadata=back)

    def attend(self, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
        q_BTNH, (k_BSKH, v_BSKH) = self.q(x), self.kv(x)
        batch, seq, heads, _ = q_BTNH.shape
        q_BTNH = rotated(q_BTNH, positions) * q_BTNH.shape[-1] ** -0.5
        q_BTKGH = q_BTNH.reshape(batch, seq, k_BSKH.shape[-2], -1, q_BTNH.shape[-1])
        logits = jnp.einsum("BTKGH,BSKH->BTKGS", q_BTKGH, rotated(k_BSKH, positions))
        if self.window is not None:
            near = jnp.abs(positions[:, None, :] - positions[:, :, None]) < self.window
            mask = mask * near
        probs = jax.nn.softmax(jnp.where(mask[:, :, None, None, :], logits, -2e38), axis=-1)
        return self.out(jnp.einsum("BTKGS,BSKH->BTKGH", probs, v_BSKH).reshape(batch, seq, heads, -1))

    def __call__(self, x: jax.Array, positions: jax.Array, cache: Any, mask: jax.Array) -> Any:
        graph, state = nnx.split(self)

        @jax.checkpoint
        def block(state: Any, x: jax.Array, positions: jax.Array, mask: jax.Array) -> jax.Array:
            this = nnx.merge(graph, state)
            x = x + this.attend(this.norms[0](x), positions, mask)
            hidden = this.norms[1](x)
            return x + this.down(nnx.gelu(this.gate(hidden)) * this.up(hidden))

        return cache, block(state, x, positions, mask)


class Gemma(nnx.Module):
    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        self.softcap = config.softcap
        self.embedding = weight(rngs, (config.vocab, config.embed), config.shd_config.emb_vd)
        self.layers = nnx.List([GemmaBlock(config, window, rngs) for window in config.window])
        self.final_norm = GemmaNorm(config.embed, config.shd_config.rms_norm_weight, rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Any, mask: jax.Array) -> Any:
        x = self.embedding[(tokens,)] * jnp.sqrt(self.embedding.shape[1])
        for layer in self.layers:
            _, x = layer(x, positions, cache, mask)
        logits = self.final_norm(x) @ self.embedding[...].T
        return jnp.tanh(logits / self.softcap) * self.softcap, cache


def gemma_loss(apply: Any, batch: Any) -> Any:
    tokens = batch["tokens"]
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    mask = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool)) & (tokens > 0)[:, None, :]
    logits, _ = apply(tokens, positions, None, mask)
    return cross_entropy(logits[:, :-1], tokens[:, 1:])


# -- lm1b: linen, logical names for kernels that are flat when they are drawn, its mode fixed when it is built


@struct.dataclass
class LmConfig:
    vocab_size: int = VOCAB
    emb_dim: int = 16
    num_heads: int = 2
    num_layers: int = 1
    mlp_dim: int = 24
    max_len: int = SEQ
    dropout_rate: float = 0.0
    deterministic: bool = False
    kernel_init: Any = nn.initializers.xavier_uniform()
    bias_init: Any = nn.initializers.normal(stddev=1e-2)


def logical(init: Any, *names: str) -> Any:
    return nn.with_logical_partitioning(init, names)


def layer_norm() -> nn.Module:
    zeros, ones = nn.initializers.zeros, nn.initializers.ones
    return nn.LayerNorm(bias_init=logical(zeros, "embed"), scale_init=logical(ones, "embed"))


class LmBlock(nn.Module):
    config: LmConfig

    @nn.compact
    def __call__(self, inputs: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        config = self.config
        x = nn.MultiHeadDotProductAttention(
            num_heads=config.num_heads,
            qkv_features=config.emb_dim,
            kernel_init=logical(config.kernel_init, "embed", "kv"),
            bias_init=logical(config.bias_init, "embed"),
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=config.dropout_rate,
            deterministic=config.deterministic,
        )(layer_norm()(inputs), mask=mask)
        x = nn.Dropout(config.dropout_rate)(x, deterministic=config.deterministic) + inputs
        z = layer_norm()(x)
        for features, names in ((config.mlp_dim, ("embed", "mlp")), (config.emb_dim, ("mlp", "embed"))):
            z = nn.Dense(
                features,
                kernel_init=logical(config.kernel_init, *names),
                bias_init=logical(config.bias_init, names[1]),
            )(z)
            z = nn.relu(z) if features == config.mlp_dim else z
            z = nn.Dropout(config.dropout_rate)(z, deterministic=config.deterministic)
        return x + z


class TransformerLM(nn.Module):
    config: LmConfig

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        config = self.config
        mask = nn.combine_masks(nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs))
        init = logical(nn.initializers.normal(stddev=1.0), "vocab", "embed")
        y = nn.Embed(config.vocab_size, config.emb_dim, embedding_init=init)(
            jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1]
        )
        for number in range(config.num_layers):
            y = LmBlock(config, name=f"encoderdecoderblock_{number}")(y, mask)
        return nn.Dense(
            config.vocab_size,
            kernel_init=logical(config.kernel_init, "embed", "vocab"),
            bias_init=logical(config.bias_init, "vocab"),
            name="logitdense",
        )(layer_norm()(y))


def lm_loss(apply: Any, batch: Any) -> Any:
    return cross_entropy(apply(batch["tokens"]), batch["tokens"])


# -- ImageNet's ResNet: linen, no names, BatchNorm, `train` in the call, layers as partial functions


class ResNetBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    act: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.act(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.norm(scale_init=nn.initializers.constant(0.5))(self.conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.norm(name="norm_proj")(
                self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(x)
            )
        return self.act(x + y)


class ResNet(nn.Module):
    stage_sizes: tuple[int, ...] = (1,)
    num_classes: int = 4
    num_filters: int = 4
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        norm = functools.partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, axis_name=self.axis_name
        )
        x = conv(self.num_filters, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = nn.max_pool(nn.relu(norm(name="bn_init")(x)), (3, 3), strides=(2, 2), padding="SAME")
        for i, size in enumerate(self.stage_sizes):
            for j in range(size):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = ResNetBlock(self.num_filters * 2**i, conv, norm, nn.relu, strides)(x)
        return nn.Dense(self.num_classes)(x.mean((1, 2)))


def image_loss(apply: Any, batch: Any) -> Any:
    return cross_entropy(apply(batch["image"]), batch["label"])


# -- nnx as most people write it: no name anywhere


class Plain(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, tokens: jax.Array, *, deterministic: bool | None = None) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(tokens), deterministic=deterministic)
        x = x + self.dropout(self.down(nnx.gelu(self.up(x))), deterministic=deterministic)
        return self.embed.attend(x)


def plain_loss(apply: Any, batch: Any) -> Any:
    return cross_entropy(apply(batch["tokens"])[:, :-1], batch["tokens"][:, 1:])


# -- the cases


def nested(state: Any) -> Any:
    tree: Any = {}
    for path, variable in nnx.to_flat_state(state):
        *parents, name = map(str, path)
        functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = variable[...]
    return tree


def of_nnx(factory: Any, run: Run, **options: Any) -> Case:
    """A case of an nnx module."""

    def init(key: jax.Array) -> Any:
        with nnx.use_eager_sharding(False):
            return nested(nnx.state(factory(nnx.Rngs(key)), nnx.Param)), {}

    def apply(params: Any, state: Any, loss: Any, batch: Any) -> Any:
        with nnx.use_eager_sharding(False):
            module = factory(nnx.Rngs(0))
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            variable[...] = functools.reduce(lambda node, key: node[str(key)], path, params)
        return loss(lambda *inputs: module(*inputs, **options), batch), state

    return Case(run, init, apply)


def of_linen(module: nn.Module, example: Any, run: Run, **options: Any) -> Case:
    """A case of a linen module."""

    def init(key: jax.Array) -> Any:
        off: dict[str, Any] = dict.fromkeys(options, False)
        state = dict(nn.unbox(module.init({"params": key}, jnp.zeros(example.shape, example.dtype), **off)))
        return state.pop("params"), state

    def apply(params: Any, state: Any, loss: Any, batch: Any) -> Any:
        kept = []

        def call(*inputs: Any) -> Any:
            outputs, changed = module.apply(
                {"params": params, **state}, *inputs, **options, mutable=list(state)
            )
            kept.append(changed)
            return outputs

        return loss(call, batch), kept[0] if kept else state

    return Case(run, init, apply)


TOKENS = jax.ShapeDtypeStruct((1, SEQ), jnp.int32)
IMAGE = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)


def with_rules(**parameters: tuple[str, ...]) -> Strategy:
    return Strategy(layout=Layout(parameters=parameters))


REPLICATED = Strategy(layout=Layout(unnamed="replicate"))


def gemma_case() -> Case:
    def factory(rngs: nnx.Rngs) -> Gemma:
        return Gemma(GemmaConfig(), rngs=rngs)

    return of_nnx(factory, a_run(from_nnx(factory), TEXT, gemma_loss, strategy=with_rules(tp=("tensor",))))


def lm1b_case() -> Case:
    module = TransformerLM(LmConfig())
    run = a_run(from_linen(module, TOKENS), TEXT, lm_loss, strategy=with_rules(kv=("tensor",)))
    return of_linen(module, TOKENS, run)


def resnet_case(sync: bool = False, axis_name: str | None = None) -> Case:
    model = from_linen(ResNet(axis_name=axis_name), IMAGE, sync_batch_norm=sync)
    run = a_run(model, IMAGES, image_loss, strategy=REPLICATED)
    return of_linen(ResNet(), IMAGE, run, train=True)


def plain_case() -> Case:
    names = {"u*/kernel": ("embed", "mlp"), "down/kernel": ("mlp", "embed"), "*/embedding": (None, "fsdp")}
    return of_nnx(
        Plain, a_run(Plain, TEXT, plain_loss, strategy=REPLICATED, names=names), deterministic=False
    )


CASES = {"gemma": gemma_case, "lm1b": lm1b_case, "resnet": resnet_case, "plain": plain_case}


def gemma() -> Run:
    return gemma_case().run


def lm1b() -> Run:
    return lm1b_case().run


def resnet() -> Run:
    return resnet_case().run


def synchronised_resnet() -> Run:
    return resnet_case(sync=True).run


def plain() -> Run:
    return plain_case().run


def unnamed() -> Run:
    """Without the names that `plain` gives from outside, and without leave to replicate."""
    return dataclasses.replace(plain_case().run, names={}, strategy=Strategy())


def plain_steps(case: Case, batches: list[Any], groups: int = 1) -> tuple[list[float], Any, Any]:
    """A plain loop on one device: losses, the sum of all gradients, and the last state.

    Args:
      case: whose model and loss.
      batches: what to train on.
      groups: equal parts of a batch that are applied each for itself, as replicas with statistics of their
        own are; their states are averaged.
    """

    def mean(params: Any, state: Any, batch: Any) -> Any:
        def part(batch: Any) -> Any:
            return case.apply(params, state, case.run.loss, batch)

        batch = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), batch)
        (sums, counts), states = jax.vmap(part)(batch)
        return sums.sum() / counts.sum(), jax.tree.map(lambda x: x.mean(0), states)

    step = jax.jit(jax.value_and_grad(mean, has_aux=True))
    params, state = jax.jit(case.init)(jax.random.key(SEED))
    losses, total = [], jax.tree.map(jnp.zeros_like, params)
    for batch in batches:
        (loss, state), grads = step(params, state, batch)
        total = jax.tree.map(jnp.add, total, grads)
        params = jax.tree.map(lambda p, t: p - 0.05 * t, params, total)
        losses.append(float(loss))
    return losses, total, state
