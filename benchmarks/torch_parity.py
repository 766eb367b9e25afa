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
import numpy as np
import tyro
from loops import HandWritten, Toolkit
from overhead import largest_difference
from paired import markdown, ratios, rounds

from shardtrain.data import Tokens, write_tokens
from shardtrain.models.decoder import DecoderConfig
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.system.xla_flags import Preset, apply_preset, preset_text
from shardtrain.trainer.metric_log import STEPS_LATE

NANOGPT = DecoderConfig(
    vocab=65, seq=64, embed=128, num_layers=4, num_heads=4, bias=False, activation="gelu_erf"
)
BATCH, BATCHES_IN_EPOCH = 12, 256
TORCH = "torch"
UNROLLED = replace(NANOGPT, scan=False)
CONFIGS = {
    "scanned": (NANOGPT, False),
    "unrolled": (UNROLLED, False),
    "unrolled, no remat": (replace(UNROLLED, remat="none"), False),
    "scanned, all devices": (NANOGPT, True),
}
"""Name -> the model, and whether it runs on all devices, over the axis data, or on one."""
HAND = "hand-written jax, unrolled"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      rounds: blocks of each side.
      steps: steps of a block.
      quiet: rounds in which others took more than this share of the processors are run again.
      compare: steps from the start whose losses are compared.
      cpu_devices: number of CPU devices of this process, as of `shardtrain train`.
      xla_preset: flags of XLA, as of `shardtrain train`.
    """

    rounds: int = 20
    steps: int = 25
    quiet: float = 1.0
    compare: int = 20
    cpu_devices: int = 2
    xla_preset: Preset = "auto"


def main(options: Options) -> None:
    # torch is no dependency of this project: `uv run --with torch`
    from torch_model import TorchLoop

    flags = apply_preset(options.xla_preset, os.environ, metadata.version("jaxlib"))
    devices = f"--xla_force_host_platform_device_count={options.cpu_devices}"
    os.environ["XLA_FLAGS"] = f"{flags.xla_flags} {devices}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        num_tokens = NANOGPT.seq * BATCH * max(BATCHES_IN_EPOCH, options.compare) + 1
        tokens = np.random.default_rng(0).integers(0, NANOGPT.vocab, num_tokens)
        write_tokens(folder / "tokens.npy", [tokens])
        data = Tokens(path=folder / "tokens.npy", vocab=NANOGPT.vocab, seq=NANOGPT.seq, heldout_fraction=0)
        source = data.train(folder)
        toolkits, losses = {}, {}
        hand = HandWritten(UNROLLED, source, BATCH, 0)
        for name, (config, on_all) in CONFIGS.items():
            num = options.cpu_devices if on_all else 1
            (own := folder / str(len(toolkits))).mkdir()
            toolkits[name] = stack.enter_context(closing(Toolkit(config, source, BATCH, 0, own, num)))
        beside = TorchLoop(NANOGPT, toolkits["scanned"].state.params, hand.tokens, BATCH)
        losses[TORCH] = beside.loop([], options.compare)
        hand.loop([], options.compare)
        for name, toolkit in toolkits.items():
            toolkit.loop([], options.compare, log_every=1)
            losses[name] = [record["train/loss"] for record in read_jsonl(toolkit.metrics)]
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
        f" steps; {os.cpu_count()} cores; jax {jax.__version__}, torch {metadata.version('torch')}\n"
        f"{preset_text(options.xla_preset, flags) or 'no XLA flags'}"
    )
    rows = [
        (
            name,
            f"{1e3 * seconds[name]:.2f}",
            spread,
            f"{largest_difference(losses[TORCH], losses[name]):.1e}" if name in losses else "",
        )
        for name, spread in spreads.items()
    ]
    print(markdown(["loop", "ms a step", "tokens/s over torch's (95 %)", "losses differ by"], rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
