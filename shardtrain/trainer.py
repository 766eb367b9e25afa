"""From a `Run` to its pieces and through the loop: what `shardtrain train` does.

Each piece can be made and used alone, see the README; here they are put together in order.
"""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from rich.console import Console

from shardtrain.checkpoint import Checkpoints
from shardtrain.config import Run, describe, differences, run_text
from shardtrain.data import Batches, Position, place
from shardtrain.loop import Pace, Pieces, StopSignals, run_loop
from shardtrain.mesh import make_mesh
from shardtrain.metrics import JsonLines, Mean, Progress, Sinks, TensorBoard
from shardtrain.model import Model, as_model
from shardtrain.optimizer import make_optimizer
from shardtrain.report import plots
from shardtrain.report.progress import progress
from shardtrain.report.sharding import sharding_text
from shardtrain.state import Placement, State, init_state, make_placement, restorable_state
from shardtrain.step import make_evaluate, make_step

RUN_FILE, METRICS, CURVE, LOCK = "run.txt", "metrics.jsonl", "loss.png", ".lock"
BEGINNING = Position(epoch=0, index=0)
CHECKPOINTS, TENSORBOARD = "checkpoints", "tensorboard"
"""What lies in a run folder, beside the token files of `data.Text`."""


class Parts(NamedTuple):
    """A run's model, optimizer and mesh, and how they lie on it."""

    model: Model
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule | None
    mesh: Mesh
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training run leaves.

    Args:
      state: the last state, on the mesh.
      step: steps done.
      stopped_by: the number of the signal that ended the run early, or None.
      run_dir: the run's folder.
      sample: the text of `Run.sample`, or None.
    """

    state: State
    step: int
    stopped_by: int | None
    run_dir: Path
    sample: str | None


def make_parts(run: Run) -> Parts:
    """Model, optimizer, mesh and placement of a run.

    Raises:
      ValueError: the mesh does not fit the devices, or the layout not the model.
    """
    model = as_model(run.model)
    optimizer, learning_rate = make_optimizer(run.optimizer, run.steps, model.dims)
    mesh = make_mesh(run.strategy.layout)
    placement = make_placement(model, optimizer, run.strategy.layout, mesh)
    return Parts(model, optimizer, learning_rate, mesh, placement)


def train(run: Run, console: Console | None = None) -> Trained:
    """Train a run from its newest checkpoint, or from the start, to its last step.

    Args:
      run: the run; its folder is made if it is not there.
      console: where to write; by default the terminal.

    Raises:
      ValueError: something in the run does not fit, before anything is computed.
      FloatingPointError: see `loop.run_loop`.
    """
    console = console or Console()
    folder = run.run_dir or Path("runs/run")
    parts = make_parts(run)
    source, heldout = run.data.train(folder), run.data.heldout(folder)
    batches = Batches(source=source, batch=run.batch, seed=run.seed)
    # a batch that cannot be split is refused here, before anything is compiled
    _placed(run, parts, batches.load(BEGINNING))
    say(console, sharding_text(parts.placement.specs, dict(parts.mesh.shape)))

    description = {**describe(run), "data.fingerprint": getattr(source, "fingerprint", None)}
    notes = _Notes()
    if summary := getattr(run.data, "summary", None):
        notes.note(summary(folder))
    with ExitStack() as stack:
        stack.enter_context(_alone_in(folder))
        checkpoints = stack.enter_context(
            Checkpoints(folder / CHECKPOINTS, run.checkpoints, report=notes.note)
        )
        state, first_step, position = _start(run, parts, checkpoints, description, notes)
        sinks = Sinks(*_sinks(folder, first_step or None, notes))
        stack.callback(sinks.close)
        (folder / RUN_FILE).write_text(run_text(description))
        if first_step >= run.steps:
            notes.note(
                f"{first_step} steps are done, and --steps is {run.steps}; give more, or another --run-dir"
            )
        notes.show(
            stack.enter_context(
                progress(total_steps=run.steps, start_step=first_step, unit=run.unit, console=console)
            )
        )
        loaded = stack.enter_context(closing(batches.iterate(position)))
        pieces = Pieces(
            step=make_step(parts.model, run.loss, parts.optimizer, parts.placement, parts.learning_rate),
            batches=((_placed(run, parts, batch), after) for batch, after in loaded),
            evaluate=_evaluation(run, parts, heldout),
            checkpoints=checkpoints,
            policy=run.checkpoints,
            sink=sinks,
            progress=notes.progress,
            extra={"run": description},
        )
        with StopSignals() as stop:
            state, step = run_loop(state, first_step, pieces, _pace(run), stop)
    sample = _ending(run, parts, state, step, stop, folder, console)
    return Trained(state=state, step=step, stopped_by=stop.received, run_dir=folder, sample=sample)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two runs in one folder would delete each other's checkpoints; a lock ends with its process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is training in {folder}; wait for it, or use another --run-dir"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


class _Notes:
    """Lines that people must see: kept until the progress bar is there, then shown by it."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.progress: Any = None

    def note(self, text: str) -> None:
        if self.progress is None:
            self.kept.append(text)
        else:
            self.progress.note(text)

    def show(self, progress: Progress) -> None:
        self.progress = progress
        for text in self.kept:
            progress.note(text)


def _placed(run: Run, parts: Parts, batch: Any, *, evaluating: bool = False) -> Any:
    strategy = run.strategy
    return place(batch, parts.mesh, strategy.layout.batch_axes, 1 if evaluating else strategy.accumulate)


def _pace(run: Run) -> Pace:
    return Pace(
        steps=run.steps,
        log_every=run.log_every,
        evaluate_every=run.evaluate_every,
        nonfinite=run.nonfinite,
        unit=run.unit,
    )


def say(console: Console, text: str) -> None:
    """Print text as it is, whatever the terminal."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _start(
    run: Run, parts: Parts, checkpoints: Checkpoints, description: dict[str, Any], notes: _Notes
) -> tuple[State, int, Position]:
    """The newest checkpoint, or the beginning."""
    restored = checkpoints.restore(restorable_state(parts.placement))
    if restored is None:
        return init_state(parts.model, parts.optimizer, parts.placement, run.seed), 0, BEGINNING
    notes.note(f"resumed from step {restored.step} in {checkpoints.folder}")
    before = restored.extra["run"]
    if before["seed"] != run.seed:
        raise ValueError(
            f"seed is {run.seed}, but the run in {checkpoints.folder.parent} began with seed"
            f" {before['seed']}: its order of samples would change. Use --seed {before['seed']}, or another"
            " --run-dir"
        )
    # through JSON, as the saved one went
    changed = differences(before, json.loads(json.dumps(description)))
    for line in changed:
        notes.note(f"changed since then: {line}")
    position = Position(**restored.extra["position"])
    if before.get("data.fingerprint") != description["data.fingerprint"]:
        notes.note("WARNING: the data is not that of the checkpoint: training goes on at its beginning")
        position = BEGINNING
    return restored.state, restored.step, position


def _sinks(folder: Path, resume_after: int | None, notes: _Notes) -> Iterator[Any]:
    yield JsonLines(folder / METRICS, resume_after=resume_after)
    if TensorBoard.installed():
        yield TensorBoard(folder / TENSORBOARD, resume_after=resume_after)
    else:
        notes.note("no TensorBoard files: install shardtrain[tensorboard]")


def _evaluation(run: Run, parts: Parts, heldout: Any) -> Callable[[State], dict[str, float]]:
    """state -> held-out values: the same rows each time, the last batch padded with weight 0."""
    if heldout is None:
        return lambda state: {}
    evaluate = make_evaluate(parts.model, run.loss, parts.placement)
    batches = Batches(source=heldout, batch=run.batch, epochs=1, shuffle=False)

    def values(state: State) -> dict[str, float]:
        with closing(batches.iterate()) as loaded:
            first = islice(loaded, run.evaluate_batches)
            found = [evaluate(state, _placed(run, parts, batch, evaluating=True)) for batch, _ in first]
        means: dict[str, Mean] = {}
        for metrics in jax.device_get(found):
            pairs = {"loss": (metrics.pop("loss_sum"), metrics.pop("count")), **metrics}
            for name, (total, count) in pairs.items():
                means[name] = means.get(name, Mean()) + Mean(sum=float(total), count=float(count))
        return {f"heldout/{name}": mean.value for name, mean in means.items() if mean.value is not None}

    return values


def _ending(
    run: Run, parts: Parts, state: State, step: int, stop: StopSignals, folder: Path, console: Console
) -> str | None:
    if (folder / METRICS).stat().st_size and plots.installed():
        plots.loss_curve(folder / METRICS, folder / CURVE, title=folder.name)
    if stop.received is not None:
        say(
            console,
            f"stopped by {stop.received.name} after step {step}, which is saved; the same command goes on",
        )
        return None
    sample = None
    if run.sample is not None:
        sample = run.sample(jax.tree_util.Partial(_Bound(parts.model), state.params, state.model_state))
        say(console, sample)
    say(console, f"run folder: {folder}")
    return sample


@dataclass(frozen=True)
class _Bound:
    """A model without dropout, as a function of its parameters: hashable, so it compiles once."""

    model: Model

    def __call__(self, params: Any, model_state: Any, *inputs: Any) -> Any:
        return self.model.apply(params, model_state, jax.random.key(0), False, *inputs)[0]

    def __hash__(self) -> int:
        return id(self.model)
