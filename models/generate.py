"""Sampling from a decoder, with a forward pass over the whole window for each token.

There is no cache of keys and values: each new token costs a forward pass over `seq` positions. Enough to read
what a model has learned; not an inference engine.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def generate(
    apply: Callable[[jax.Array], jax.Array],
    prompt_tokens: Any,
    num_tokens: int,
    key: jax.Array,
    seq: int,
    temperature: float = 1.0,
) -> np.ndarray:
    """Continue prompts by sampling, one compiled step per token; the text may grow longer than the window.

    Args:
      apply: int32 tokens (B, seq) -> logits (B, seq, V), causal and without dropout. Give
        `jax.tree_util.Partial` with the parameters bound, or an nnx model: their arrays are then arguments of
        the compiled step. Those that a plain function closes over become constants of it.
      prompt_tokens: int (B, T), T of at least 1; of a prompt longer than `seq` the model sees the last `seq`
        tokens.
      num_tokens: how many tokens to add.
      key: a key of `jax.random`; the same key gives the same tokens.
      seq: positions in the window.
      temperature: divides the logits; 0 takes the most likely token.

    Returns:
      int32 (B, T + num_tokens): the prompts and their continuations.

    Raises:
      ValueError: for an empty prompt or one that is no matrix, a negative temperature or number of tokens.

    >>> follow = lambda tokens: jax.nn.one_hot((tokens + 1) % 10, 10)
    >>> generate(follow, [[3, 4]], 7, jax.random.key(0), seq=4, temperature=0.0)
    array([[3, 4, 5, 6, 7, 8, 9, 0, 1]], dtype=int32)
    """
    prompt_BT = np.asarray(prompt_tokens, np.int32)
    _check(prompt_BT.shape, num_tokens, temperature)
    # the window has one shape for all steps, so one program: it is filled up behind, and later moves along
    length = min(prompt_BT.shape[1], seq)
    window_BT = np.zeros((len(prompt_BT), seq), np.int32)
    window_BT[:, :length] = prompt_BT[:, -length:]
    # a module or pytree is an argument of the compiled step; a plain function is a constant of it
    leaves = jax.tree.leaves(apply)
    is_function = len(leaves) == 1 and leaves[0] is apply
    model = jax.tree_util.Partial(apply) if is_function else apply
    added = []
    for i in range(num_tokens):
        window_BT, token_B = _step(
            model,
            window_BT,
            min(length + i, seq),
            jax.random.fold_in(key, i),
            temperature,
            greedy=temperature == 0,
        )
        added.append(token_B)
    return np.concatenate([prompt_BT, *(np.asarray(token_B)[:, None] for token_B in added)], axis=1)


@partial(jax.jit, static_argnames="greedy")
def _step(
    model: Any, window_BT: Any, length: int, key: jax.Array, temperature: float, greedy: bool
) -> tuple[jax.Array, jax.Array]:
    """Sample what follows the first `length` tokens and append it; a full window shifts by one."""
    logits_BV = model(window_BT)[:, length - 1]
    token_B = logits_BV.argmax(-1) if greedy else jax.random.categorical(key, logits_BV / temperature)
    token_B = token_B.astype(jnp.int32)
    full = length == window_BT.shape[1]
    window_BT = jnp.where(full, jnp.roll(window_BT, -1, axis=1), window_BT)
    return window_BT.at[:, jnp.where(full, length - 1, length)].set(token_B), token_B


def _check(shape: tuple[int, ...], num_tokens: int, temperature: float) -> None:
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"prompt_tokens has shape {shape}; it must be (batch, length), both at least 1. "
            "Use [[first_token]] for one prompt of one token."
        )
    if num_tokens < 0 or temperature < 0:
        raise ValueError(
            f"num_tokens is {num_tokens} and temperature is {temperature}; neither may be below 0. "
            "Use temperature=0.0 for the most likely token."
        )
