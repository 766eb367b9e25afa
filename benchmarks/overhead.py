"""What the toolkit costs: its training loop beside a hand-written jax + optax loop of the same model.

Both (`loops.py`) see the same batches and compute the same losses; `paired.py` times them in turn. Figures:
docs/benchmarks/overhead.md; of a GPU, by `gpu.py`.
"""

import os
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import jax
import tyro
from loops import HandWritten, Toolkit, largest_difference, write_source
from paired import Block, Spread, markdown, ratios, time_rounds

from shardtrain.models.decoder import DecoderConfig
from shardtrain.trainer.metric_log import STEPS_LATE

MODELS = {
    "tiny": DecoderConfig(vocab=64, seq=16, embed=32, num_layers=2, num_heads=2),
    "brief": DecoderConfig(vocab=64, seq=32, embed=48, num_layers=2, num_heads=2),
    "small": DecoderConfig(vocab=256, seq=64, embed=128, num_layers=4, num_heads=4),
}
BATCH, BATCHES_IN_EPOCH, COMPARED = 4, 256, 20
"""Rows of a step, batches of the data, and steps from the start whose losses are compared."""
HAND, AGAIN, TOOLKIT = "hand-written loop", "hand-written loop again", "toolkit loop"
HAND_STEP, TOOLKIT_STEP = "hand-written step", "toolkit step"
PAIRS = {
    "whole loop": (TOOLKIT, HAND),
    "compiled step alone": (TOOLKIT_STEP, HAND_STEP),
    "noise floor": (AGAIN, HAND),
}


class Figures(NamedTuple):
    """Losses of the first steps, (hand-written, toolkit), and side -> blocks."""

    losses: tuple[list[float], list[float]]
    blocks: dict[str, list[Block]]

    def step_seconds(self, side: str) -> float:
        """Return the median of its blocks' median steps."""
        return median(block.step_seconds for block in self.blocks[side])

    def ratio(self, pair: str, field: str) -> Spread:
        """Return the ratio of a pair of `PAIRS` in a field of `Block`."""
        side, over = PAIRS[pair]
        return ratios(field, self.blocks[side], self.blocks[over])


def measure(config: DecoderConfig, batch: int, steps: int, rounds: int, quiet: float = 1.0) -> Figures:
    """Compare the losses, which compiles and warms up; then time blocks of both sides in turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # the hand-written loop knows the order of the first epoch only: it holds all losses compared
        source = write_source(folder, config, batch, BATCHES_IN_EPOCH)
        hand = HandWritten(config, source, batch)
        with closing(Toolkit(config, source, batch, folder)) as toolkit:
            losses = hand.loop([], COMPARED), toolkit.first_losses(COMPARED)
            again = hand.twin()
            hand_batch, toolkit_batch = hand.next_batch(), next(toolkit.feed)[0]
            sides = {
                HAND: partial(hand.loop, steps=steps),
                AGAIN: partial(again.loop, steps=steps),
                TOOLKIT: partial(toolkit.loop, steps=steps, log_every=10),
                HAND_STEP: partial(hand.loop, steps=steps, batch=hand_batch),
                TOOLKIT_STEP: partial(toolkit.bare, steps=steps, batch=toolkit_batch),
            }
            blocks = time_rounds(sides, rounds, STEPS_LATE, 0, quiet)
    return Figures(losses, blocks)


def main(
    model: Literal["tiny", "brief", "small"] = "small", steps: int = 25, rounds: int = 60, quiet: float = 1.0
) -> None:
    """Print times and ratios of both loops.

    Args:
      model: tiny (for tests), brief (1 ms a step on two cores) or small (15 ms).
      steps: of a block; the loop reads its metrics late, so at least 4.
      rounds: blocks of each side.
      quiet: rounds in which others took more than this share of the processors are run again; 1 takes all.
    """
    found = measure(MODELS[model], BATCH, steps, rounds, quiet)
    print(
        f"{model}; {rounds} rounds of {steps} steps;"
        f" {jax.devices()[0].device_kind}; {os.cpu_count()} cores; jax {jax.__version__}\n"
        f"losses of the first {COMPARED} steps differ by {largest_difference(*found.losses):.1e} at most"
    )
    rows = [(side, f"{1e3 * found.step_seconds(side):.2f}") for side in found.blocks]
    print(markdown(["side", "ms a step"], rows))
    header = ["ratio within a round (95 %)", "median step", "whole block", "processor time"]
    spreads = [(pair, *(found.ratio(pair, field) for field in Block._fields)) for pair in PAIRS]
    print(markdown(header, spreads))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
