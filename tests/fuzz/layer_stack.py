"""Plain nnx models that constrain nothing: a few layers, each written as a word such as `conv.16.3x3.s2.g4`.

A layer takes any shape (rows, ..., features), so any layer can be left out. Next: `subjects.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Shape = tuple[int, ...]
"""Of one row: places and features, (..., C)."""
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "tanh": jnp.tanh,
    "softmax": jax.nn.softmax,
    "sort": lambda x: jnp.sort(x, axis=-1),
    "cumsum": lambda x: jnp.cumsum(x, axis=1) / x.shape[1],
    "flip": lambda x: jnp.flip(x, axis=1),
    "roll": lambda x: jnp.roll(x, 1, axis=1),
    "gather": lambda x: jnp.take(x, jnp.arange(x.shape[1])[::-1] // 2, axis=1),
    "fft": lambda x: jnp.fft.fft(x, axis=-1).real,
    "gram": lambda x: jnp.einsum("b...c,b...d->bcd", x, x) / x.shape[1],
    "flatten": lambda x: x.reshape(x.shape[0], -1),
    "split": lambda x: jnp.concatenate([part * (i + 1.0) for i, part in enumerate(halves(x))], -1),
    "pool": lambda x: over_windows(x, nnx.avg_pool),
    "maxpool": lambda x: over_windows(x, nnx.max_pool),
    "resize": lambda x: jax.image.resize(
        x, (x.shape[0], *(2 * n for n in x.shape[1:-1]), x.shape[-1]), "linear"
    ),
    "topk": lambda x: jax.lax.top_k(x, max(1, x.shape[-1] // 2))[0],
}
"""Layers without parameters, by name."""


def halves(x: jax.Array) -> list[jax.Array]:
    """Cut the features in two, the second of them larger if they are odd."""
    return jnp.split(x, [x.shape[-1] // 2], axis=-1)


def over_windows(x: jax.Array, pool: Callable[..., jax.Array]) -> jax.Array:
    """Pool windows of 2 places in each direction; a vector has none."""
    places = (2,) * (x.ndim - 2)
    return pool(x, window_shape=places, strides=places, padding="SAME") if places else x


@dataclass(frozen=True)
class Word:
    """A layer's word: its name, numbers in order, and numbers with a letter before them."""

    name: str
    numbers: tuple[int, ...]
    window: tuple[int, ...]
    letters: dict[str, int]
    words: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> "Word":
        """Read a word such as `conv.16.3x3.s2.VALID`."""
        name, *parts = text.split(".")
        numbers, letters, words, window = [], {}, [], (3, 3)
        for part in parts:
            if part.isdigit():
                numbers.append(int(part))
            elif part[0].isdigit():
                window = tuple(map(int, part.split("x")))
            elif part[0].islower() and part[1:].isdigit():
                letters[part[0]] = int(part[1:])
            else:
                words.append(part)
        return cls(name, tuple(numbers), window, letters, tuple(words))


def make_convolution(word: Word, shape: Shape, rngs: nnx.Rngs) -> nnx.Module | None:
    """Make a convolution over all places, also transposed, grouped (g0: one group for each feature)."""
    places, channels = shape[:-1], shape[-1]
    if not places:
        return nnx.Linear(channels, word.numbers[0], rngs=rngs)
    window = (word.window * 2)[: len(places)]
    strides, dilation = word.letters.get("s", 1), word.letters.get("d", 1)
    padding = word.words[0] if word.words else "SAME"
    if padding == "VALID" and any((k - 1) * dilation >= n for k, n in zip(window, places, strict=True)):
        padding = "SAME"
    options: dict[str, Any] = {"kernel_size": window, "strides": (strides,) * len(places), "rngs": rngs}
    options |= {"kernel_dilation": (dilation,) * len(places), "padding": padding}
    if word.name == "convt":
        return nnx.ConvTranspose(channels, word.numbers[0], **options)
    groups, features = word.letters.get("g", 1) or channels, word.numbers[0]
    if channels % groups or features % groups:
        groups, features = channels, channels * max(1, features // channels)
    return nnx.Conv(channels, features, feature_group_count=groups, **options)


class Recurrent(nnx.Module):
    """A recurrent cell over the first places, the others flattened into features."""

    def __init__(self, cell: type, features: int, hidden: int, rngs: nnx.Rngs):
        self.hidden = hidden
        self.rnn = nnx.RNN(cell(features, hidden, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.rnn(x.reshape(*x.shape[:2], -1))  # pyright: ignore[reportReturnType]


class Scanned(nnx.Module):
    """Residual dense layers, stacked, over which a scan walks."""

    def __init__(self, features: int, depth: int, rngs: nnx.Rngs):
        draw = nnx.initializers.lecun_normal(batch_axis=0)
        self.kernel = nnx.Param(draw(rngs.params(), (depth, features, features)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, kernel: (x + jnp.tanh(x @ kernel), None), x, self.kernel[...])[0]


class Attention(nnx.Module):
    """Attention between all places."""

    def __init__(self, features: int, heads: int, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(heads, features, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        return self.attention(flat).reshape(x.shape)


class Experts(nnx.Module):
    """A dense mixture: all experts of every place, weighed by a router."""

    def __init__(self, features: int, num: int, rngs: nnx.Rngs):
        draw = nnx.initializers.lecun_normal(batch_axis=0)
        self.router = nnx.Linear(features, num, rngs=rngs)
        self.kernel = nnx.Param(draw(rngs.params(), (num, features, features)))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(self.router(x))
        return jnp.einsum("b...c,ecd,b...e->b...d", x, self.kernel[...], weights)


CELLS = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell, "rnn": nnx.SimpleCell}


def make_layer(word: Word, shape: Shape, rngs: nnx.Rngs) -> nnx.Module | None:
    """Make the module of a word for rows of a shape; None for a layer without parameters."""
    features = shape[-1]
    first = word.numbers[0] if word.numbers else features
    match word.name:
        case "conv" | "convt":
            return make_convolution(word, shape, rngs)
        case "dense":
            return nnx.Linear(features, first, rngs=rngs)
        case "layernorm":
            return nnx.LayerNorm(features, rngs=rngs)
        case "rmsnorm":
            return nnx.RMSNorm(features, rngs=rngs)
        case "groupnorm":
            groups = next(n for n in (4, 3, 2, 1) if features % n == 0)
            return nnx.GroupNorm(features, num_groups=groups, rngs=rngs)
        case "batchnorm":
            return nnx.BatchNorm(features, rngs=rngs)
        case "attention":
            heads = next(n for n in (first, 4, 3, 2, 1) if features % n == 0)
            return Attention(features, heads, rngs)
        case "scan":
            return Scanned(features, word.letters.get("l", 2), rngs)
        case "experts":
            return Experts(features, first, rngs)
        case "dropout":
            return nnx.Dropout(0.25, rngs=rngs)
    if word.name in CELLS:
        inputs = features
        for size in shape[1:-1]:
            inputs *= size
        return Recurrent(CELLS[word.name], inputs, first, rngs) if len(shape) > 1 else None
    return None


class LayerStack(nnx.Module):
    """Layers one after the other, and a linear head of the mean over places or of each place.

    Args:
      layers: words; `save` and `add` are the ends of a residual connection.
      shape: of one row, without the batch; integers of tokens have an embedding first.
      tokens: number of tokens of the embedding; 0 for none.
      head: `mean` or `each`.
    """

    def __init__(self, layers: tuple[str, ...], shape: Shape, tokens: int, head: str, rngs: nnx.Rngs):
        self.words, self.head_of, modules = layers, head, []
        self.embedding = nnx.Embed(tokens, shape[-1], rngs=rngs) if tokens else None
        for text in layers:
            word = Word.read(text)
            modules.append(make_layer(word, shape, rngs))
            shape = self._shape_after(word, modules[-1], shape)
        self.modules = nnx.List(modules)
        self.head = nnx.Linear(shape[-1], 4, rngs=rngs)

    @staticmethod
    def _shape_after(word: Word, module: nnx.Module | None, shape: Shape) -> Shape:
        if isinstance(module, Recurrent):
            return (shape[0], module.hidden)

        def call(x: jax.Array) -> jax.Array:
            return x if word.name in ("dropout", "batchnorm") else run_layer(word, module, x)

        return jax.eval_shape(call, jax.ShapeDtypeStruct((1, *shape), jnp.float32)).shape[1:]

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.embedding is not None:
            x = self.embedding(x)
        saved = None
        for text, module in zip(self.words, self.modules, strict=True):
            word = Word.read(text)
            if word.name == "save":
                saved = x
            elif word.name == "add":
                x = x + saved if saved is not None and saved.shape == x.shape else x
            else:
                x = run_layer(word, module, x)
        if self.head_of == "mean":
            x = x.mean(tuple(range(1, x.ndim - 1)))
        return self.head(x)


def run_layer(word: Word, module: nnx.Module | None, x: jax.Array) -> jax.Array:
    """Apply a layer; what needs places leaves a vector as it is."""
    if module is not None:
        return module(x)
    if word.name not in FUNCTIONS or (x.ndim == 2 and word.name in ("gram", "resize")):
        return x
    return FUNCTIONS[word.name](x)
