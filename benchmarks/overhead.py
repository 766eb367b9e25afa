"""What the toolkit costs: its training loop beside a hand-written jax + optax loop of the same model.

Both (`loops.py`) see the same batches and compute the same losses; `paired.py` times them in turn. On a
GPU it is GPT-2 in bfloat16, with tokens per second and MFU. Figures: docs/benchmarks/overhead.md.
"""

import os
import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import jax
import tyro
from loops import HandWritten, Toolkit, largest_difference, write_source
from paired import Block, Spread, markdown, ratios, rounds

from shardtrain.models.decoder import DecoderConfig, gpt2
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.plan.devices import find_device
from shardtrain.trainer.metric_log import STEPS_LATE

MODELS = {
    "tiny": DecoderConfig(vocab=64, seq=16, embed=32, num_layers=2, num_heads=2),
    "brief": DecoderConfig(vocab=64, seq=32, embed=48, num_layers=2, num_heads=2),
    "small": DecoderConfig(vocab=256, seq=64, embed=128, num_layers=4, num_heads=4),
    "gpt2": gpt2(),
}
BATCHES_IN_EPOCH = 256
HAND, AGAIN, TOOLKIT = "hand-written loop", "hand-written loop again", "toolkit loop"
HAND_STEP, TOOLKIT_STEP = "hand-written step", "toolkit step"
PAIRS = {
    "whole loop": (TOOLKIT, HAND),
    "compiled step alone": (TOOLKIT_STEP, HAND_STEP),
    "noise floor": (AGAIN, HAND),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      model: tiny (for tests), brief (1 ms a step on two cores), small (15 ms), gpt2 (124 million parameters);
        by default gpt2 in bfloat16 on a GPU, else small.
      batch: rows of a step; by default 16 of gpt2, else 4.
      steps: of a block; the loop reads its metrics late, so at least 4.
      rounds: blocks of each side.
      quiet: rounds in which others took more than this share of the processors are run again; 1 takes all.
      compare: steps from the start whose losses are compared.
      seed: of parameters, data and the order of the blocks.
    """

    model: Literal["tiny", "brief", "small", "gpt2"] | None = None
    batch: int | None = None
    steps: int = 25
    rounds: int = 60
    quiet: float = 1.0
    compare: int = 20
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came out.

    Args:
      losses: of the first steps, (hand-written, toolkit).
      step_seconds: side -> the median of its blocks' median steps.
      spreads: pair of sides -> field of `Block` -> ratio.
      tokens_per_second: of the toolkit's loop, from its median step.
      mfu: of the same; None on a device whose peak is not known.
    """

    losses: tuple[list[float], list[float]]
    step_seconds: dict[str, float]
    spreads: dict[str, dict[str, Spread]]
    tokens_per_second: float
    mfu: float | None

    @property
    def difference(self) -> float:
        """The largest relative difference of the losses."""
        return largest_difference(*self.losses)


def measure(options: Options, config: DecoderConfig, batch: int) -> Figures:
    """Compare the losses, which compiles and warms up; then time blocks of both sides in turn."""
    steps, seed = options.steps, options.seed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # the hand-written loop knows the order of the first epoch only: it holds all losses compared
        source = write_source(folder, config, batch, max(BATCHES_IN_EPOCH, options.compare))
        hand = HandWritten(config, source, batch, seed)
        with closing(Toolkit(config, source, batch, seed, folder)) as toolkit:
            losses = hand.loop([], options.compare), toolkit.first_losses(options.compare)
            again = hand.twin()
            hand_batch, toolkit_batch = hand.next_batch(), next(toolkit.feed)[0]
            sides = {
                HAND: partial(hand.loop, steps=steps),
                AGAIN: partial(again.loop, steps=steps),
                TOOLKIT: partial(toolkit.loop, steps=steps, log_every=10),
                HAND_STEP: partial(hand.loop, steps=steps, batch=hand_batch),
                TOOLKIT_STEP: partial(toolkit.bare, steps=steps, batch=toolkit_batch),
            }
            blocks = rounds(sides, options.rounds, STEPS_LATE, seed, options.quiet)
    step_seconds = {name: median(block.step_seconds for block in found) for name, found in blocks.items()}
    tokens_per_second = batch * config.seq / step_seconds[TOOLKIT]
    device = find_device(jax.devices()[0].device_kind)
    peak = device and device.matrix_flops_per_second
    return Figures(
        losses=losses,
        step_seconds=step_seconds,
        spreads={
            pair: {field: ratios(field, blocks[side], blocks[over]) for field in Block._fields}
            for pair, (side, over) in PAIRS.items()
        },
        tokens_per_second=tokens_per_second,
        mfu=tokens_per_second * flops_per_token(config) / peak if peak else None,
    )


def main(options: Options) -> None:
    on_gpu = jax.default_backend() == "gpu"
    name = options.model or ("gpt2" if on_gpu else "small")
    config = replace(MODELS[name], dtype="bfloat16" if on_gpu else "float32")
    batch = options.batch or (16 if name == "gpt2" else 4)
    found = measure(options, config, batch)
    print(
        f"{name}, {batch} x {config.seq} tokens a step; {options.rounds} rounds of {options.steps} steps;"
        f" {jax.devices()[0].device_kind}; {os.cpu_count()} cores; jax {jax.__version__}\n"
        f"losses of the first {options.compare} steps differ by at most {found.difference:.1e} of their value"
    )
    print(markdown(["side", "ms a step"], [(k, f"{1e3 * v:.2f}") for k, v in found.step_seconds.items()]))
    header = ["ratio within a round (95 %)", "median step", "whole block", "processor time"]
    print(markdown(header, [(pair, *spreads.values()) for pair, spreads in found.spreads.items()]))
    share = "unknown device" if found.mfu is None else f"{found.mfu:.1%}"
    print(f"{TOOLKIT}: {found.tokens_per_second:,.0f} tokens per second; MFU {share}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
