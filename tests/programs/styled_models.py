"""Small models in the styles of Flax's guides, bonsai and public repositories, as their authors write them.

No dim has a name and nothing is constrained. Each is (model, loss, kind of samples) in `STYLES`.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardtrain as st

IMAGE, TOKENS, VECTOR = (8, 8, 3), (8,), (6,)


class Samples:
    """Random samples of one kind, with a label of three classes."""

    def __init__(self, shape):
        self.shape = shape

    def __len__(self):
        return 64

    def __getitem__(self, index):
        draws = np.random.default_rng(index)
        if self.shape == TOKENS:
            x = draws.integers(0, 16, self.shape).astype(np.int32)
        else:
            x = np.asarray(draws.normal(size=self.shape), np.float32)
        return {"x": x, "label": np.int32(draws.integers(3))}

    def train(self, folder):
        return self

    def heldout(self, folder):
        return None


def weigh(losses, batch):
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def classify(apply, batch, *arguments):
    logits = apply(batch["x"], *arguments)
    return weigh(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]), batch)


def predict_next(apply, batch):
    logits = apply(batch["x"])[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 1:])
    return weigh(losses.mean(-1), batch)


def reconstruct(apply, batch, *arguments):
    return weigh(((apply(batch["x"], *arguments) - batch["x"]) ** 2).mean((1, 2, 3)), batch)


class MixerBlock(nnx.Module):
    def __init__(self, tokens, dim, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.tokens = nnx.Sequential(
            nnx.Linear(tokens, 8, rngs=rngs), nnx.gelu, nnx.Linear(8, tokens, rngs=rngs)
        )
        self.channels = nnx.Sequential(
            nnx.Linear(dim, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, dim, rngs=rngs)
        )

    def __call__(self, x):
        x = x + self.tokens(self.norm1(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, 8, (4, 4), strides=(4, 4), rngs=rngs)
        self.blocks = nnx.List([MixerBlock(4, 8, rngs) for _ in range(2)])
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(x.shape[0], -1, 8)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ConvNeXtBlock(nnx.Module):
    def __init__(self, dim, drop_path, *, rngs):
        self.depthwise = nnx.Conv(dim, dim, (3, 3), feature_group_count=dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(dim, 4 * dim, rngs=rngs),
            nnx.Linear(4 * dim, dim, rngs=rngs),
        )
        self.gamma = nnx.Param(jnp.full((dim,), 0.5))
        self.drop_path = nnx.Dropout(drop_path, broadcast_dims=(1, 2, 3), rngs=rngs)

    def __call__(self, x):
        y = self.down(nnx.gelu(self.up(self.norm(self.depthwise(x)))))
        return x + self.drop_path(self.gamma * y)


class ConvNeXt(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (2, 2), strides=(2, 2), rngs=rngs)
        self.blocks = nnx.Sequential(ConvNeXtBlock(8, 0.3, rngs=rngs))
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.blocks(self.stem(x)).mean((1, 2)))


class InvertedResidual(nnx.Module):
    def __init__(self, dim, *, rngs):
        conv = partial(nnx.Conv, use_bias=False, rngs=rngs)
        self.expand, self.depthwise, self.project = (
            conv(dim, 2 * dim, (1, 1)),
            conv(2 * dim, 2 * dim, (3, 3), feature_group_count=2 * dim),
            conv(2 * dim, dim, (1, 1)),
        )
        self.norms = nnx.List([nnx.GroupNorm(size, 4, rngs=rngs) for size in (2 * dim, 2 * dim, dim)])

    def __call__(self, x):
        y = jax.nn.relu6(self.norms[0](self.expand(x)))
        y = jax.nn.relu6(self.norms[1](self.depthwise(y)))
        return x + self.norms[2](self.project(y))


class MobileNet(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.block, self.head = InvertedResidual(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(self.stem(x)).mean(axis=(1, 2)))


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.enter, self.down = (
            nnx.Conv(3, 4, (3, 3), rngs=rngs),
            nnx.Conv(4, 8, (3, 3), strides=(2, 2), rngs=rngs),
        )
        self.middle = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2, 2), strides=(2, 2), rngs=rngs)
        self.leave = nnx.Conv(8, 3, (3, 3), rngs=rngs)

    def __call__(self, x):
        skip = nnx.relu(self.enter(x))
        x = nnx.relu(self.middle(nnx.relu(self.down(skip))))
        return self.leave(jnp.concatenate([skip, nnx.relu(self.up(x))], axis=-1))


class Denoiser(UNet):
    """Diffusion: the time is an argument, and the loss draws times and noise."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.frequencies = jnp.exp(jnp.linspace(0, 2, 4))
        self.time = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x, time):
        angles = time[:, None] * self.frequencies
        shift = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))
        return super().__call__(x + shift[:, None, None])


def denoise(apply, batch):
    times_key, noise_key = jax.random.split(apply.key)
    times = jax.random.uniform(times_key, (len(batch["x"]),))
    noise = jax.random.normal(noise_key, batch["x"].shape)
    part = times[:, None, None, None]
    found = apply(batch["x"] * (1 - part) + noise * part, times)
    return weigh(((found - noise) ** 2).mean((1, 2, 3)), batch)


class Lstm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(16, 8, rngs=rngs)
        self.rnn = nnx.RNN(nnx.OptimizedLSTMCell(8, 8, rngs=rngs))
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.asarray(self.rnn(self.embed(x))))


class LinenGru(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.GRUCell(8))(nn.Embed(16, 8)(x))
        return nn.Dense(16)(nn.LayerNorm()(x))


class Swin(nnx.Module):
    """Windows are rows of attention, and dropout sees them flattened."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.embed = nnx.Conv(3, 8, (1, 1), rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        rows = x.shape[0]
        x = jnp.roll(self.embed(x), (-2, -2), axis=(1, 2))
        windows = x.reshape(rows, 2, 4, 2, 4, 8).transpose(0, 1, 3, 2, 4, 5).reshape(rows * 4, 16, 8)
        windows = windows + self.attention(self.norm(windows))
        x = windows.reshape(rows, 2, 2, 4, 4, 8).transpose(0, 1, 3, 2, 4, 5).reshape(rows, 8, 8, 8)
        return self.head(x.mean((1, 2)))


class FlatDropout(nnx.Module):
    """Tokens are flattened into rows before dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.drop = nnx.Embed(16, 8, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x):
        y = self.drop(self.embed(x.reshape(-1)))
        return self.head(y).reshape(*x.shape, 16)


class Vae(nn.Module):
    """That of Flax's examples."""

    @nn.compact
    def __call__(self, x, z_rng):
        flat = nn.relu(nn.Dense(16, name="fc1")(x.reshape(x.shape[0], -1)))
        mean, logvar = nn.Dense(4, name="fc2_mean")(flat), nn.Dense(4, name="fc2_logvar")(flat)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(z_rng, logvar.shape)
        return nn.Dense(192, name="fc4")(nn.relu(nn.Dense(16, name="fc3")(z))).reshape(x.shape)


class Critic(nnx.Module):
    """Of a GAN, with spectral norms."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, 8, (4, 4), strides=(2, 2), rngs=rngs)
        self.hidden = nnx.SpectralNorm(nnx.Linear(128, 8, rngs=rngs), rngs=rngs)
        self.score = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        x = nnx.leaky_relu(self.conv(x), 0.2).reshape(x.shape[0], -1)
        return self.score(nnx.leaky_relu(self.hidden(x, update_stats=False), 0.2))[:, 0]


def tell_apart(apply, batch):
    fakes = jax.random.normal(apply.key, batch["x"].shape)
    real, fake = apply(batch["x"]), apply(fakes)
    return weigh(jax.nn.softplus(-real) + jax.nn.softplus(fake), batch)


class Mamba(nnx.Module):
    """A depthwise convolution over time and a selective scan."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed, self.norm = nnx.Embed(16, 8, rngs=rngs), nnx.RMSNorm(8, rngs=rngs)
        self.enter = nnx.Linear(8, 32, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(16, 16, (4,), feature_group_count=16, padding="CAUSAL", rngs=rngs)
        self.select, self.leave = nnx.Linear(16, 24, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.log_a = nnx.Param(jnp.log(jnp.arange(1.0, 5.0)) * jnp.ones((16, 1)))

    def __call__(self, tokens):
        x = self.embed(tokens)
        y, gate = jnp.split(self.enter(self.norm(x)), 2, -1)
        y = nnx.silu(self.conv(y))
        step, b, c = jnp.split(self.select(y), (16, 20), -1)
        step = jax.nn.softplus(step)[..., None]
        keep, new = jnp.exp(-step * jnp.exp(self.log_a[...])), step * b[:, :, None] * y[..., None]

        def combine(one, two):
            return one[0] * two[0], one[1] * two[0] + two[1]

        states = jax.lax.associative_scan(combine, (keep, new), axis=1)[1]
        y = jnp.einsum("btds,bts->btd", states, c) * nnx.silu(gate)
        return self.embed.attend(x + self.leave(y))


class Gnn(nnx.Module):
    """Messages along the edges of one graph, whose ends are constants."""

    def __init__(self, rngs: nnx.Rngs):
        self.senders, self.receivers = np.array([0, 1, 2, 3, 4, 5, 0]), np.array([1, 2, 3, 4, 5, 0, 3])
        self.message, self.update = nnx.Linear(2, 8, rngs=rngs), nnx.Linear(9, 8, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        nodes = x[..., None]
        ends = jnp.concatenate([nodes[:, self.senders], nodes[:, self.receivers]], -1)
        messages = nnx.relu(self.message(ends))
        total = jax.vmap(lambda m: jax.ops.segment_sum(m, self.receivers, 6))(messages)
        return self.head(nnx.relu(self.update(jnp.concatenate([nodes, total], -1))).mean(1))


class ViT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, 8, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.cls = nnx.Param(jnp.zeros((1, 1, 8)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 5, 8)))
        self.attention = nnx.MultiHeadAttention(2, 8, dropout_rate=0.1, decode=False, rngs=rngs)
        self.norm, self.head = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(x.shape[0], 4, 8)
        x = jnp.concatenate([jnp.tile(self.cls[...], (x.shape[0], 1, 1)), x], 1)
        x = self.drop(x + self.positions[...])
        return self.head((x + self.attention(self.norm(x)))[:, 0])


class GptBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.mlp = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        y = self.norm(x)
        x = x + self.drop(self.attention(y, mask=nnx.make_causal_mask(x[..., 0])))
        return x + nnx.gelu(self.mlp(x))


class MiniGpt(nnx.Module):
    """Of the guide of the JAX AI stack."""

    def __init__(self, rngs: nnx.Rngs):
        self.rngs = rngs
        self.tokens, self.positions = nnx.Embed(16, 8, rngs=rngs), nnx.Embed(8, 8, rngs=rngs)
        self.blocks = nnx.List([GptBlock(rngs) for _ in range(1)])
        self.head = nnx.Linear(8, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = self.tokens(x) + self.positions(jnp.arange(x.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Scanned(nnx.Module):
    """Layers stacked by nnx.vmap and run by nnx.scan, of the guide of transforms."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return nnx.Linear(6, 6, rngs=rngs)

        self.layers, self.head = create(rngs), nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return x + nnx.tanh(layer(x))

        return self.head(run(self.layers, x))


class Perceiver(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.latents = nnx.Param(jax.random.normal(rngs.params(), (4, 8)))
        self.enter = nnx.Linear(3, 8, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        pixels = self.enter(x.reshape(x.shape[0], -1, 3))
        latents = jnp.broadcast_to(self.latents[...], (x.shape[0], 4, 8))
        return self.head(self.cross(latents, pixels).mean(1))


class Fourier(nnx.Module):
    """Random features that are drawn once, and an array as an attribute."""

    def __init__(self, rngs: nnx.Rngs):
        self.matrix = jax.random.normal(rngs.params(), (6, 8))
        self.head = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        angles = x @ self.matrix
        return self.head(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1))


class WaveNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(16, 8)(x)
        for dilation in (1, 2):
            y = nn.Conv(16, (2,), kernel_dilation=dilation, padding="CAUSAL")(x)
            gate, y = jnp.split(y, 2, -1)
            x = x + nn.Dense(8)(nn.sigmoid(gate) * jnp.tanh(y))
        return nn.Dense(16)(nn.relu(x))


class LinenResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Conv(8, (3, 3), use_bias=False)(x)
        y = nn.relu(nn.GroupNorm(4)(nn.Conv(8, (3, 3), strides=(2, 2), use_bias=False)(x)))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)) + nn.Dropout(0.2, deterministic=not train)(y)
        return nn.Dense(3)(x.mean((1, 2)))


class Gates(nnx.Module):
    """A dense mixture of experts."""

    def __init__(self, rngs: nnx.Rngs):
        self.gate = nnx.Linear(6, 3, rngs=rngs)
        self.experts = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (3, 6, 3)))

    def __call__(self, x):
        return jnp.einsum("be,bd,edf->bf", nnx.softmax(self.gate(x)), x, self.experts[...])


class ReplacedState(nnx.Module):
    """A count of calls beside parameters, and a Dropout with streams of the call."""

    def __init__(self, rngs: nnx.Rngs):
        self.enter, self.head = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.drop, self.calls = nnx.Dropout(0.2), nnx.Variable(jnp.array(0))

    def __call__(self, x, rngs: nnx.Rngs, train: bool = True):
        self.calls[...] += 1
        return self.head(self.drop(nnx.relu(self.enter(x)), rngs=rngs, deterministic=not train))


def from_linen(module, shape, *others):
    dtype = jnp.int32 if shape == TOKENS else jnp.float32
    return st.from_linen(module, jax.ShapeDtypeStruct((1, *shape), dtype), *others)


def with_key(loss):
    return lambda apply, batch: loss(apply, batch, apply.key)


STYLES = {
    "mixer": (Mixer, classify, IMAGE),
    "convnext": (ConvNeXt, classify, IMAGE),
    "mobilenet": (MobileNet, classify, IMAGE),
    "unet": (UNet, reconstruct, IMAGE),
    "denoiser": (Denoiser, denoise, IMAGE),
    "lstm": (Lstm, predict_next, TOKENS),
    "linen gru": (partial(from_linen, LinenGru(), TOKENS), predict_next, TOKENS),
    "swin": (Swin, classify, IMAGE),
    "flat dropout": (FlatDropout, predict_next, TOKENS),
    "vae": (partial(from_linen, Vae(), IMAGE, jax.random.key(0)), with_key(reconstruct), IMAGE),
    "critic": (Critic, tell_apart, IMAGE),
    "mamba": (Mamba, predict_next, TOKENS),
    "gnn": (Gnn, classify, VECTOR),
    "vit": (ViT, classify, IMAGE),
    "mini gpt": (MiniGpt, predict_next, TOKENS),
    "scanned": (Scanned, classify, VECTOR),
    "perceiver": (Perceiver, classify, IMAGE),
    "fourier": (Fourier, classify, VECTOR),
    "wavenet": (partial(from_linen, WaveNet(), TOKENS), predict_next, TOKENS),
    "linen resnet": (partial(from_linen, LinenResNet(), IMAGE), classify, IMAGE),
    "gates": (Gates, classify, VECTOR),
    "streams of the call": (ReplacedState, classify, VECTOR),
}


def styled_run(name):
    """Return the run of a style; momentum of 1 adds up its gradients."""
    model, loss, shape = STYLES[name]
    if isinstance(model, partial) and model.func is from_linen:
        model = model()
    strategy = st.Strategy(layout=st.Layout(unnamed="replicate"))
    optimizer = optax.sgd(0.01, momentum=1.0)
    data = Samples(shape)
    return st.Run(model=model, data=data, loss=loss, batch=8, steps=2, optimizer=optimizer, strategy=strategy)
