"""A run before its first array: scaled, set up, checked on its first batch, and agreed on by all islands.

Everything that can be refused is refused here. Next: `train.py`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shardtrain.data import Batch, Loader
from shardtrain.errors.messages import problems_error
from shardtrain.functional.activation_rules import noting
from shardtrain.functional.loss_checks import guard_loss
from shardtrain.functional.model import name_arrays
from shardtrain.functional.rng import new_key
from shardtrain.islands.membership import Islands, binding
from shardtrain.islands.rank_facts import facts
from shardtrain.islands.watchdog.stragglers import Stragglers
from shardtrain.optim.optimizer import Optimizer
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.pipeline.traced_cut import TracedModel
from shardtrain.report.islands import binding_text
from shardtrain.report.sharding import totals_text
from shardtrain.report.sinks import check_installed
from shardtrain.sharding.shifted_names import warn_shifted_names
from shardtrain.train_step.barrier_schedule import BarrierSchedule
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.island_step import IslandStep
from shardtrain.train_step.replica_state import split_fragments
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Step, list_combined_labels
from shardtrain.trainer.batch_growth import growth_by_step
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination, make_transfers
from shardtrain.trainer.feed import Feed
from shardtrain.trainer.first_batch import Expected, class_problems, loss_problems, make_expected
from shardtrain.trainer.island_run import run_of_island
from shardtrain.trainer.layout_check import check_layout, check_sequences
from shardtrain.trainer.loss_trace import check_trace
from shardtrain.trainer.program_mark import make_mark
from shardtrain.trainer.restore_state import VALUES, initial_values
from shardtrain.trainer.row_shares import RowShares, fit_to_memory
from shardtrain.trainer.run_step import bridge_text, make_checked_step, pipeline_text
from shardtrain.trainer.setup import (
    FIRST_POSITION,
    RunSetup,
    format_unused,
    make_microbatch,
    make_setup,
    num_parts,
)
from shardtrain.trainer.sources import (
    data_facts,
    data_problems,
    heldout_prefix,
    make_batches,
    open_sources,
    source_warnings,
)
from shardtrain.trainer.stage_cut import apply_stage_cut
from shardtrain.trainer.strategy import Strategy
from shardtrain.trainer.usage import row_seconds_at_peak


def pipeline_facts(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that decide what islands exchange before all their facts are compared.

    Args:
      description: the run, from `config.describe`.

    >>> pipeline_facts({"batch": 8, "strategy.across.axis": "data", "strategy.pipeline.stages": "1,3"})
    {'run/strategy.across.axis': 'data', 'run/strategy.pipeline.stages': '1,3'}
    """
    found = {
        f"run/{name}": value
        for name, value in description.items()
        if name.startswith(("strategy.across.", "strategy.pipeline."))
    }
    # as it arrives at the others, so that a tuple here is not another value than a list there
    return json.loads(json.dumps(found))


def run_facts(run: Run, setup: RunSetup, description: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that all islands must have in common."""
    trees = {"parameters": setup.placement.specs.abstract.params}
    # the arrays of the state must be the same on all, whatever each computes in
    scales_loss = run.strategy.scales_loss
    description = {
        **description,
        "synchronisation.rows": _rows_digest(run, setup),
        "an island computes in float16": scales_loss,
    }
    if (stage_model := setup.stage_model) is not None:
        trees = {"parameters": stage_model.traced.params}
        sizes = (stage_model.stages.num_stages, run.strategy.accumulate, stage_model.stages.num_chunks)
        tasks = repr(make_table(run.strategy.pipeline.schedule, *sizes).tasks)
        digest = hashlib.sha256(tasks.encode()).hexdigest()[:16]
        description = {
            **description,
            "accumulate": run.strategy.accumulate,
            "compute_dtype": run.strategy.compute_dtype,
            "pipeline.tasks": digest,
            "pipeline.blocks": [list(cut.counts) for cut in setup.cuts],
            "pipeline.sent": _list_sent(stage_model),
        }
    return facts(description, trees=trees, fingerprint=description["data.fingerprint"])


def _list_sent(stage_model: StageModel) -> list[list[str]]:
    """Return what each part of a model that was cut by tracing sends on; [] for a model with blocks."""
    traced, stages = stage_model.traced, stage_model.stages
    if not isinstance(traced, TracedModel):
        return []
    return [traced.format_sent(stages, part) for part in range(len(stages.counts))]


def _rows_digest(run: Run, setup: RunSetup) -> str | None:
    """Return a digest of which layers are in which row, and of the rows of each fragment, that islands send.

    None where the layers of an island are in order and sent together: then it is the same on any mesh.
    """
    specs = setup.placement.specs
    rows = [dict(each.rows) for each in split_fragments(run.strategy.synchronisation, specs)]
    stored = None if specs.stages is None or specs.stages.is_plain else specs.stages.stored_blocks
    if setup.stage_model is not None or (len(rows) == 1 and stored is None):
        return None
    return hashlib.sha256(repr((stored, rows)).encode()).hexdigest()[:16]


class PreparedRun(NamedTuple):
    """Everything that is made before the first array.

    Args:
      run: the run as it is trained: scaled, with a loss whose exceptions are explained.
      folder: the folder of the run.
      setup: model, optimizer, mesh and placement.
      coordination: the exchange with the other islands.
      shares: the rows of each island.
      feed: the batches of this process's rows, larger ones where the batch has grown.
      heldout: name -> samples held out; a single set has the name "", {} without any.
      step, island_step, barriers, wanted: see `make_checked_step`.
      init: makes the state before the first step.
      description: the description of the run, see `config.describe`.
      expected: what batches should look like.
      strategy: the strategy as the user gave it, with the fields that some islands have otherwise.
      num_devices: number of devices of all islands.
      row_seconds_at_peak: see `utilization.row_seconds_at_peak`; on ranks that write no metrics 0.
    """

    run: Run
    folder: Path
    setup: RunSetup
    coordination: Coordination
    shares: RowShares
    feed: Feed
    heldout: dict[str, Any]
    step: Step
    island_step: IslandStep | None
    barriers: BarrierSchedule
    init: Callable[[], State]
    wanted: State
    description: dict[str, Any]
    expected: Expected
    strategy: Strategy
    num_devices: int
    row_seconds_at_peak: float

    @property
    def labels(self) -> Sequence[str]:
        """Names of the entries of a metric of shape (L,)."""
        return self.island_step.labels if self.island_step else list_combined_labels(self.setup.placement)

    @property
    def num_skipped(self) -> int | None:
        """How many samples the data has left out as they cannot be read; None: none ever is."""
        return getattr(self.feed.loader.batches.source, "num_skipped", None)

    def seconds_at_peak(self) -> float:
        """Return the seconds that all devices need at their peak for the newest batch; 0: not known."""
        return self.feed.num_rows * self.row_seconds_at_peak


def prepare_run(
    run: Run, folder: Path, islands: Islands | None, output: RunConsole, stack: ExitStack
) -> PreparedRun:
    """Set up a run, check it on its first batch, and verify that all islands have the same one.

    Args:
      run: the run as the user gave it.
      folder: the folder of the run.
      islands: the islands of the run; None for a run of one island.
      output: receives tables, notes and warnings.
      stack: closes what is opened here.

    Raises:
      ValueError: something in the run does not fit, or islands differ.
    """
    if Coordination(islands).is_first:
        check_installed(run.sinks)
    if islands is not None:
        output.say(binding_text(binding(islands)))
    # The first step is traced in the loop: it says which attention is computed.
    stack.enter_context(noting(output.note))
    strategy = run.strategy
    run, description, source, heldout, setup = _agree_setup(run, folder, islands, output)
    coordination = _make_coordination(run, setup, islands)
    stack.push(lambda kind, *_: coordination.close(failed=kind is not None))
    batches = make_batches(run, source)
    shares = RowShares(coordination, batches.row_counts, run, setup.mesh, run.strategy.accumulate)
    loader = shares.loader(batches)
    # Check the first batch: one that cannot be split or learned from is refused before anything compiles.
    mark = make_mark(run.strategy, folder, coordination)
    with mark.running("the check of the first batch"):
        parts = num_parts(run, setup.mesh, 1 if islands is None else islands.placement.num_islands)
        first, batch, expected = _place_first_batch(run, setup, heldout, loader, parts, output)
    _show(run, folder, setup, output)
    with mark.running("the check of the layout"):
        check_layout(run, setup, batches, output.note)
    step, island_step, barriers, wanted = make_checked_step(
        run, folder, setup, coordination, loader, batch, shares, output, stack
    )
    if text := bridge_text(coordination, island_step, run.strategy.across.num_gradient_programs):
        output.note(text)
    devices = coordination.devices(setup.mesh)
    row_seconds = row_seconds_at_peak(run, first, devices, output.note) if coordination.is_first else 0.0
    if run.strategy.across.share_limits == "auto" and island_step is not None:
        loader = fit_to_memory(coordination, shares, loader, island_step, wanted, batch, output.note)
    later = _make_later_loaders(run, setup, coordination, source, shares.limits)

    def init() -> State:
        state = init_state(setup.model, setup.optimizer, setup.placement, run.seed)
        return state if island_step is None else island_step.begin(state, batch)

    return PreparedRun(
        run=run,
        folder=folder,
        setup=setup,
        coordination=coordination,
        shares=shares,
        feed=Feed(loader, later),
        heldout=heldout,
        step=step,
        island_step=island_step,
        barriers=barriers,
        init=init,
        wanted=wanted,
        description=description,
        expected=expected,
        strategy=strategy,
        num_devices=sum(number for _, number in devices),
        row_seconds_at_peak=row_seconds,
    )


def _agree_setup(
    run: Run, folder: Path, islands: Islands | None, output: RunConsole
) -> tuple[Run, dict[str, Any], Any, dict[str, Any], RunSetup]:
    """Open the data, set up model, optimizer and mesh for it, and verify that all islands have the same.

    Returns:
      (the run as it is trained, its description, samples to train on, those held out, the setup).

    Raises:
      ValueError: see `prepare_run`.
    """
    # Its description is of the run as it is trained.
    run = run_of_island(run, islands, output)
    description, run = describe(run), replace(run, loss=guard_loss(run.loss))
    source, heldout = Coordination(islands).run_in_turn("data", lambda: open_sources(run, folder))
    # How many collective calls follow depends on the pipeline, so it is compared before them.
    Coordination(islands).check_agreement(pipeline_facts(description))
    run = apply_stage_cut(run, source, islands, output)
    setup = _make_setup(run, source, islands, output)
    if not isinstance(run.optimizer, Optimizer):
        description[VALUES] = initial_values(setup.optimizer, setup.placement.specs.abstract.params)
    description |= data_facts(source, heldout, with_contents=run.checkpoints.best is not None)
    Coordination(islands).check_agreement(run_facts(run, setup, description))
    return run, description, source, heldout, setup


def _make_setup(run: Run, source: Any, islands: Islands | None, output: RunConsole) -> RunSetup:
    """Make the setup of this island; report unused parameters, and batch statistics that stay apart."""
    num_islands, island = (
        (1, 0) if islands is None else (islands.placement.num_islands, islands.placement.island)
    )
    microbatch = make_microbatch(run, source)
    of_lengths = getattr(make_batches(run, source), "rows_by_length", ())
    setup = make_setup(run, num_islands, microbatch, island, shapes=of_lengths)
    if run.strategy.layout.collective_matmul:
        check_sequences(run, setup.whole_model, setup.mesh.shape, microbatch)
    if setup.unused:
        output.note(format_unused(setup.unused, run.optimizer))
    model = setup.whole_model
    if text := warn_shifted_names(name_arrays(model, jax.eval_shape(model.init, new_key(0))[0])):
        output.note(text)
    if num_islands > 1 and (name := model.axis_name):
        output.note(
            f"WARNING: batch statistics, or loads of experts, over the axis {name!r} are those of each"
            " island: islands do not exchange them. Where that matters use one island, a norm without them"
            " (GroupNorm, LayerNorm), or experts with over=sequence and without bias"
        )
    return setup


def _make_later_loaders(
    run: Run, setup: RunSetup, coordination: Coordination, source: Any, limits: Sequence[int] | None
) -> dict[int, Loader]:
    """Make the loader after each change of the batch: that of a run with so many times the batch.

    Args:
      run: the run.
      setup: the setup of this island.
      coordination: the exchange with the other islands.
      source: samples by number.
      limits: the most that each island gets of the first batch; a larger one has as many times the
        microbatches, so as many times that.
    """
    found = {}
    for steps, factor in growth_by_step(run.batch_growth, len(source), run.batch).items():
        share_limits = None if limits is None else tuple(each * factor for each in limits)
        across = replace(run.strategy.across, share_limits=share_limits)
        strategy = replace(run.strategy, accumulate=run.strategy.accumulate * factor, across=across)
        grown = replace(run, batch=run.batch * factor, strategy=strategy)
        batches = make_batches(grown, source)
        shares = RowShares(coordination, batches.row_counts, grown, setup.mesh, strategy.accumulate)
        found[steps] = shares.loader(batches)
    return found


def _place_first_batch(
    run: Run, setup: RunSetup, heldout: Mapping[str, Any], loader: Loader, parts: int, output: RunConsole
) -> tuple[Batch, Any, Expected]:
    """Load, check and place the first batch; return it, as placed too, and what later ones should look like.

    Raises:
      ValueError: see `_check_first_batch`; or it cannot be split.
    """
    first = loader.batches.load(FIRST_POSITION)
    expected = make_expected(setup.whole_model, run.loss, first, getattr(run.model, "vocab", None))
    found = check_trace(setup.whole_model, run.loss, first, parts, run.strategy.accumulate)
    for text in [*found.warnings, *source_warnings(loader.batches, run)]:
        output.note(text)
    _check_first_batch(run, loader.batches.source, heldout, expected, first, found.problems)
    return first, loader.place(first), expected


def _check_first_batch(
    run: Run, source: Any, heldout: Mapping[str, Any], expected: Expected, first: Batch, traced: list[str]
) -> None:
    """Check that a run learns from its first batch and other data, and evaluates the metric of its best step.

    Raises:
      ValueError: it is not, or lists what is wrong with the batch.
    """
    names = [f"{heldout_prefix(name)}{metric}" for name in heldout for metric in ("loss", *expected.metrics)]
    if run.checkpoints.best is not None and run.checkpoints.best not in names:
        have = f"an evaluation gives {', '.join(names)}" if names else "the data has no held-out samples"
        raise ValueError(
            f"checkpoints.best is {run.checkpoints.best!r}, and {have}; use"
            f" {'one of these, or ' if names else ''}None"
        )
    problems = [*traced, *loss_problems(expected), *class_problems(expected, first)]
    problems += data_problems(run, expected, source, heldout)
    if problems:
        raise problems_error("this run would learn nothing, or something else than it should", problems)


def _show(run: Run, folder: Path, setup: RunSetup, output: RunConsole) -> None:
    """Show what will be trained: mesh and parameters, the pipeline and the data."""
    output.say(totals_text(setup.placement.specs, dict(setup.mesh.shape), run.strategy.offload))
    if text := pipeline_text(run, setup):
        output.note(text)
    elif run.strategy.across.axis == "pipeline":
        output.note("WARNING: --across pipeline, but there is one island: no pipeline (launch several)")
    if summary := getattr(run.data, "summary", None):
        output.note(summary(folder))


def _make_coordination(run: Run, setup: RunSetup, islands: Islands | None) -> Coordination:
    """Connect this island to the others."""
    if islands is None:
        return Coordination()
    if islands.placement.num_islands == 1:
        return Coordination(islands)
    transfer, owners = make_transfers(run, setup, islands)
    # the stages of a pipeline take different times by nature, so they are not compared
    stragglers = None if setup.grid else Stragglers(islands.control.names, run.recovery.straggler)
    return Coordination(islands, transfer, setup.grid, stragglers, owners=owners)
