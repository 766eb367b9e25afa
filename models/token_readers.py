"""How generation reads tokens: two functions for each kind of model, and what is kept between them.

`start(tokens_BT, counts_B, num_tokens)` reads prompts, padded on the right, of `counts_B` tokens, to which
at most `num_tokens` are added; `extend(token_B, memory)` reads one more token of each row. Both return the
logits of what follows, (batch, vocab), and the memory, a pytree.
"""

from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.models.key_value_cache import NewCache, written


def reader_of(model: Any, *, seq: int, cached: bool, begin: int | None) -> Any:
    """Return the reader of a model, a pytree; see `generate` for the arguments."""
    if begin is not None:
        return Targets(model, begin) if cached else WholeTargets(model, begin)
    return Cached(model) if cached else Windowed(model, seq)


def _node(reader: Any) -> Any:
    """Register a class of readers as a pytree whose leaves are those of its model.

    To jax 0.10 two classes of `register_dataclass` with equal fields are one, and the program of one reader
    was, rarely, run for another.
    """
    names = [field.name for field in fields(reader) if field.name != "model"]
    jax.tree_util.register_pytree_node(
        reader,
        lambda each: ((each.model,), tuple(getattr(each, name) for name in names)),
        lambda others, model: reader(*model, *others),
    )
    return reader


@_node
@dataclass(frozen=True)
class Cached:
    """Reads tokens with a cache; its memory is that."""

    model: Any

    def start(self, tokens_BT: jax.Array, counts_B: jax.Array, num_tokens: int) -> tuple[jax.Array, Any]:
        return self.model(tokens_BT, None, NewCache(tokens_BT.shape[1] + num_tokens), counts_B)

    def extend(self, token_B: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        return self.model(token_B[:, None], None, memory, None)


@_node
@dataclass(frozen=True)
class Windowed:
    """Reads the last tokens of each row again; its memory is all tokens, and how many each row has."""

    model: Any
    seq: int

    def start(self, tokens_BT: jax.Array, counts_B: jax.Array, num_tokens: int) -> tuple[jax.Array, Any]:
        room = max(num_tokens, self.seq - tokens_BT.shape[1])
        return self._read(jnp.pad(tokens_BT, ((0, 0), (0, room))), counts_B)

    def extend(self, token_B: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        tokens_BS, lengths_B = memory
        return self._read(written(tokens_BS, token_B[:, None], lengths_B), lengths_B + 1)

    def _read(self, tokens_BS: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, Any]:
        # the window has one shape, so there is one program: it is filled up behind, and later moves along
        starts_B = jnp.maximum(lengths_B - self.seq, 0)
        window_BT = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, self.seq))(
            tokens_BS, starts_B
        )
        logits_BV = self.model(window_BT)[jnp.arange(len(lengths_B)), lengths_B - 1 - starts_B]
        return logits_BV, (tokens_BS, lengths_B)


@_node
@dataclass(frozen=True)
class Targets:
    """Reads sources once, and tokens of targets with a cache (`source_cache.py`), which is its memory."""

    model: Any
    begin: int

    def start(self, tokens_BS: jax.Array, counts_B: jax.Array, num_tokens: int) -> tuple[jax.Array, Any]:
        first_B1 = jnp.full((len(counts_B), 1), self.begin, jnp.int32)
        return self.model(tokens_BS, first_B1, source_mask(tokens_BS, counts_B), NewCache(num_tokens))

    def extend(self, token_B: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        return self.model(None, token_B[:, None], None, memory)


@_node
@dataclass(frozen=True)
class WholeTargets:
    """Reads source and target again for each token; its memory is both."""

    model: Any
    begin: int

    def start(self, tokens_BS: jax.Array, counts_B: jax.Array, num_tokens: int) -> tuple[jax.Array, Any]:
        target_BT = jnp.zeros((len(counts_B), num_tokens), jnp.int32).at[:, 0].set(self.begin)
        return self._read((tokens_BS, source_mask(tokens_BS, counts_B), target_BT, jnp.int32(1)))

    def extend(self, token_B: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        source_BS, mask_BS, target_BT, length = memory
        return self._read((source_BS, mask_BS, target_BT.at[:, length].set(token_B), length + 1))

    def _read(self, memory: Any) -> tuple[jax.Array, Any]:
        source_BS, mask_BS, target_BT, length = memory
        # what stands behind a token is not seen
        return self.model(source_BS, target_BT, mask_BS)[:, length - 1], memory


def source_mask(tokens_BS: jax.Array, counts_B: jax.Array) -> jax.Array:
    """Return 1 for the tokens of each source and 0 for what fills it up, int32."""
    return (jnp.arange(tokens_BS.shape[1]) < counts_B[:, None]).astype(jnp.int32)
