"""Time attentions of one device beside each other, forward and backward, and print their temporary bytes.

    python benchmarks/attention.py --seqs 128 512 2048 --rounds 9

Next: `models/attention/__init__.py`, whose choice "auto" these figures set.
"""

import time
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from paired import markdown, spread, take_turns

from shardtrain.models.attention import attend_whole
from shardtrain.system.xla_flags import step_options

NAMES = ("xla", "blockwise")
TOKENS, HEADS, HEAD_DIM = 8192, 4, 32
"""Tokens of all rows, at least one row; heads, and features of each."""


def compile_gradient(name: str, seq: int, packed: bool) -> Any:
    """Return the compiled gradient of an attention, and its arguments; packed rows have four segments."""
    rows = max(TOKENS // seq, 1)
    shapes = [jax.random.normal(jax.random.key(i), (rows, seq, HEADS, HEAD_DIM)) for i in range(3)]
    segments = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32) * 4 // seq, (rows, seq)) if packed else None

    def loss(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return jnp.sin(attend_whole(name, q, k, v, segments_BT=segments)).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), compiler_options=step_options(jax.default_backend()))
    return gradient.lower(*shapes, segments).compile(), (*shapes, segments)


def time_call(compiled: Any, arguments: Any) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def main(seqs: tuple[int, ...] = (128, 256, 384, 512, 1024, 2048, 4096, 8192), rounds: int = 9) -> None:
    """Print a row for each number of positions, without and with segments."""
    lines = []
    for seq in seqs:
        for packed in (False, True):
            sides = {name: compile_gradient(name, seq, packed) for name in NAMES}
            calls = {name: partial(time_call, *side) for name, side in sides.items()}
            take_turns(calls, 1, 0)
            found = take_turns(calls, rounds, seq)
            ratios = spread([a / b for a, b in zip(found["blockwise"], found["xla"], strict=True)])
            sizes = [sides[name][0].memory_analysis().temp_size_in_bytes / 2**20 for name in NAMES]
            figures = (f"{median(found['xla']) * 1e3:.1f}", ratios, *(f"{size:.1f}" for size in sizes))
            lines.append([seq, "4 segments" if packed else "causal", *figures])
    print(markdown(["positions", "", "xla ms", "blockwise / xla", "xla MiB", "blockwise MiB"], lines))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
