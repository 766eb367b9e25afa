"""This project beside torch on a CPU: nanoGPT's character-level configuration, in one process, paired.

Both (`loops.py`, `torch_model.py`) start from the same parameters and see the same batches.
Figures: docs/benchmarks/torch.md.
"""

import os
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median

import jax
import tyro
from loops import HandWritten, Toolkit, largest_difference, write_source
from paired import markdown, ratios, rounds

from shardtrain.models.decoder import DecoderConfig
from shardtrain.system.xla_flags import apply_preset
from shardtrain.trainer.metric_log import STEPS_LATE

NANOGPT = DecoderConfig(
    vocab=65, seq=64, embed=128, num_layers=4, num_heads=4, bias=False, activation="gelu_erf"
)
BATCH, BATCHES_IN_EPOCH = 12, 256
TORCH = "torch"
DEVICES = 2
"""CPU devices of this process, as of `shardtrain train --cpu-devices`."""
HAND, ONE, ALL = "hand-written jax, unrolled", "shardtrain, one device", f"shardtrain, {DEVICES} devices"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      rounds: blocks of each side.
      steps: steps of a block.
      quiet: rounds in which others took more than this share of the processors are run again.
      compare: steps from the start whose losses are compared.
    """

    rounds: int = 20
    steps: int = 25
    quiet: float = 1.0
    compare: int = 20


def main(options: Options) -> None:
    # torch is no dependency of this project: `uv run --with torch`
    from torch_model import TorchLoop

    flags = apply_preset("auto", os.environ, metadata.version("jaxlib")).xla_flags
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={DEVICES}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = write_source(folder, NANOGPT, BATCH, max(BATCHES_IN_EPOCH, options.compare))
        hand = HandWritten(replace(NANOGPT, scan=False), source, BATCH, 0)
        toolkits = {}
        for name, num in {ONE: 1, ALL: DEVICES}.items():
            (own := folder / str(num)).mkdir()
            toolkits[name] = stack.enter_context(closing(Toolkit(NANOGPT, source, BATCH, 0, own, num)))
        beside = TorchLoop(NANOGPT, toolkits[ONE].state.params, hand.tokens, BATCH)
        losses = {TORCH: beside.loop([], options.compare), HAND: hand.loop([], options.compare)}
        losses |= {name: toolkit.first_losses(options.compare) for name, toolkit in toolkits.items()}
        sides = {
            TORCH: partial(beside.loop, steps=options.steps),
            HAND: partial(hand.loop, steps=options.steps),
            **{n: partial(t.loop, steps=options.steps, log_every=10) for n, t in toolkits.items()},
        }
        blocks = rounds(sides, options.rounds, STEPS_LATE, 0, options.quiet)
    spreads = {name: ratios("step_seconds", blocks[TORCH], found) for name, found in blocks.items()}
    seconds = {name: median(block.step_seconds for block in found) for name, found in blocks.items()}
    print(
        f"nanoGPT, {BATCH} x {NANOGPT.seq} tokens a step, float32; {options.rounds} rounds of {options.steps}"
        f" steps; {os.cpu_count()} cores; jax {jax.__version__}, torch {metadata.version('torch')}"
    )
    rows = [
        (
            name,
            f"{1e3 * seconds[name]:.2f}",
            spread,
            f"{largest_difference(losses[TORCH], losses[name]):.1e}",
        )
        for name, spread in spreads.items()
    ]
    print(markdown(["loop", "ms a step", "tokens/s over torch's (95 %)", "losses differ by"], rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
