"""From a `Run` to its pieces and through the loop: what `shardtrain train` does.

Each piece can be made and used alone, see the README; here they are put together in order.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from rich.console import Console

from shardtrain.checkpoints.origins import in_order
from shardtrain.data import Batches, Loader
from shardtrain.errors.messages import problems_error
from shardtrain.errors.user_code import user_code
from shardtrain.functional.loss import guarded
from shardtrain.functional.model import Model
from shardtrain.islands.agreement import facts, program_fact
from shardtrain.islands.membership import Islands, binding, cuda_aware, decide_device_memory
from shardtrain.islands.watchdog.activity import ActivityRecord
from shardtrain.islands.watchdog.stragglers import Stragglers
from shardtrain.optim.optimizer_state import evaluated_params
from shardtrain.optim.scaling import scaled
from shardtrain.pipeline.schedule import make_table
from shardtrain.report.islands import binding_text
from shardtrain.report.metrics import JsonLines, Mean, Progress, Sinks, TensorBoard
from shardtrain.report.plots import figure
from shardtrain.report.plots.loss_curve import loss_curve
from shardtrain.report.progress import progress
from shardtrain.report.sharding import sharding_text
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.system import terminal
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.run_lock import Locked, locked
from shardtrain.system.stop_signals import StopSignals
from shardtrain.system.terminal import printable
from shardtrain.train_step.island_step import IslandStep
from shardtrain.train_step.stage_step import StageStep
from shardtrain.train_step.state import State, init_state, restorable_state
from shardtrain.train_step.step import combined_labels, make_evaluate, make_step
from shardtrain.trainer.config import Run, describe, run_text
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.fingerprints import divergence_text, hardware, make_find_divergence
from shardtrain.trainer.first_batch import Expected, class_problems, loss_problems, make_expected
from shardtrain.trainer.loop import LoopOptions, LoopParts, StepVote, run_loop, write_held
from shardtrain.trainer.recovery import RollBack, Rollbacks, Spikes
from shardtrain.trainer.resume import BEGINNING, CHECKPOINTS, Saving, StartPoint, begin, synchronised
from shardtrain.trainer.setup import (
    RunSetup,
    make_multi_island_step,
    make_parts,
    microbatch_of,
    pipeline_text,
)

RUN_FILE, METRICS, CURVE = "run.txt", "metrics.jsonl", "loss.png"
TENSORBOARD = "tensorboard"
"""What lies in a run folder, beside the token files of `data.Text`."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training run leaves.

    Args:
      state: the last state, on the mesh.
      step: steps done.
      stopped_by: the number of the signal that ended the run early, or None.
      time_over: the time limit ended it early.
      run_dir: the run's folder.
      sample: the text of `Run.sample`, or None.
    """

    state: State
    step: int
    stopped_by: int | None
    run_dir: Path
    sample: str | None
    time_over: bool = False


def train(
    run: Run,
    console: Console | None = None,
    islands: Islands | None = None,
    marks: ActivityRecord | None = None,
    stop: StopSignals | None = None,
) -> Trained:
    """Train a run from its newest checkpoint, or from the start, to its last step.

    Args:
      run: the run; its folder is made if it is not there.
      console: where to write; by default the terminal. Only the first process of all writes.
      islands: from `islands.membership.join`, where several were launched.
      marks: where this process is, for its watchdog.
      stop: entered already; by default signals are recorded while this runs.

    Raises:
      ValueError: something in the run does not fit, before anything is computed.
      FloatingPointError: see `loop.run_loop`.
    """
    folder = run.run_dir or Path("runs/run")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run_dir {folder} is a file; give a folder, there or not: --run-dir {folder}.run")
    marks = marks or (ActivityRecord() if islands is None else islands.control.marks)
    first = jax.process_index() == 0 if islands is None else islands.is_first
    console = (console or Console()) if first else Console(quiet=True)
    notes = _Notes(None if first or islands is None else islands.control.names[islands.place.rank])
    with ExitStack() as stack:
        stack.callback(notes.finish, console)
        agreed = _agreed(run, folder, islands, console, notes, stack)
        run, parts, together = agreed.run, agreed.parts, agreed.together
        if together.is_first:
            stack.enter_context(_alone_in(folder))
        saving = Saving(run, folder, together, parts.placement, parts.held, agreed.across, notes.note)
        stack.enter_context(saving.checkpoints)
        working = _working(agreed, saving, notes, marks)
        rollbacks, newest, position = Rollbacks(run.recovery.rollbacks), None, None
        stop = stop or stack.enter_context(StopSignals())
        while True:
            with marks.at("restoring", waits=True, long=True):
                begun = begin(
                    run,
                    saving,
                    lambda: init_state(parts.model, parts.optimizer, parts.placement, run.seed),
                    agreed.across,
                    agreed.description,
                    newest,
                )
            rollbacks.restored(begun.step)
            if position is not None:
                begun = replace(begun, position=position)
            try:
                state, step = _stretch(agreed, begun, working, folder, console, notes, stop)
                break
            except RollBack as fault:
                newest, position = rollbacks.newest_allowed(fault), fault.position
                where = f"step {newest} or before" if newest > 0 else "the beginning"
                notes.note(f"WARNING: {fault.why}: back to {where}, and on with later data")
        with marks.at("the end", long=True):
            sample = _ending(run, parts, together, state, step, stop, folder, console)
    return Trained(
        state=state,
        step=step,
        stopped_by=stop.received,
        run_dir=folder,
        sample=sample,
        time_over=stop.time_over,
    )


def _stretch(
    agreed: "_Agreed",
    begun: StartPoint,
    working: LoopParts,
    folder: Path,
    console: Console,
    notes: "_Notes",
    stop: StopSignals,
) -> tuple[State, int]:
    """From where the run begins, or goes on, to its end; see `loop.run_loop`."""
    run, together, loader = agreed.run, agreed.together, agreed.loader
    with ExitStack() as stack:
        sinks, last_step = _sinks(folder, begun.step or None, notes) if together.is_first else (Sinks(), None)
        stack.callback(sinks.close)
        if together.is_first:
            try:
                replace_file(folder / RUN_FILE, run_text(agreed.description).encode())
            except OSError as error:
                notes.note(f"WARNING: {folder / RUN_FILE} cannot be written: {error}; the run goes on")
        if begun.step >= run.steps:
            notes.note(
                f"{begun.step} steps are done, and --steps is {run.steps}; give more, or another --run-dir"
            )
        bar = progress(total_steps=run.steps, start_step=begun.step, unit=run.unit, console=console)
        notes.show(stack.enter_context(bar))
        stack.callback(notes.hide)
        loaded = stack.enter_context(closing(loader.batches.iterate(begun.position)))
        pieces = replace(
            working,
            batches=((loader.place(batch), after) for batch, after in loaded),
            sink=sinks,
            progress=_Speaking(notes),
            explain=lambda step: _explained(agreed, begun, step),
        )
        if agreed.across is not None:
            agreed.across.forget()
        held = begun.held if together.is_first and last_step != begun.step else None
        with working.marks.at("the training loop"):
            write_held(pieces, begun.step, begun.state, held)
            return run_loop(begun.state, begun.step, pieces, _pace(run), stop)


def _working(agreed: "_Agreed", saving: Saving, notes: "_Notes", marks: ActivityRecord) -> LoopParts:
    """What is the same in every stretch of the run."""
    run, parts, together, across = agreed.run, agreed.parts, agreed.together, agreed.across
    model, optimizer, placement = parts.model, parts.optimizer, parts.placement
    find = make_find_divergence(parts.mesh, placement.state.params)
    kind = f"{len(parts.mesh.devices.flat)} x {hardware()}, {dict(parts.mesh.shape)}"

    def check(step: int, state: State) -> None:
        if step % run.strategy.combine.local_steps == 0:
            found = find(state.params)
            problem = divergence_text(step, found) if found else ""
            if text := together.odd_copies(step, problem, kind, state.params):
                raise RollBack(step, text)

    def agree(step: int, wish: StepVote) -> StepVote:
        agreed_wish, slow = together.agree(step, wish, run.strategy.combine.local_steps)
        if slow is not None:
            notes.note(f"WARNING: {slow}")
        return agreed_wish

    return LoopParts(
        step=across or make_step(model, run.loss, optimizer, placement, parts.learning_rate),
        batches=iter(()),
        evaluate=_evaluation(run, parts, together, agreed.heldout, across),
        checkpoints=saving,
        policy=run.checkpoints,
        sink=Sinks(),
        progress=_Speaking(notes),
        extra={"run": agreed.description},
        agree=agree,
        anywhere=together.anywhere,
        before_save=lambda state: synchronised(run, together, state, notes.note),
        labels=across.labels if across else combined_labels(placement),
        marks=marks,
        check=check if run.recovery.fingerprint_every is not None else None,
    )


class _Agreed(NamedTuple):
    run: Run
    parts: RunSetup
    together: Coordination
    loader: Loader
    heldout: Any
    across: IslandStep | None
    description: dict[str, Any]
    expected: Expected


def _agreed(
    run: Run,
    folder: Path,
    islands: Islands | None,
    console: Console,
    notes: "_Notes",
    stack: ExitStack,
) -> _Agreed:
    """Everything that is made before the first array, and that all islands must have in common."""
    if islands is not None:
        say(console, binding_text(binding(islands)))
    run = _scaled(run, islands, notes)
    described, run = describe(run), replace(run, loss=guarded(run.loss))
    source, heldout = Coordination(islands).in_turn("data", lambda: _sources(run, folder))
    seat = None if islands is None else islands.seat
    count, island = (1, 0) if seat is None else (seat.num_islands, seat.island)
    parts = make_parts(run, count, microbatch_of(run, source), island)
    if count > 1 and (name := (parts.model if parts.held is None else parts.held.model).axis_name):
        notes.note(
            f"WARNING: batch statistics over the axis {name!r} are those of each island: islands do not"
            " exchange them. Where that matters use one island, or a norm without them (GroupNorm, LayerNorm)"
        )
    together = _together(run, parts, islands)
    stack.callback(together.close)
    description = {**described, "data.fingerprint": getattr(source, "fingerprint", None)}
    together.check(_facts(run, parts, description))
    loader = _loader(run, parts, together, source)
    # a batch that cannot be split, or be learned from, is refused here, before anything is compiled
    first = loader.batches.load(BEGINNING)
    expected = make_expected(parts.whole, run.loss, first, getattr(run.model, "vocab", None))
    problems = [*loss_problems(expected), *class_problems(expected, first)]
    if problems:
        raise problems_error("this run would learn nothing, or something else than it should", problems)
    batch = loader.place(first)
    if islands is not None and parts.held is None:
        together.check(_program(run, parts, batch))
    say(console, sharding_text(parts.placement.specs, dict(parts.mesh.shape)))
    if text := pipeline_text(run, parts):
        notes.note(text)
    elif run.strategy.across.axis == "pipeline":
        notes.note("WARNING: --across pipeline, but there is one island: no pipeline (launch several)")
    if summary := getattr(run.data, "summary", None):
        notes.note(summary(folder))
    across = make_multi_island_step(run, parts, together, loader)
    if isinstance(across, StageStep):
        stack.callback(across.close)
    return _Agreed(run, parts, together, loader, heldout, across, description, expected)


def _sources(run: Run, folder: Path) -> tuple[Any, Any]:
    """The samples to train on, and those held out.

    Raises:
      ValueError: they have no length, or no samples by number.
    """
    with user_code(lambda error: f"the data ({type(run.data).__name__})"):
        found = {"train": run.data.train(folder), "heldout": run.data.heldout(folder)}
    problems = [
        f"{name}(folder) gave a {type(source).__name__}; give something with a length and samples by number"
        " (__len__ and __getitem__), such as the dataset that a loader reads; batches are made of it"
        for name, source in found.items()
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__"))
        and not (name == "heldout" and source is None)
    ]
    if problems:
        raise problems_error("the data cannot be read", problems)
    return found["train"], found["heldout"]


def _explained(agreed: "_Agreed", begun: StartPoint, step: int) -> str:
    """What is wrong with the data of a step, as far as this process has its rows."""
    batches = agreed.loader.batches
    position = batches.advance(begun.position, step - begun.step - 1)
    return "; ".join(class_problems(agreed.expected, batches.load(position)))


def _scaled(run: Run, islands: Islands | None, notes: "_Notes") -> Run:
    """The run for as many replicas as there are, see `recipes.scaled`.

    Raises:
      ValueError: the last step would not be one that combines.
    """
    sizes = axis_sizes(run.strategy.layout.mesh, jax.device_count())
    mine = math.prod(sizes[axis] for axis in run.strategy.layout.batch_axes)
    replicas = [mine] if islands is None else islands.by_island("replicas", mine)
    if run.strategy.across.axis == "pipeline":
        replicas = replicas[:: run.strategy.across.partitions or len(replicas)]
    by = run.strategy.combine.by
    # what is averaged before a combiner gets it: an island's devices, or on one island all but data
    inside = max(replicas) if len(replicas) > 1 else max(mine // sizes["data"], 1)
    found = scaled(run, run.scaling, sum(replicas), by if isinstance(by, str) else "own", inside)
    for line in found.notes:
        notes.note(line)
    steps, each = found.run.steps, run.strategy.combine.local_steps
    if rest := steps % each:
        below = steps - rest
        use = f"{below} or {below + each}" if below else f"{each}"
        scaled_text = "" if steps == run.steps else " when scaled"
        raise ValueError(
            f"steps is {steps}{scaled_text}, and replicas are combined every {each} steps:"
            f" {steps} % {each} = {rest}. Use {use}."
        )
    if len(replicas) == 1 and run.strategy.combine.inside == "sum":
        raise ValueError("inside is 'sum', but there is one island, and nothing crosses; use mean")
    return found.run


def _together(run: Run, parts: RunSetup, islands: Islands | None) -> Coordination:
    if islands is None:
        return Coordination()
    if islands.seat.num_islands == 1:
        return Coordination(islands)
    across, platform = run.strategy.across, jax.devices()[0].platform
    on_device = decide_device_memory(across.memory, islands, platform, cuda_aware)
    stage = 0 if parts.seats is None else parts.seats.stage
    crossing = islands.crossing(parts.mesh, across, on_device, stage)
    # stages differ by nature
    stragglers = None if parts.seats else Stragglers(islands.control.names, run.recovery.straggler)
    return Coordination(islands, crossing, parts.seats, stragglers)


def _facts(run: Run, parts: RunSetup, description: dict[str, Any]) -> dict[str, Any]:
    """What islands must have in common."""
    trees = {"parameters": parts.placement.specs.abstract.params}
    if parts.held is not None:
        trees = {"parameters": parts.held.traced.params}
        sizes = (parts.held.stages.num_stages, run.strategy.accumulate, parts.held.stages.num_chunks)
        tasks = repr(make_table(run.strategy.pipeline.schedule, *sizes).tasks)
        digest = hashlib.sha256(tasks.encode()).hexdigest()[:16]
        description = {**description, "accumulate": run.strategy.accumulate, "pipeline.tasks": digest}
    return facts(description, trees=trees, fingerprint=description["data.fingerprint"])


def _program(run: Run, parts: RunSetup, batch: Any) -> dict[str, str]:
    """The hash of what islands of the same mesh and share compile."""
    placement = parts.placement
    step: Any = make_step(parts.model, run.loss, parts.optimizer, placement, parts.learning_rate)
    return program_fact(
        step.lower(restorable_state(placement), batch).as_text(),
        mesh=dict(parts.mesh.shape),
        batch=str(jax.tree.map(jnp.shape, batch)),
        layout=str(describe(run.strategy.layout)),
        platform=jax.devices()[0].platform,
        processes=jax.process_count(),
    )


def _loader(run: Run, parts: RunSetup, together: Coordination, source: Any) -> Loader:
    layout, mesh, microbatches = run.strategy.layout, parts.mesh, run.strategy.accumulate
    shard = together.rows(run.batch, run.strategy.across.shares, mesh, layout.batch_axes, microbatches)
    batches = Batches(source=source, batch=run.batch, seed=run.seed, rows=shard.rows)
    return Loader(batches, shard, mesh, layout.batch_axes, microbatches)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two runs in one folder would delete each other's checkpoints.

    The folder of checkpoints has a lock of its own: it may be a link, and `prune` may know it alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            stack.enter_context(locked(folder))
            (folder / CHECKPOINTS).mkdir(exist_ok=True)
            stack.enter_context(locked(folder / CHECKPOINTS))
            yield
    except Locked:
        raise ValueError(
            f"another process is training in {folder}; wait for it, or use another --run-dir"
        ) from None


class _Notes:
    """Lines that people must see: kept until the progress bar is there, then shown by it.

    Args:
      name: of a process that is not the first: its warnings, and nothing else, go to stderr.
    """

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.kept: list[str] = []
        self.progress: Any = None

    def note(self, text: str) -> None:
        if self.name is not None:
            if text.startswith("WARNING"):
                terminal.err(f"{self.name}: {text}\n")
        elif self.progress is None:
            self.kept.append(text)
        else:
            self.progress.note(text)

    def show(self, progress: Progress) -> None:
        self.progress = progress
        for text in self.kept:
            progress.note(text)
        self.kept.clear()

    def finish(self, console: Console) -> None:
        """What came after the progress bar, or without one."""
        for text in self.kept:
            say(console, text)
        self.kept.clear()

    def hide(self) -> None:
        """Keep what comes for the next progress."""
        self.progress = None


class _Speaking:
    """A progress whose notes go where this process's notes go."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes
        self.note = notes.note

    def update(self, step: int, values: Mapping[str, float]) -> None:
        self._notes.progress.update(step, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...


def _pace(run: Run) -> LoopOptions:
    each = run.strategy.combine.local_steps
    # in between, replicas have no parameters in common
    every = run.evaluate_every and -(-run.evaluate_every // each) * each
    return LoopOptions(
        steps=run.steps,
        log_every=run.log_every,
        evaluate_every=every,
        nonfinite=run.nonfinite,
        unit=run.unit,
        spikes=None if run.recovery.spike is None else Spikes(run.recovery.spike, run.recovery.window),
        check_every=run.recovery.fingerprint_every,
    )


def say(console: Console, text: str) -> None:
    """Print text as it is, whatever the terminal; what would control it is escaped."""
    console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _sinks(folder: Path, resume_after: int | None, notes: _Notes) -> tuple[Sinks, int | None]:
    """Where metrics go, and the step of the last line that is there."""
    lines = JsonLines(folder / METRICS, resume_after=resume_after, report=notes.note)
    if not TensorBoard.installed():
        notes.note("no TensorBoard files: install shardtrain[tensorboard]")
        return Sinks(lines), lines.last_step
    board = TensorBoard(folder / TENSORBOARD, resume_after=resume_after, report=notes.note)
    return Sinks(lines, board), lines.last_step


def _evaluation(
    run: Run, parts: RunSetup, together: Coordination, heldout: Any, across: IslandStep | None
) -> Callable[[State], dict[str, float]]:
    """state -> held-out values: the same rows each time, each island its share of them."""
    if heldout is None:
        return lambda state: {}
    in_stages = isinstance(across, StageStep)
    evaluate = across.evaluate if in_stages else make_evaluate(parts.model, run.loss, parts.placement)
    axes, mesh = run.strategy.layout.batch_axes, parts.mesh
    # a pipeline without microbatches is one stage at work
    microbatches = run.strategy.accumulate if in_stages or parts.placement.stages else 1
    shard = together.rows(run.batch, run.strategy.across.shares, mesh, axes, microbatches)
    batches = Batches(source=heldout, batch=run.batch, epochs=1, shuffle=False, rows=shard.rows)
    loader = Loader(batches, shard, mesh, axes, microbatches)

    choose = _chosen(run, parts)

    def evaluated(state: State) -> State:
        state = state._replace(params=choose(state))
        # what a combiner keeps across islands does not lie on the mesh
        return state if together.crossing is None else state._replace(combine_state=())

    def values(state: State) -> dict[str, float]:
        with closing(batches.iterate()) as loaded:
            first = islice(loaded, run.evaluate_batches)
            chosen = evaluated(state)
            found = [evaluate(chosen, loader.place(batch)) for batch, _ in first]
        means: dict[str, Mean] = {}
        for metrics in jax.device_get(found):
            pairs = {"loss": (metrics.pop("loss_sum"), metrics.pop("count")), **metrics}
            for name, (total, count) in pairs.items():
                means[name] = means.get(name, Mean()) + Mean(sum=float(total), count=float(count))
        sums = together.totals("evaluation", {name: (mean.sum, mean.count) for name, mean in means.items()})
        means = {name: Mean(sum=total, count=count) for name, (total, count) in sums.items()}
        return {f"heldout/{name}": mean.value for name, mean in means.items() if mean.value is not None}

    return values


def _chosen(run: Run, parts: RunSetup) -> Callable[[State], Any]:
    """state -> the parameters that are evaluated and sampled, placed as those that are trained."""
    if run.evaluate_with is None:
        return lambda state: state.params
    choose = jax.jit(
        lambda opt_state, params: evaluated_params(run.evaluate_with, opt_state, params),
        out_shardings=parts.placement.state.params,
    )
    return lambda state: choose(state.opt_state, state.params)


def _ending(
    run: Run,
    parts: RunSetup,
    together: Coordination,
    state: State,
    step: int,
    stop: StopSignals,
    folder: Path,
    console: Console,
) -> str | None:
    if not together.writes:
        return None
    if together.is_first and figure.is_installed():
        _draw_curve(folder, console)
    if stop.received is not None or stop.time_over:
        by = "the time limit" if stop.received is None else stop.received.name
        say(console, f"stopped by {by} after step {step}, which is saved; the same command goes on")
        return None
    sample = None
    if run.sample is not None and parts.held is not None:
        say(console, "no sample: the model is spread over islands")
    elif run.sample is not None:
        params = in_order(parts.placement, _chosen(run, parts)(state))
        with user_code(lambda error: "the sample"):
            sample = run.sample(jax.tree_util.Partial(_Bound(parts.model), params, state.model_state))
        say(console, sample)
    say(console, f"run folder: {folder}")
    return sample


def _draw_curve(folder: Path, console: Console) -> None:
    """Draw the loss; the run is saved by now, and fails for no picture."""
    try:
        if (folder / METRICS).stat().st_size:
            loss_curve.loss_curve(folder / METRICS, folder / CURVE, title=folder.name)
    except (OSError, ValueError) as error:
        say(console, f"WARNING: {folder / CURVE} is not drawn: {error}")


@dataclass(frozen=True)
class _Bound:
    """A model without dropout, as a function of its parameters: hashable, so it compiles once."""

    model: Model

    def __call__(self, params: Any, model_state: Any, *inputs: Any) -> Any:
        return self.model.apply(params, model_state, jax.random.key(0), False, *inputs)[0]

    def __hash__(self) -> int:
        return id(self.model)
