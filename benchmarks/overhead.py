"""What the toolkit costs: its training loop beside a hand-written jax + optax loop of the same model.

Both see the same batches and compute the same losses; `paired.py` times them in turn. On a GPU it
is GPT-2 in bfloat16, with tokens per second and MFU. Figures: docs/benchmarks/overhead.md.
"""

import json
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, cast

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from paired import Block, Spread, ratios, rounds
from rich.console import Console

from shardtrain.checkpoint import Checkpoints
from shardtrain.checkpoint_policy import CheckpointPolicy
from shardtrain.data import Batches, Tokens, Windows, place, write_tokens
from shardtrain.data.batches import epoch_order
from shardtrain.layout import Layout
from shardtrain.loop import STEPS_LATE, Pace, Pieces, StopSignals, run_loop
from shardtrain.loss import next_token_loss
from shardtrain.mesh import make_mesh
from shardtrain.metrics import JsonLines, read_jsonl
from shardtrain.model import as_model
from shardtrain.models.decoder import DecoderConfig, flops_per_token, gpt2
from shardtrain.optimizer import Optimizer, Schedule, make_optimizer
from shardtrain.report.progress import progress
from shardtrain.state import init_state, make_placement
from shardtrain.step import make_step
from shardtrain.topology import known_device, mfu

MODELS = {
    "tiny": DecoderConfig(vocab=64, seq=16, embed=32, num_layers=2, num_heads=2),
    "small": DecoderConfig(vocab=256, seq=64, embed=128, num_layers=4, num_heads=4),
    "gpt2": gpt2(),
}
BATCHES = {"tiny": 4, "small": 4, "gpt2": 16}
BATCHES_IN_EPOCH = 256
SCHEDULE_STEPS, PEAK, B1, B2, DECAY, CLIP = 100_000, 3e-4, 0.9, 0.95, 0.1, 1.0
HAND, AGAIN, TOOLKIT = "hand-written loop", "hand-written loop again", "toolkit loop"
HAND_STEP, TOOLKIT_STEP = "hand-written step", "toolkit step"
PAIRS = {
    "whole loop": (TOOLKIT, HAND),
    "compiled step alone": (TOOLKIT_STEP, HAND_STEP),
    "noise floor": (AGAIN, HAND),
}
FIELDS = {"step_seconds": "median step", "wall_seconds": "whole block", "cpu_seconds": "processor time"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      model: tiny (for tests), small (about 20 ms a step on two cores), gpt2 (124 million parameters);
        by default gpt2 on a GPU, else small.
      dtype: compute dtype; by default bfloat16 on a GPU, else float32.
      batch: rows of a step; by default the model's own.
      seq: tokens of a row; by default the model's own.
      steps: steps of a block.
      rounds: blocks of each side.
      compare: steps from the start whose losses are compared.
      log_every: steps between lines of metrics on the toolkit's side.
      seed: of parameters, data and the order of the blocks.
      json: where to write all figures too.

    Raises:
      ValueError: too few steps or rounds.
    """

    model: Literal["tiny", "small", "gpt2"] | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    batch: int | None = None
    seq: int | None = None
    steps: int = 25
    rounds: int = 60
    compare: int = 20
    log_every: int = 10
    seed: int = 0
    json: Path | None = None

    def __post_init__(self) -> None:
        least = {"steps": STEPS_LATE + 2, "rounds": 2, "compare": 1, "log_every": 1}
        wrong = [
            f"{k} is {getattr(self, k)}; use {v} or more" for k, v in least.items() if getattr(self, k) < v
        ]
        if wrong:
            raise ValueError(f"this cannot be measured: {'; '.join(wrong)}")


class HandWritten:
    """The loop one writes without a toolkit: one jitted function, donated, losses read late."""

    def __init__(self, config: DecoderConfig, source: Windows, batch: int, seed: int) -> None:
        graph, variables = nnx.split(config(nnx.Rngs(jax.random.key(seed))), nnx.Param)
        self.params = nnx.to_pure_dict(variables)
        # weights decay, biases and gains do not; blocks are stacked, so theirs have one dim more
        decayed = {
            name: jax.tree.map(lambda x, least=2 + (name == "blocks"): x.ndim >= least, tree)
            for name, tree in self.params.items()
        }
        rate = optax.cosine_decay_schedule(PEAK, SCHEDULE_STEPS, alpha=0.1)
        optimizer = optax.chain(
            optax.clip_by_global_norm(CLIP), optax.adamw(rate, B1, B2, weight_decay=DECAY, mask=decayed)
        )
        self.opt_state = optimizer.init(self.params)

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, nnx.State(params))(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        self.step = step
        order = epoch_order(len(source), seed, 0)
        self.tokens = np.stack([source[order(i)]["tokens"] for i in range(len(source))])
        self.batch, self.row = batch, 0

    def next_batch(self) -> jax.Array:
        rows = self.tokens[self.row : self.row + self.batch]
        self.row = (self.row + self.batch) % len(self.tokens)
        return jax.device_put(rows, jax.devices()[0])

    def loop(self, ticks: list[float], steps: int, batch: jax.Array | None = None) -> list[float]:
        """Some steps, and their losses; with a `batch` that is on the device already, the bare step."""
        losses, pending = [], deque[jax.Array]()
        for _ in range(steps):
            ticks.append(perf_counter())
            tokens = self.next_batch() if batch is None else batch
            self.params, self.opt_state, loss = self.step(self.params, self.opt_state, tokens)
            pending.append(loss)
            if len(pending) > STEPS_LATE:
                losses.append(float(pending.popleft()))
        return losses + [float(loss) for loss in pending]


class Toolkit:
    """What `shardtrain train` runs, without checkpoints: batches loaded ahead, step, loop, sink, progress."""

    def __init__(self, config: DecoderConfig, source: Windows, batch: int, seed: int, folder: Path) -> None:
        model, layout = as_model(config), Layout()
        named = Optimizer(learning_rate=Schedule(peak=PEAK), weight_decay=DECAY, b1=B1, b2=B2, clip=CLIP)
        optimizer, rate = make_optimizer(named, SCHEDULE_STEPS, model.dims)
        mesh = make_mesh(layout, jax.devices()[:1])
        placement = make_placement(model, optimizer, layout, mesh)
        self.state = init_state(model, optimizer, placement, seed)
        self.step = make_step(model, next_token_loss, optimizer, placement, rate)
        self.loaded = Batches(source=source, batch=batch, seed=seed).iterate()
        self.place = partial(place, mesh=mesh, batch_axes=layout.batch_axes)
        self.done = 0
        self.metrics = folder / "metrics.jsonl"
        self.sink = JsonLines(self.metrics, resume_after=None)
        self.progress = progress(total_steps=SCHEDULE_STEPS, console=Console(quiet=True))

    def loop(self, ticks: list[float], steps: int, log_every: int) -> None:
        """Some steps through `run_loop`; state and data go on from block to block."""
        last = self.done + steps
        pieces = Pieces(
            step=self.step,
            batches=self._on_mesh(ticks),
            evaluate=lambda state: {},
            checkpoints=cast("Checkpoints", _NoCheckpoints(last)),
            policy=CheckpointPolicy(),
            sink=self.sink,
            progress=self.progress,
            extra={},
        )
        with StopSignals() as stop:
            pace = Pace(steps=last, log_every=log_every)
            self.state, self.done = run_loop(self.state, self.done, pieces, pace, stop)
        if stop.received is not None:
            raise KeyboardInterrupt

    def _on_mesh(self, ticks: list[float]) -> Iterator[tuple[Any, Any]]:
        while True:
            ticks.append(perf_counter())
            batch, after = next(self.loaded)
            yield self.place(batch), after

    def bare(self, ticks: list[float], steps: int, batch: Any) -> None:
        """The compiled step alone, on a batch that is on the mesh already."""
        pending = deque[jax.Array]()
        for _ in range(steps):
            ticks.append(perf_counter())
            self.state, metrics = self.step(self.state, batch)
            pending.append(metrics["loss_sum"])
            if len(pending) > STEPS_LATE:
                float(pending.popleft())
        for loss in pending:
            float(loss)

    def close(self) -> None:
        self.loaded.close()
        self.sink.close()


class _NoCheckpoints:
    """Stands where the loop asks for checkpoints: the last step counts as saved."""

    def __init__(self, last: int) -> None:
        self._last = last

    def latest(self) -> int:
        return self._last

    def wait(self) -> None:
        pass


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


def measure(options: Options) -> Figures:
    """Compare the losses, which compiles and warms up; then time blocks of both sides in turn."""
    options, config = filled(options, jax.default_backend())
    batch, steps, seed = options.batch or 0, options.steps, options.seed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # the hand-written loop knows the order of the first epoch only: it holds all losses compared
        num_tokens = config.seq * batch * max(BATCHES_IN_EPOCH, options.compare) + 1
        tokens = np.random.default_rng(seed).integers(0, config.vocab, num_tokens)
        write_tokens(folder / "tokens.npy", [tokens])
        data = Tokens(path=folder / "tokens.npy", vocab=config.vocab, seq=config.seq, heldout_fraction=0)
        source = data.train(folder)
        hand, again = (HandWritten(config, source, batch, seed) for _ in range(2))
        with closing(Toolkit(config, source, batch, seed, folder)) as toolkit:
            losses = compare(hand, toolkit, options.compare)
            hand_batch, toolkit_batch = hand.next_batch(), toolkit.place(next(toolkit.loaded)[0])
            sides = {
                HAND: partial(hand.loop, steps=steps),
                AGAIN: partial(again.loop, steps=steps),
                TOOLKIT: partial(toolkit.loop, steps=steps, log_every=options.log_every),
                HAND_STEP: partial(hand.loop, steps=steps, batch=hand_batch),
                TOOLKIT_STEP: partial(toolkit.bare, steps=steps, batch=toolkit_batch),
            }
            rounds(sides, 1, STEPS_LATE, seed)
            blocks = rounds(sides, options.rounds, STEPS_LATE, seed)
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
        },
        tokens_per_second=tokens_per_second,
        mfu=device and mfu(tokens_per_second * flops_per_token(config), device),
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
    lines += ["", f"{'ratio within a round':28}{'':16}{'median':>7}  {'quartiles':13}  median lies (95 %) in"]
    lines += [
        f"{pair:28}{FIELDS[field]:16}{s.median:7.3f}  {s.low:.3f} - {s.high:.3f}  {s.sure[0]:.3f} - {s.sure[1]:.3f}"
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
    figures = measure(options)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(figures), indent=1, default=str) + "\n")
    print(report(figures))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
