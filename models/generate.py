"""Batched generation: prompts are read in one program, then tokens are added in a loop of another.

A model with a cache (`key_value_cache.py`) computes one position for each token; any other causal model of
tokens reads its whole window again. `sampling.py` draws the tokens.

How tokens are read are two functions for each kind of model. `start(tokens_BT, counts_B, num_tokens)` reads
prompts, padded on the right, of `counts_B` tokens, to which at most `num_tokens` are added;
`extend(token_B, memory)` reads one more token of each row. Both return the logits of what follows, (batch,
vocab), and what is kept between them, the memory, a pytree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.models import checks
from shardtrain.models.key_value_cache import NewCache, write_slots
from shardtrain.models.sampling import Sampling, sample

NO_TOKEN = -1
"""In place of the tokens after the end of a row."""


def generate(
    model: Any,
    prompts: Sequence[Any],
    num_tokens: int,
    key: jax.Array,
    *,
    seq: int,
    sampling: Sampling = Sampling(),
    end: Sequence[int] = (),
    rows: int | None = None,
    cached: bool = False,
    begin: int | None = None,
) -> list[np.ndarray]:
    """Continue prompts of any lengths, or let an encoder-decoder write targets of them.

    Args:
      model: int32 tokens (B, T) -> logits (B, T, V), causal and without dropout. Give an nnx model, or
        `jax.tree_util.Partial` with the parameters bound: their arrays are then arguments of the compiled
        programs. Those that a plain function closes over become constants of it. With `begin`, of an
        encoder-decoder: (source (B, S), target (B, T), source_mask (B, S)) -> logits (B, T, V).
      prompts: integers (length,) each, the tokens of a prompt, one or more.
      num_tokens: how many tokens to add to each, at most.
      key: a key of `jax.random`; the same key gives the same tokens, whatever `rows` is.
      seq: positions of the model.
      sampling: how tokens are drawn.
      end: tokens after which a row is finished.
      rows: prompts that are continued at the same time; the last ones are filled up, so that there is one
        program. None: all.
      cached: the model takes a cache, as `Decoder` does: (tokens, None, cache, counts) -> (logits of each
        row's last token, cache). Prompt and continuation must fit `seq`. False: the model is applied to the
        last `seq` tokens for each token, and a text may grow longer than that. With `begin` as
        `EncoderDecoder` does: (source or None, target, mask, cache), and the source is read once.
      begin: the token that the targets of an encoder-decoder begin with, of T5 that of padding, 0; a source
        and a target must each fit `seq`. None: the model is a decoder.

    Returns:
      The continuation of each prompt, int32 (at most num_tokens,), with the token of `end` that finished it.

    Raises:
      ValueError: listing everything that is out of range.

    >>> follow = lambda tokens: jax.nn.one_hot((tokens + 1) % 10, 10)
    >>> greedy = Sampling(temperature=0.0)
    >>> found = generate(follow, [[3, 4], [7]], 7, jax.random.key(0), seq=4, sampling=greedy, end=[9])
    >>> [tokens.tolist() for tokens in found]
    [[5, 6, 7, 8, 9], [8, 9]]
    """
    tokens = [np.asarray(prompt, np.int32) for prompt in prompts]
    rows = max(len(tokens), 1) if rows is None else rows
    pairs = begin is not None
    problems = _pair_problems if pairs else _problems
    checks.refuse("generate", problems(tokens, num_tokens, rows, seq if cached or pairs else None))
    if not tokens or num_tokens == 0:
        return [np.zeros(0, np.int32) for _ in tokens]
    reader = make_reader(_make_pytree(model), seq=seq, cached=cached, begin=begin)
    longest = max(map(len, tokens))
    ends = np.asarray(end, np.int32)
    found: list[np.ndarray] = []
    for start in range(0, len(tokens), rows):
        # the last batch repeats the last prompt
        numbers = np.minimum(np.arange(start, start + rows), len(tokens) - 1)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        tokens_BT = np.stack([np.pad(tokens[n], (0, longest - len(tokens[n]))) for n in numbers])
        counts_B = np.array([len(tokens[n]) for n in numbers], np.int32)
        token_B, memory = _prefill(reader, tokens_BT, counts_B, keys_B, num_tokens, sampling)
        tokens_BN, _ = _decode(reader, memory, token_B, keys_B, ends, num_tokens, sampling)
        found += [row[row != NO_TOKEN] for row in np.asarray(tokens_BN)]
    return found[: len(tokens)]


@partial(jax.jit, static_argnums=(4, 5))
def _prefill(
    reader: Any, tokens_BT: Any, counts_B: Any, keys_B: Any, num_tokens: int, sampling: Sampling
) -> tuple[jax.Array, Any]:
    """Read the prompts and draw the first token of each."""
    logits_BV, memory = reader.start(tokens_BT, counts_B, num_tokens)
    return _drawn(logits_BV, keys_B, 0, sampling), memory


@partial(jax.jit, static_argnums=(5, 6), donate_argnums=1)
def _decode(
    reader: Any, memory: Any, token_B: Any, keys_B: Any, ends: Any, num_tokens: int, sampling: Sampling
) -> tuple[jax.Array, Any]:
    """Add tokens until every row is finished; return them, int32 (batch, num_tokens), with the memory."""

    def is_end(token_B: jax.Array) -> jax.Array:
        return (token_B[:, None] == ends).any(1)

    def is_going(state: Any) -> jax.Array:
        i, _, _, done_B, _ = state
        return (i < num_tokens) & ~done_B.all()

    def step(state: Any) -> Any:
        i, tokens_BN, last_B, done_B, memory = state
        logits_BV, memory = reader.extend(last_B, memory)
        token_B = _drawn(logits_BV, keys_B, i, sampling)
        tokens_BN = tokens_BN.at[:, i].set(jnp.where(done_B, NO_TOKEN, token_B))
        return i + 1, tokens_BN, token_B, done_B | is_end(token_B), memory

    tokens_BN = jnp.full((token_B.shape[0], num_tokens), NO_TOKEN, jnp.int32).at[:, 0].set(token_B)
    state = jax.lax.while_loop(is_going, step, (1, tokens_BN, token_B, is_end(token_B), memory))
    # the memory is returned so that its buffers, which are donated, are used in place
    return state[1], state[4]


def _drawn(logits_BV: jax.Array, keys_B: jax.Array, number: Any, sampling: Sampling) -> jax.Array:
    """Draw token `number` of each row, by a key of its own."""
    return sample(logits_BV, jax.vmap(jax.random.fold_in, (0, None))(keys_B, number), sampling)


def _make_pytree(model: Any) -> Any:
    """Return a module or pytree as it is, to be an argument of programs; a plain function as a constant."""
    leaves = jax.tree.leaves(model)
    return jax.tree_util.Partial(model) if len(leaves) == 1 and leaves[0] is model else model


def _problems(prompts: Sequence[np.ndarray], num_tokens: int, rows: int, most: int | None) -> list[str]:
    """Return what is out of range; `most` is the most tokens of a prompt and its continuation."""
    found = _number_problems(prompts, num_tokens, rows)
    if not found and prompts and most is not None:
        longest = max(map(len, prompts))
        if longest + num_tokens > most:
            room = most - longest
            use = f"Use num_tokens={room}" if room > 0 else f"Give prompts of at most {most - 1} tokens"
            found.append(
                f"the longest prompt has {longest} tokens, and {num_tokens} are added, but the model has"
                f" seq={most} positions. {use}, or cached=False, which reads the last {most} tokens for each."
            )
    return found


def _pair_problems(sources: Sequence[np.ndarray], num_tokens: int, rows: int, most: int | None) -> list[str]:
    """Return what is out of range; `most` is the most tokens of a source, and of a target."""
    found = _number_problems(sources, num_tokens, rows)
    if not found and sources and most is not None:
        longest = max(map(len, sources))
        if longest > most:
            found.append(
                f"the longest source has {longest} tokens, but the model has seq={most} positions. Give"
                f" sources of at most {most} tokens."
            )
        if num_tokens > most:
            found.append(
                f"num_tokens is {num_tokens}, but targets have seq={most} positions. Use num_tokens={most}."
            )
    return found


def _number_problems(prompts: Sequence[np.ndarray], num_tokens: int, rows: int) -> list[str]:
    found = [
        f"prompt {i} has shape {prompt.shape}; give one token or more, such as the one that begins a text."
        for i, prompt in enumerate(prompts)
        if prompt.ndim != 1 or not prompt.size
    ]
    if num_tokens < 0:
        found.append(f"num_tokens is {num_tokens}; it must be 0 or above.")
    if rows < 1:
        found.append(f"rows is {rows}; it must be at least 1. Use rows=None for all prompts at once.")
    return found


def make_reader(model: Any, *, seq: int, cached: bool, begin: int | None) -> Any:
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
        return self._read(write_slots(tokens_BS, token_B[:, None], lengths_B), lengths_B + 1)

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
    """Reads sources once, and tokens of targets with a cache, which is its memory."""

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
