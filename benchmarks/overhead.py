"""What the toolkit costs: its training loop beside a hand-written jax + optax loop of the same model.

Both see the same batches and compute the same losses; blocks of steps of each side follow one
another in random order in one process. On a GPU also tokens per second and MFU.
Figures and what they mean: docs/benchmarks/overhead.md.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
import optax
from flax import nnx
from rich.console import Console

from shardtrain.checkpoint import Checkpoints
from shardtrain.checkpoint_policy import CheckpointPolicy
from shardtrain.data import Batches, Windows, place
from shardtrain.data.batches import epoch_order
from shardtrain.layout import Layout
from shardtrain.loop import STEPS_LATE, Pace, Pieces, StopSignals, run_loop
from shardtrain.loss import next_token_loss
from shardtrain.mesh import make_mesh
from shardtrain.metrics import JsonLines, read_jsonl
from shardtrain.model import as_model
from shardtrain.models.decoder import DecoderConfig, gpt2
from shardtrain.optimizer import Optimizer, Schedule, make_optimizer
from shardtrain.report.progress import progress
from shardtrain.state import init_state, make_placement
from shardtrain.step import make_step

MODELS = {
    "tiny": DecoderConfig(vocab=64, seq=16, embed=32, num_layers=2, num_heads=2),
    "small": DecoderConfig(vocab=256, seq=64, embed=128, num_layers=4, num_heads=4),
    "gpt2": gpt2(),
}
BATCHES = {"tiny": 4, "small": 8, "gpt2": 16}
SCHEDULE_STEPS, PEAK, B1, B2, DECAY, CLIP = 100_000, 3e-4, 0.9, 0.95, 0.1, 1.0
WINDOWS = 4096


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      model: tiny (for tests), small (about 20 ms a step on two cores), gpt2 (124M); by default gpt2
        on a GPU, else small.
      dtype: compute dtype; by default bfloat16 on a GPU, else float32.
      batch: rows of a step; by default the model's own.
      seq: tokens of a row; by default the model's own.
      steps: steps of a block.
      rounds: how often each side runs a block.
      compare: steps from the start whose losses are compared.
      log_every: steps between lines of metrics on the toolkit's side.
      seed: of parameters, data and the order of the blocks.
      json: where to write all figures too.
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


class Block(NamedTuple):
    """Times of one block: the median step, and per step the whole block's wall and processor time."""

    step_seconds: float
    wall_seconds: float
    cpu_seconds: float


class HandWritten:
    """The loop one writes without a toolkit: one jitted function, donated, losses read late."""

    def __init__(self, config: DecoderConfig, source: Windows, batch: int, seed: int) -> None:
        graph, variables = nnx.split(config(nnx.Rngs(jax.random.key(seed))), nnx.Param)
        self.params = nnx.to_pure_dict(variables)
        # weights decay, biases and gains do not; blocks are stacked, so theirs have one dim more
        mask = {
            name: jax.tree.map(lambda x, stacked=(name == "blocks"): x.ndim - stacked >= 2, tree)
            for name, tree in self.params.items()
        }
        rate = optax.cosine_decay_schedule(PEAK, SCHEDULE_STEPS, alpha=0.1)
        optimizer = optax.chain(
            optax.clip_by_global_norm(CLIP), optax.adamw(rate, B1, B2, weight_decay=DECAY, mask=mask)
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
        self.device = jax.devices()[0]
        order = epoch_order(len(source), seed, 0)
        self.tokens = np.stack([source[order(i)]["tokens"] for i in range(len(source))])
        self.batch, self.row = batch, 0

    def next_batch(self) -> jax.Array:
        rows = self.tokens[self.row : self.row + self.batch]
        self.row = (self.row + self.batch) % len(self.tokens)
        return jax.device_put(rows, self.device)

    def loop(self, steps: int, ticks: list[float], batch: jax.Array | None = None) -> list[float]:
        """Some steps; with a `batch` that lies on the device already it is the bare step."""
        pending: deque[jax.Array] = deque()
        losses = []
        for _ in range(steps):
            ticks.append(time.perf_counter())
            tokens = self.next_batch() if batch is None else batch
            self.params, self.opt_state, loss = self.step(self.params, self.opt_state, tokens)
            pending.append(loss)
            if len(pending) > STEPS_LATE:
                losses.append(float(pending.popleft()))
        return losses + [float(loss) for loss in pending]


class Toolkit:
    """What `shardtrain train` runs, without checkpoints: batches loaded ahead, the step, the loop, a sink."""

    def __init__(self, config: DecoderConfig, source: Windows, batch: int, seed: int, folder: Path) -> None:
        model, layout = as_model(config), Layout()
        named = Optimizer(
            learning_rate=Schedule(peak=PEAK), weight_decay=DECAY, b1=B1, b2=B2, eps=1e-8, clip=CLIP
        )
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

    def loop(self, steps: int, ticks: list[float], log_every: int) -> None:
        """Some steps through `run_loop`; the state goes on from block to block."""
        pieces = Pieces(
            step=self.step,
            batches=self._on_mesh(ticks),
            evaluate=lambda state: {},
            checkpoints=cast("Checkpoints", _NoCheckpoints(self.done + steps)),
            policy=CheckpointPolicy(),
            sink=self.sink,
            progress=self.progress,
            extra={},
        )
        pace = Pace(steps=self.done + steps, log_every=log_every)
        with StopSignals() as stop:
            self.state, self.done = run_loop(self.state, self.done, pieces, pace, stop)
        if stop.received is not None:
            raise KeyboardInterrupt

    def _on_mesh(self, ticks: list[float]) -> Iterator[tuple[Any, Any]]:
        while True:
            ticks.append(time.perf_counter())
            batch, after = next(self.loaded)
            yield self.place(batch), after

    def bare(self, steps: int, ticks: list[float], batch: Any) -> None:
        """The compiled step alone, on a batch that lies on the mesh already."""
        pending: deque[jax.Array] = deque()
        for _ in range(steps):
            ticks.append(time.perf_counter())
            self.state, metrics = self.step(self.state, batch)
            pending.append(metrics["loss_sum"])
            if len(pending) > STEPS_LATE:
                float(pending.popleft())
        for loss in pending:
            float(loss)

    def losses(self) -> list[float]:
        """The losses written so far."""
        return [record["train/loss"] for record in read_jsonl(self.metrics)]

    def close(self) -> None:
        self.loaded.close()
        self.sink.close()


class _NoCheckpoints:
    """Stands where the loop asks for checkpoints: the last step counts as saved."""

    def __init__(self, last: int) -> None:
        self.last = last

    def latest(self) -> int:
        return self.last

    def wait(self) -> None:
        pass
