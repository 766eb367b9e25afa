"""Generate tokens in batches: one program reads the prompts, another adds tokens in a loop.

A model with a cache (`key_value_cache.py`) computes one position for each new token. Any other causal model
of tokens reads its whole window again for each token. `sampling.py` draws the tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.errors.messages import refuse
from shardtrain.models.key_value_cache import NewCache, write_slots
from shardtrain.models.sampling import Sampling, sample

NO_TOKEN = -1
"""Fills a row after its end."""


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
    """Continue prompts of any lengths by a decoder, or translate them by an encoder-decoder.

    Args:
      model: maps int32 tokens (B, T) to logits (B, T, V), causal and without dropout. Give an nnx model, or
        `jax.tree_util.Partial` with the parameters bound: their arrays are then arguments of the compiled
        programs. Arrays that a plain function closes over become constants of the programs. With `begin` the
        model is an encoder-decoder: (source (B, S), target (B, T), source_mask (B, S)) -> logits (B, T, V).
      prompts: the tokens of each prompt, integers (length,), one or more.
      num_tokens: largest number of tokens to add to each prompt.
      key: a key of `jax.random`; the same key gives the same tokens, whatever `rows` is.
      seq: number of positions of the model.
      sampling: how tokens are drawn.
      end: tokens that finish a row.
      rows: number of prompts in a batch; the last batch is padded with copies of the last prompt, so that one
        program serves all. None means all prompts.
      cached: whether the model takes a cache, as `Decoder` does: (tokens, None, cache, counts) -> (logits of
        each row's last token, cache). Prompt and continuation must then fit `seq`. Otherwise the model reads
        the last `seq` tokens for each new token, and a text may grow longer than `seq`. With `begin` the call
        is that of `EncoderDecoder`: (source or None, target, mask, cache); the source is read once.
      begin: the first token of the targets of an encoder-decoder (for T5 the padding token, 0); sources and
        targets must each fit `seq`. None means that the model is a decoder.

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
    problems = _find_problems(tokens, num_tokens, rows)
    if not problems and tokens:
        longest = max(map(len, tokens))
        if begin is not None:
            problems = _find_pair_problems(longest, num_tokens, seq)
        elif cached:
            problems = _find_length_problems(longest, num_tokens, seq)
    refuse("generate", problems)
    if not tokens or num_tokens == 0:
        return [np.zeros(0, np.int32) for _ in tokens]
    leaves = jax.tree.leaves(model)
    # a plain function is one leaf, and becomes a constant of the programs
    model = jax.tree_util.Partial(model) if len(leaves) == 1 and leaves[0] is model else model
    reader = choose_reader(seq=seq, cached=cached, begin=begin)
    longest = max(map(len, tokens))
    ends = np.asarray(end, np.int32)
    found: list[np.ndarray] = []
    for start in range(0, len(tokens), rows):
        # the last batch repeats the last prompt
        numbers = np.minimum(np.arange(start, start + rows), len(tokens) - 1)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        tokens_BT = np.stack([np.pad(tokens[n], (0, longest - len(tokens[n]))) for n in numbers])
        counts_B = np.array([len(tokens[n]) for n in numbers], np.int32)
        token_B, memory = _prefill(reader, model, tokens_BT, counts_B, keys_B, num_tokens, sampling)
        tokens_BN, _ = _decode(reader, model, memory, token_B, keys_B, ends, num_tokens, sampling)
        found += [row[row != NO_TOKEN] for row in np.asarray(tokens_BN)]
    return found[: len(tokens)]


class Reader(NamedTuple):
    """Two functions that let a model read tokens, and their options.

    Both return the logits (batch, vocab) of the next token, and a memory: a pytree for the next call.

    Attributes:
      start: (reader, model, tokens_BT, counts_B, num_tokens) reads prompts of `counts_B` tokens, padded on
        the right, to which at most `num_tokens` are added.
      extend: (reader, model, token_B, memory) reads one more token of each row.
      seq: number of positions of the model.
      begin: the first token of targets, of an encoder-decoder.
    """

    start: Callable[..., tuple[jax.Array, Any]]
    extend: Callable[..., tuple[jax.Array, Any]]
    seq: int
    begin: int


@partial(jax.jit, static_argnums=(0, 5, 6))
def _prefill(
    reader: Reader,
    model: Any,
    tokens_BT: Any,
    counts_B: Any,
    keys_B: Any,
    num_tokens: int,
    sampling: Sampling,
) -> tuple[jax.Array, Any]:
    """Read the prompts and draw the first token of each."""
    logits_BV, memory = reader.start(reader, model, tokens_BT, counts_B, num_tokens)
    return _draw(logits_BV, keys_B, 0, sampling), memory


@partial(jax.jit, static_argnums=(0, 6, 7), donate_argnums=2)
def _decode(
    reader: Reader,
    model: Any,
    memory: Any,
    token_B: Any,
    keys_B: Any,
    ends: Any,
    num_tokens: int,
    sampling: Sampling,
) -> tuple[jax.Array, Any]:
    """Add tokens until every row is finished; return them, int32 (batch, num_tokens), with the memory."""

    def is_end(token_B: jax.Array) -> jax.Array:
        return (token_B[:, None] == ends).any(1)

    def is_going(state: Any) -> jax.Array:
        i, _, _, done_B, _ = state
        return (i < num_tokens) & ~done_B.all()

    def step(state: Any) -> Any:
        i, tokens_BN, last_B, done_B, memory = state
        logits_BV, memory = reader.extend(reader, model, last_B, memory)
        token_B = _draw(logits_BV, keys_B, i, sampling)
        tokens_BN = tokens_BN.at[:, i].set(jnp.where(done_B, NO_TOKEN, token_B))
        return i + 1, tokens_BN, token_B, done_B | is_end(token_B), memory

    tokens_BN = jnp.full((token_B.shape[0], num_tokens), NO_TOKEN, jnp.int32).at[:, 0].set(token_B)
    state = jax.lax.while_loop(is_going, step, (1, tokens_BN, token_B, is_end(token_B), memory))
    # the memory is returned so that its buffers, which are donated, are used in place
    return state[1], state[4]


def _draw(logits_BV: jax.Array, keys_B: jax.Array, number: Any, sampling: Sampling) -> jax.Array:
    """Draw token `number` of each row, by a key of its own."""
    return sample(logits_BV, jax.vmap(jax.random.fold_in, (0, None))(keys_B, number), sampling)


def _find_problems(prompts: Sequence[np.ndarray], num_tokens: int, rows: int) -> list[str]:
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


def _find_length_problems(longest: int, num_tokens: int, seq: int) -> list[str]:
    if longest + num_tokens <= seq:
        return []
    room = seq - longest
    use = f"Use num_tokens={room}" if room > 0 else f"Give prompts of at most {seq - 1} tokens"
    return [
        f"the longest prompt has {longest} tokens, and {num_tokens} are added, but the model has seq={seq}"
        f" positions. {use}, or cached=False, which reads the last {seq} tokens for each."
    ]


def _find_pair_problems(longest: int, num_tokens: int, seq: int) -> list[str]:
    found = []
    if longest > seq:
        found.append(
            f"the longest source has {longest} tokens, but the model has seq={seq} positions. Give sources of"
            f" at most {seq} tokens."
        )
    if num_tokens > seq:
        found.append(
            f"num_tokens is {num_tokens}, but targets have seq={seq} positions. Use num_tokens={seq}."
        )
    return found


def choose_reader(*, seq: int, cached: bool, begin: int | None) -> Reader:
    """Return the reader for a kind of model; see `generate` for the arguments."""
    if begin is not None:
        pair = (_start_target, _extend_target) if cached else (_start_whole_target, _extend_whole_target)
        return Reader(*pair, seq, begin)
    return Reader(*((_start_cached, _extend_cached) if cached else (_start_window, _extend_window)), seq, 0)


# the memory is the cache
def _start_cached(reader: Reader, model: Any, tokens_BT: Any, counts_B: Any, num_tokens: int) -> Any:
    return model(tokens_BT, None, NewCache(tokens_BT.shape[1] + num_tokens), counts_B)


def _extend_cached(reader: Reader, model: Any, token_B: jax.Array, memory: Any) -> Any:
    return model(token_B[:, None], None, memory, None)


# the memory is all tokens, and the number of tokens of each row
def _start_window(reader: Reader, model: Any, tokens_BT: Any, counts_B: Any, num_tokens: int) -> Any:
    room = max(num_tokens, reader.seq - tokens_BT.shape[1])
    return _read_window(reader, model, jnp.pad(tokens_BT, ((0, 0), (0, room))), counts_B)


def _extend_window(reader: Reader, model: Any, token_B: jax.Array, memory: Any) -> Any:
    tokens_BS, lengths_B = memory
    return _read_window(reader, model, write_slots(tokens_BS, token_B[:, None], lengths_B), lengths_B + 1)


def _read_window(reader: Reader, model: Any, tokens_BS: jax.Array, lengths_B: jax.Array) -> Any:
    # the window has one shape, so there is one program: it is padded on the right, and later moves along
    starts_B = jnp.maximum(lengths_B - reader.seq, 0)
    window_BT = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, reader.seq))(
        tokens_BS, starts_B
    )
    logits_BV = model(window_BT)[jnp.arange(len(lengths_B)), lengths_B - 1 - starts_B]
    return logits_BV, (tokens_BS, lengths_B)


# the memory is the cache of an encoder-decoder, which has read the source
def _start_target(reader: Reader, model: Any, tokens_BS: Any, counts_B: Any, num_tokens: int) -> Any:
    first_B1 = jnp.full((len(counts_B), 1), reader.begin, jnp.int32)
    return model(tokens_BS, first_B1, make_source_mask(tokens_BS, counts_B), NewCache(num_tokens))


def _extend_target(reader: Reader, model: Any, token_B: jax.Array, memory: Any) -> Any:
    return model(None, token_B[:, None], None, memory)


# the memory is the source, its mask, the target, and the length of the target
def _start_whole_target(reader: Reader, model: Any, tokens_BS: Any, counts_B: Any, num_tokens: int) -> Any:
    target_BT = jnp.zeros((len(counts_B), num_tokens), jnp.int32).at[:, 0].set(reader.begin)
    memory = tokens_BS, make_source_mask(tokens_BS, counts_B), target_BT, jnp.int32(1)
    return _read_whole_target(model, memory)


def _extend_whole_target(reader: Reader, model: Any, token_B: jax.Array, memory: Any) -> Any:
    source_BS, mask_BS, target_BT, length = memory
    memory = source_BS, mask_BS, target_BT.at[:, length].set(token_B), length + 1
    return _read_whole_target(model, memory)


def _read_whole_target(model: Any, memory: Any) -> Any:
    source_BS, mask_BS, target_BT, length = memory
    # the model is causal: what is after a token does not matter
    return model(source_BS, target_BT, mask_BS)[:, length - 1], memory


def make_source_mask(tokens_BS: jax.Array, counts_B: jax.Array) -> jax.Array:
    """Return 1 for the tokens of each source and 0 for its padding, int32."""
    return (jnp.arange(tokens_BS.shape[1]) < counts_B[:, None]).astype(jnp.int32)
