"""The two loops that `overhead.py` compares: one written by hand in jax and optax, one of the toolkit.

Same model, optimizer, batches and order. Both read a loss as late as `trainer/loop.py` does.
"""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from stepper import Stepper

import shardtrain as st
from shardtrain.data import Loader, Position, Windows, batch_shard, write_tokens
from shardtrain.data.order import epoch_order
from shardtrain.functional.nnx_model import convert_model
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.ops import find_ops, set_ops
from shardtrain.report.progress import progress
from shardtrain.report.sinks.json_lines import JsonLines, read_jsonl
from shardtrain.system.stop_signals import StopSignals
from shardtrain.system.xla_flags import step_options
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.feed import Feed
from shardtrain.trainer.hooks import Hooks
from shardtrain.trainer.loop import run_loop
from shardtrain.trainer.metric_log import STEPS_LATE
from shardtrain.trainer.resume import StartPoint
from shardtrain.trainer.usage import RunTotals, UsageLog
from shardtrain.trainer.waves import make_barrier_schedule

SCHEDULE_STEPS, PEAK, B1, B2, DECAY, CLIP = 100_000, 3e-4, 0.9, 0.95, 0.1, 1.0


def write_source(folder: Path, config: DecoderConfig, batch: int, num_batches: int) -> Windows:
    """Write random tokens for some batches, and return their windows."""
    num_tokens = config.seq * batch * num_batches + 1
    tokens = np.random.default_rng(0).integers(0, config.vocab, num_tokens)
    write_tokens(folder / "tokens.npy", [tokens], dtype="uint32")
    data = st.Tokens(path=folder / "tokens.npy", vocab=config.vocab, seq=config.seq, heldout_fraction=0)
    return data.train(folder)


def largest_difference(expected: list[float], found: list[float]) -> float:
    """Return the largest relative difference of two lists of losses."""
    return max(abs(b / a - 1) for a, b in zip(expected, found, strict=True))


def run_late(ticks: list[float], steps: int, step: Callable[[], jax.Array]) -> list[float]:
    """Run steps that return a loss, each of which is read some steps later; return the losses."""
    losses, pending = [], deque[jax.Array]()
    for _ in range(steps):
        ticks.append(perf_counter())
        pending.append(step())
        if len(pending) > STEPS_LATE:
            losses.append(float(pending.popleft()))
    return losses + [float(loss) for loss in pending]


class HandWritten:
    """The loop one writes without a toolkit: one jitted function, donated, losses read late.

    Its compiler options are the toolkit's, so that the loops are compared and not the programs.
    """

    def __init__(self, config: DecoderConfig, source: Windows, batch: int) -> None:
        graph, variables = nnx.split(config(nnx.Rngs(jax.random.key(0))), nnx.Param)
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

        mesh = st.make_mesh(st.Layout(), jax.devices()[:1]).abstract_mesh

        def loss(params: Any, tokens: jax.Array) -> jax.Array:
            with jax.sharding.use_abstract_mesh(mesh):
                model = set_ops(nnx.merge(graph, nnx.State(params)), find_ops())
                logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        @partial(jax.jit, donate_argnums=(0, 1), compiler_options=step_options(jax.default_backend()))
        def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        self.step = step
        order = epoch_order(len(source), 0, 0)
        self.tokens = np.stack([source[order(i)]["tokens"] for i in range(len(source))])
        self.batch, self.row = batch, 0

    def twin(self) -> Self:
        """The same again: arrays of its own, the same compiled step."""
        twin = copy(self)
        twin.params, twin.opt_state = jax.tree.map(jnp.copy, (self.params, self.opt_state))
        return twin

    def next_batch(self) -> jax.Array:
        rows = self.tokens[self.row : self.row + self.batch]
        self.row = (self.row + self.batch) % len(self.tokens)
        return jax.device_put(rows, jax.devices()[0])

    def loop(self, ticks: list[float], steps: int, batch: jax.Array | None = None) -> list[float]:
        """Some steps, and their losses; with a `batch` that is on the device already, the bare step."""

        def step() -> jax.Array:
            tokens = self.next_batch() if batch is None else batch
            self.params, self.opt_state, loss = self.step(self.params, self.opt_state, tokens)
            return loss

        return run_late(ticks, steps, step)


class Toolkit:
    """What `shardtrain train` runs, without checkpoints: batches loaded ahead, step, loop, sink, progress.

    On `num` devices each has rows of its own (`--mesh data=N`).
    """

    def __init__(
        self, config: DecoderConfig, source: Windows, batch: int, folder: Path, num: int = 1
    ) -> None:
        named = st.Optimizer(
            learning_rate=st.Schedule(peak=PEAK), weight_decay=DECAY, b1=B1, b2=B2, clip=CLIP
        )
        optimizer, rate = st.make_optimizer(named, SCHEDULE_STEPS, convert_model(config).dims)
        self.step = step = Stepper(config, optimizer=optimizer, rate=rate, num_devices=num)
        shard = batch_shard([batch], 0, step.mesh, step.axes, 1)
        batches = st.Batches(source=source, batch=batch, rows=shard.rows)
        self.feed = Feed(Loader(batches, {batch: shard}, step.mesh, step.axes, 1))
        stack = ExitStack()
        self.close = stack.close
        stack.enter_context(self.feed.reading(Position(epoch=0, index=0)))
        # its data is `source`, which is read above
        data = SimpleNamespace(train=lambda folder: source, heldout=lambda folder: None)
        self.run = st.Run(model=config, data=data, optimizer=named, batch=batch, evaluate_every=None)
        self.done = 0
        self.metrics = folder / "metrics.jsonl"
        self.sink = stack.enter_context(closing(JsonLines(self.metrics, resume_after=None)))
        self.progress = progress(total_steps=SCHEDULE_STEPS, console=Console(quiet=True))

    def loop(self, ticks: list[float], steps: int, log_every: int) -> None:
        """Some steps through `run_loop`; state and data go on from block to block."""
        last, run = self.done + steps, replace(self.run, log_every=log_every)
        constants = {"elastic": None, "description": {}, "labels": (), "num_devices": 1, "num_skipped": None}
        prepared = SimpleNamespace(
            run=run,
            coordination=Coordination(),
            feed=self.feed,
            barriers=make_barrier_schedule(run),
            shares=SimpleNamespace(saved=dict),
            seconds_at_peak=lambda: 0.0,
            **constants,
        )
        activity = ActivityRecord()
        session: Any = SimpleNamespace(
            prepared=prepared,
            checkpoints=no_checkpoints(last),
            output=self.progress,
            activity=activity,
            step=self.step.step,
            evaluate=lambda state: {},
            check=None,
            untimed=nullcontext,
            hooks=Hooks([st.Hook(on_step=lambda step: ticks.append(perf_counter()))]),
            totals=RunTotals(),
            spent=UsageLog(activity),
        )
        start = StartPoint(state=self.step.state, step=self.done, position=Position(epoch=0, index=0))
        self.step.state, self.done = run_loop(session, start, last, self.sink, StopSignals())

    def first_losses(self, steps: int) -> list[float]:
        """Run some steps; return the losses of all so far."""
        self.loop([], steps, log_every=1)
        return [line["train/loss"] for line in read_jsonl(self.metrics)]

    def bare(self, ticks: list[float], steps: int, batch: Any) -> None:
        """The compiled step alone, on a batch that is on the mesh already."""
        run_late(ticks, steps, lambda: self.step(batch)["loss_sum"])


def no_checkpoints(last: int) -> Any:
    """Return what stands where the loop saves its last state, which here is only the last of a block."""
    ignored = ("save", "complete", "evaluated", "confirm", "wait", "settle")
    return SimpleNamespace(
        latest=lambda: last, is_best=lambda step: False, **dict.fromkeys(ignored, lambda *_: None)
    )
