"""What the toolkit costs: its training loop beside a hand-written jax + optax loop of the same model.

Both (`loops.py`) see the same batches and compute the same losses; `paired.py` times them in turn. On a
GPU it is GPT-2 in bfloat16, with tokens per second and MFU. Figures: docs/benchmarks/overhead.md.
"""

import json
import os
import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import jax
import numpy as np
import tyro
from loops import HandWritten, Toolkit
from paired import Block, Spread, ratios, rounds

from shardtrain.data import Tokens, write_tokens
from shardtrain.models.decoder import DecoderConfig, gpt2
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.plan.devices import known_device, mfu
from shardtrain.report.sinks.json_lines import read_jsonl
from shardtrain.trainer.metric_log import STEPS_LATE

MODELS = {
    "tiny": DecoderConfig(vocab=64, seq=16, embed=32, num_layers=2, num_heads=2),
    "brief": DecoderConfig(vocab=64, seq=32, embed=48, num_layers=2, num_heads=2),
    "small": DecoderConfig(vocab=256, seq=64, embed=128, num_layers=4, num_heads=4),
    "gpt2": gpt2(),
}
BATCHES = {"tiny": 4, "brief": 4, "small": 4, "gpt2": 16}
BATCHES_IN_EPOCH = 256
HAND, AGAIN, TOOLKIT = "hand-written loop", "hand-written loop again", "toolkit loop"
HAND_STEP, TOOLKIT_STEP = "hand-written step", "toolkit step"
HAND_LONG, TOOLKIT_LONG = "hand-written loop, long", "toolkit loop, long"
PAIRS = {
    "whole loop": (TOOLKIT, HAND),
    "whole loop, long blocks": (TOOLKIT_LONG, HAND_LONG),
    "compiled step alone": (TOOLKIT_STEP, HAND_STEP),
    "noise floor": (AGAIN, HAND),
}
FIELDS = {"step_seconds": "median step", "wall_seconds": "whole block", "cpu_seconds": "processor time"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      model: tiny (for tests, half a millisecond a step on two cores), brief (1 ms), small (15 ms), gpt2
        (124 million parameters); by default gpt2 on a GPU, else small.
      dtype: compute dtype; by default bfloat16 on a GPU, else float32.
      batch: rows of a step; by default the model's own.
      seq: tokens of a row; by default the model's own.
      steps: steps of a block.
      long: steps of long blocks, which show what the beginning and the end of a loop cost; 0: none are run.
      rounds: blocks of each side.
      quiet: on a machine that others use: rounds in which they took more than this share of the processors
        are run again; 1 takes all.
      compare: steps from the start whose losses are compared.
      log_every: steps between lines of metrics on the toolkit's side.
      seed: of parameters, data and the order of the blocks.
      json: where to write all figures too.

    Raises:
      ValueError: too few steps or rounds.
    """

    model: Literal["tiny", "brief", "small", "gpt2"] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    batch: int | None = None
    seq: int | None = None
    steps: int = 25
    long: int = 0
    rounds: int = 60
    quiet: float = 1.0
    compare: int = 20
    log_every: int = 10
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        least = {"steps": STEPS_LATE + 2, "rounds": 2, "compare": 1, "log_every": 1}
        least |= {"long": STEPS_LATE + 2} if self.long else {}
        wrong = [
            f"{k} is {getattr(self, k)}; use {v} or more" for k, v in least.items() if getattr(self, k) < v
        ]
        if wrong:
            raise ValueError(f"this cannot be measured: {'; '.join(wrong)}")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came out.

    Args:
      options: with every default filled in.
      device_kind: the device, as jax calls it.
      losses: of the first steps, (hand-written, toolkit).
      step_seconds: side -> the median of its blocks' median steps.
      cpu_seconds: side -> the median of its blocks' processor time of a step.
      spreads: pair of sides -> time -> ratio.
      tokens_per_second: of the toolkit's loop, from its median step.
      mfu: of the same; None on a device whose peak is not known.
    """

    options: Options
    device_kind: str
    losses: tuple[list[float], list[float]]
    step_seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    spreads: dict[str, dict[str, Spread]]
    tokens_per_second: float
    mfu: float | None


def filled(options: Options, backend: str) -> tuple[Options, DecoderConfig]:
    """The options with their defaults for a backend ("cpu", "gpu"), and the model."""
    on_gpu = backend == "gpu"
    name = options.model or ("gpt2" if on_gpu else "small")
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    config = replace(MODELS[name], dtype=dtype, seq=options.seq or MODELS[name].seq)
    batch = options.batch or BATCHES[name]
    return replace(options, model=name, dtype=dtype, batch=batch, seq=config.seq), config


def measure(options: Options, config: DecoderConfig) -> Figures:
    """Compare the losses, which compiles and warms up; then time blocks of both sides in turn.

    Args:
      options: with every default filled in.
      config: the model, in the dtype of the options.
    """
    batch, steps, seed = options.batch or 0, options.steps, options.seed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # the hand-written loop knows the order of the first epoch only: it holds all losses compared
        num_tokens = config.seq * batch * max(BATCHES_IN_EPOCH, options.compare) + 1
        tokens = np.random.default_rng(seed).integers(0, config.vocab, num_tokens)
        write_tokens(folder / "tokens.npy", [tokens], dtype="uint32")
        data = Tokens(path=folder / "tokens.npy", vocab=config.vocab, seq=config.seq, heldout_fraction=0)
        source = data.train(folder)
        hand = HandWritten(config, source, batch, seed)
        with closing(Toolkit(config, source, batch, seed, folder)) as toolkit:
            losses = compare(hand, toolkit, options.compare)
            again = hand.twin()
            hand_batch, toolkit_batch = hand.next_batch(), next(toolkit.feed)[0]
            sides = {
                HAND: partial(hand.loop, steps=steps),
                AGAIN: partial(again.loop, steps=steps),
                TOOLKIT: partial(toolkit.loop, steps=steps, log_every=options.log_every),
                HAND_STEP: partial(hand.loop, steps=steps, batch=hand_batch),
                TOOLKIT_STEP: partial(toolkit.bare, steps=steps, batch=toolkit_batch),
            }
            if options.long:
                sides[HAND_LONG] = partial(hand.loop, steps=options.long)
                sides[TOOLKIT_LONG] = partial(toolkit.loop, steps=options.long, log_every=options.log_every)
            rounds(sides, 1, STEPS_LATE, seed)
            blocks = rounds(sides, options.rounds, STEPS_LATE, seed, options.quiet)
    return summed_up(options, config, losses, blocks)


def compare(hand: HandWritten, toolkit: Toolkit, steps: int) -> tuple[list[float], list[float]]:
    """The losses of both sides' first steps."""
    toolkit.loop([], steps, log_every=1)
    return hand.loop([], steps), [record["train/loss"] for record in read_jsonl(toolkit.metrics)]


def summed_up(
    options: Options,
    config: DecoderConfig,
    losses: tuple[list[float], list[float]],
    blocks: dict[str, list[Block]],
) -> Figures:
    """Blocks in medians and ratios."""
    kind = jax.devices()[0].device_kind
    step_seconds = {name: median(block.step_seconds for block in found) for name, found in blocks.items()}
    tokens_per_second = (options.batch or 0) * config.seq / step_seconds[TOOLKIT]
    device = known_device(kind)
    return Figures(
        options=options,
        device_kind=kind,
        losses=losses,
        step_seconds=step_seconds,
        cpu_seconds={name: median(block.cpu_seconds for block in found) for name, found in blocks.items()},
        spreads={
            pair: {field: ratios(field, blocks[side], blocks[over]) for field in Block._fields}
            for pair, (side, over) in PAIRS.items()
            if side in blocks
        },
        tokens_per_second=tokens_per_second,
        mfu=mfu(tokens_per_second * flops_per_token(config), device)
        if device and device.matrix_flops_per_second
        else None,
    )


def report(figures: Figures) -> str:
    """The figures as text."""
    options = figures.options
    lines = [
        f"{options.model}, {options.dtype}, {options.batch} x {options.seq} tokens a step;"
        f" {options.rounds} rounds of {options.steps} steps; one device: {figures.device_kind};"
        f" {os.cpu_count()} cores; jax {jax.__version__}",
        f"losses of the first {options.compare} steps differ by at most"
        f" {largest_difference(*figures.losses):.1e} of their value",
        "",
        f"{'':28}{'ms a step':>10}{'processor ms':>14}",
    ]
    lines += [
        f"{name:28}{1e3 * figures.step_seconds[name]:10.2f}{1e3 * figures.cpu_seconds[name]:14.2f}"
        for name in figures.step_seconds
    ]
    lines += [
        "",
        f"{'ratio within a round':28}{'':16}{'median':>7}  {'quartiles':13}  95 % interval of the median",
    ]
    lines += [
        f"{pair:28}{FIELDS[field]:16}{s.median:7.3f}  {s.low:.3f} - {s.high:.3f}  "
        f"{s.sure[0]:.3f} - {s.sure[1]:.3f}"
        for pair, spreads in figures.spreads.items()
        for field, s in spreads.items()
    ]
    return "\n".join([*lines, "", speed(figures)])


def speed(figures: Figures) -> str:
    """Tokens per second and MFU as text."""
    tokens = f"toolkit loop: {figures.tokens_per_second:,.0f} tokens per second"
    if figures.mfu is None:
        return f"{tokens}; MFU: unknown device '{figures.device_kind}'"
    return (
        f"{tokens}; MFU {figures.mfu:.1%} (PaLM, appendix B: tokens per second x (6 N + 12 L H K T) flops per"
        " token over the peak of dense bfloat16)"
    )


def largest_difference(hand: list[float], toolkit: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    return max(abs(b / a - 1) for a, b in zip(hand, toolkit, strict=True))


def main(options: Options) -> None:
    figures = measure(*filled(options, jax.default_backend()))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(figures), indent=1, default=str) + "\n")
    print(report(figures))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
