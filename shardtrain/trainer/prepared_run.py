"""Prepare a run before its first array: scale it, set it up, check its first batch, and compare the islands.

Everything that can be refused is refused here. Next: `train.py`.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax

from shardtrain.checks.first_batch import find_class_problems, find_loss_problems, make_loss_facts
from shardtrain.checks.loss_program import check_trace
from shardtrain.checks.shifted_names import warn_shifted_names
from shardtrain.data import Batch, Batches, Loader
from shardtrain.elastic.epoch_files import read_newest
from shardtrain.elastic.group import Group
from shardtrain.elastic.history import ELASTIC
from shardtrain.errors.messages import refuse
from shardtrain.functional.activation_rules import noting
from shardtrain.functional.loss_guard import guard_loss
from shardtrain.functional.model import name_arrays
from shardtrain.functional.rng import new_key
from shardtrain.islands.agreement import facts
from shardtrain.islands.membership import Islands, binding
from shardtrain.islands.watchdog.stragglers import Stragglers
from shardtrain.optim.optimizer import Optimizer
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.traced_cut import ModelTrace
from shardtrain.report.islands import binding_text
from shardtrain.report.sharding import totals_text
from shardtrain.report.sinks import check_installed
from shardtrain.train_step.elastic_exchange import add_outer_state
from shardtrain.train_step.placement import init_state, restorable_state
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import State, split_fragments
from shardtrain.train_step.step import Step, list_combined_labels, make_step
from shardtrain.trainer.config import Run, describe
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import Coordination, make_transfers
from shardtrain.trainer.elastic_run import ElasticRun, PositionLoader, ProcessChannel
from shardtrain.trainer.feed import Feed, growth_by_step
from shardtrain.trainer.island_run import make_island_run, prepare_elastic
from shardtrain.trainer.layout_check import check_layout, check_sequences
from shardtrain.trainer.restore_state import VALUES, compute_initial_values
from shardtrain.trainer.row_shares import RowShares, fit_to_memory
from shardtrain.trainer.run_folder import make_mark
from shardtrain.trainer.run_step import bridge_text, check_programs, make_multi_island_step, pipeline_text
from shardtrain.trainer.setup import (
    FIRST_POSITION,
    RunSetup,
    count_parts,
    format_unused,
    make_microbatch,
    make_setup,
)
from shardtrain.trainer.sources import (
    describe_data,
    find_data_problems,
    find_source_warnings,
    heldout_prefix,
    make_batches,
    open_sources,
)
from shardtrain.trainer.stage_cut import apply_stage_cut
from shardtrain.trainer.usage import compute_row_seconds_at_peak
from shardtrain.trainer.waves import WaveLog, make_barrier_schedule


class PreparedRun:
    """Everything that is made before the first array of a run.

    All islands make theirs at the same time, and compare them.

    Args:
      run: the run as the user gave it.
      folder: the folder of the run.
      islands: the islands of the run; None for a run of one island.
      output: receives tables, notes and warnings.
      stack: closes what is opened here.

    Attributes:
      run: the run as it is trained: scaled, with a loss whose exceptions are explained.
      strategy: the strategy as the user gave it, with the fields in which islands differ.
      description: the description of the run, see `config.describe`.
      heldout: name -> held-out samples; a single set has the name "".
      setup: model, optimizer, mesh and placement.
      coordination: the exchange with the other islands.
      shares: the rows of each island.
      feed: the batches of this process's rows.
      expected: the facts that batches are checked against.
      mark: marks programs before they first run.
      elastic: this island of a run whose islands come and go; else None.
      facts: what all islands must have in common.
      step: (state, batch) -> (state, metrics); compiled when it is first called.
      island_step: the same step of several islands; None for a run of one island.
      barriers: the steps after which islands synchronise.
      wanted: shapes, dtypes and shardings of the state.
      init: makes the state before the first step.
      num_devices: number of devices of all islands.

    Raises:
      ValueError: something in the run does not fit, or islands differ.
    """

    def __init__(
        self, run: Run, folder: Path, islands: Islands | None, output: RunConsole, stack: ExitStack
    ) -> None:
        self.folder, self.strategy, self._output = folder, run.strategy, output
        self.coordination = coordination = Coordination(islands)
        if coordination.is_first:
            check_installed(run.sinks)
        if islands is not None:
            output.say(binding_text(binding(islands)))
        # the loop traces the first step, which notes the attention that it computes
        stack.enter_context(noting(output.note))
        source = self._set_up(run)
        run, setup = self.run, self.setup
        batches = make_batches(run, source)
        self.elastic: ElasticRun | None = None
        if run.elastic.islands:
            assert isinstance(batches, Batches)
            channel = None
            if islands is not None:
                channel = stack.enter_context(closing(ProcessChannel(islands)))
            group = Group(channel)
            self.elastic = ElasticRun(run, folder, setup, batches, output, group)
            stack.callback(self.elastic.close)
            coordination = replace(coordination, is_chief=self.elastic.is_chief)
        if islands is not None and islands.placement.num_islands > 1:
            transfer, owners = make_transfers(run, setup, islands)
            # the stages of a pipeline take different times by nature, so they are not compared
            stragglers = None if setup.grid else Stragglers(islands.control.names, run.recovery.straggler)
            links = Coordination(islands, transfer, setup.grid, stragglers, owners=owners)
            coordination = replace(links, is_chief=coordination.is_chief)
        self.coordination = coordination
        stack.push(lambda kind, *_: coordination.close(failed=kind is not None))
        self.shares = RowShares(coordination, batches.row_counts, run, setup.mesh, run.strategy.accumulate)
        loader = self.shares.loader(batches)
        # refuse a first batch that cannot be split or learned from before anything compiles
        self.mark = make_mark(run.strategy, folder, coordination)
        with self.mark.running("the check of the first batch"):
            first = self._check_first_batch(loader)
            self._batch = loader.place(first)
        self._show()
        with self.mark.running("the check of the layout"):
            check_layout(run, setup, batches, output.note)
        self._make_step(loader, stack)
        own = (setup.mesh.devices.flat[0].device_kind, setup.mesh.devices.size)
        devices = coordination.all_gather_islands("devices", own)
        # of islands that come and go, nobody knows how many devices took part
        self.num_devices = 1 if self.elastic else sum(number for _, number in devices)
        self._row_seconds_at_peak = 0.0
        if coordination.is_first and not self.elastic:
            self._row_seconds_at_peak = compute_row_seconds_at_peak(run, first, devices, output.note)
        if run.strategy.across.share_limits == "auto" and self.island_step is not None:
            loader = fit_to_memory(self, loader, self._batch, output.note)
        if self.elastic is not None:
            loader = PositionLoader(**{each.name: getattr(loader, each.name) for each in fields(Loader)})
        self.feed = Feed(loader, self._make_later_loaders(source))
        self.init = self.mark.first_run("the initial state", self._init)

    @property
    def labels(self) -> Sequence[str]:
        """Names of the entries of a metric of shape (L,)."""
        return self.island_step.labels if self.island_step else list_combined_labels(self.setup.placement)

    @property
    def num_skipped(self) -> int | None:
        """Number of samples that the data left out because they cannot be read; None if it never does."""
        return getattr(self.feed.loader.batches.source, "num_skipped", None)

    def seconds_at_peak(self) -> float:
        """Return the seconds that all devices need at their peak for the newest batch; 0 if not known."""
        return self.feed.num_rows * self._row_seconds_at_peak

    def _init(self) -> State:
        state = init_state(self.setup.model, self.setup.optimizer, self.setup.placement, self.run.seed)
        if self.island_step is not None:
            return self.island_step.begin(state, self._batch)
        return state if self.elastic is None else self._add_outer_state(state)

    def _add_outer_state(self, state: State) -> State:
        return add_outer_state(state, self.run.strategy.synchronisation, self.setup.placement)

    def _set_up(self, given: Run) -> Any:
        """Open the data, make the setup, compare both with the other islands, and return the samples."""
        coordination, output = self.coordination, self._output
        if given.elastic.islands:
            epoch = read_newest(self.folder / ELASTIC)
            # the processes of an island may see another's first epoch at different times
            slots = coordination.all_gather("slots of the run", epoch.num_slots if epoch else None)[0]
            given = prepare_elastic(given, slots, coordination.num_islands)
        run = make_island_run(given, coordination, output)
        # the description is of the run as it is trained
        self.description, run = describe(run), replace(run, loss=guard_loss(run.loss))
        source, self.heldout = coordination.run_in_turn("data", lambda: open_sources(run, self.folder))
        # the pipeline decides which collective calls follow, so compare it before them
        facts = {
            f"run/{name}": value
            for name, value in self.description.items()
            if name.startswith(("strategy.across.", "strategy.pipeline."))
        }
        # other islands receive JSON, in which a tuple is a list
        coordination.check_agreement(json.loads(json.dumps(facts)))
        self.run = run = apply_stage_cut(run, source, coordination, output)
        self.setup = _make_setup(run, source, coordination, output)
        if not isinstance(run.optimizer, Optimizer):
            params = self.setup.placement.specs.abstract.params
            self.description[VALUES] = compute_initial_values(self.setup.optimizer, params)
        self.description |= describe_data(
            source, self.heldout, with_contents=run.checkpoints.best is not None
        )
        self.facts = make_run_facts(run, self.setup, self.description)
        coordination.check_agreement(self.facts)
        return source

    def _check_first_batch(self, loader: Loader) -> Batch:
        """Load the first batch, and check that the run learns from it and evaluates its best metric."""
        run, model = self.run, self.setup.whole_model
        first = loader.batches.load(FIRST_POSITION)
        parts = count_parts(run, self.setup.mesh, self.coordination.num_islands)
        self.expected = make_loss_facts(model, run.loss, first, getattr(run.model, "vocab", None))
        problems, warnings = check_trace(model, run.loss, first, parts, run.strategy.accumulate)
        for text in [*warnings, *find_source_warnings(loader.batches, run)]:
            self._output.note(text)
        metrics = ("loss", *self.expected.metrics)
        names = [f"{heldout_prefix(name)}{metric}" for name in self.heldout for metric in metrics]
        if (best := run.checkpoints.best) is not None and best not in names:
            have = f"an evaluation gives {', '.join(names)}" if names else "the data has no held-out samples"
            use = "one of these, or None" if names else "None"
            raise ValueError(f"checkpoints.best is {best!r}, and {have}; use {use}")
        problems += [*find_loss_problems(self.expected), *find_class_problems(self.expected, first)]
        problems += find_data_problems(run, self.expected, loader.batches.source, self.heldout)
        refuse("this run would learn nothing, or something else than it should", problems)
        return first

    def _show(self) -> None:
        """Show what will be trained: mesh and parameters, the pipeline and the data."""
        run, setup, output = self.run, self.setup, self._output
        output.say(totals_text(setup.placement.specs, dict(setup.mesh.shape), run.strategy.offload))
        if text := pipeline_text(run, setup):
            output.note(text)
        elif run.strategy.across.axis == "pipeline":
            output.note("WARNING: --across pipeline, but there is one island: no pipeline (launch several)")
        if summary := getattr(run.data, "summary", None):
            output.note(summary(self.folder))

    def _make_step(self, loader: Loader, stack: ExitStack) -> None:
        """Make the step; check that islands of the same mesh and rows have the same programs."""
        run, setup, note = self.run, self.setup, self._output.note
        self.barriers = make_barrier_schedule(run)
        wave_log = WaveLog(self.folder, self.coordination.island, note)
        stack.callback(wave_log.close)
        self.island_step = make_multi_island_step(self, loader, self._batch, wave_log)
        self.wanted = restorable_state(setup.placement)
        if self.island_step is not None:
            stack.callback(self.island_step.close)
            self.wanted = self.island_step.wanted(self.wanted, self._batch)
        if self.elastic is not None:
            self.step: Step = self.elastic.step
            if self.island_step is None:
                self.wanted = self._add_outer_state(self.wanted)
            elif isinstance(self.island_step.compute, StageCompute):
                self.elastic.stage = self.island_step.compute
            return
        self.step = self.island_step or make_step(
            setup.model, run.loss, setup.optimizer, setup.placement, setup.learning_rate, last_step=run.steps
        )
        # the check compiles the program of a pipeline, where XLA may end the process already
        with self.mark.running("the training step"):
            check_programs(self, self._batch)
        if text := bridge_text(self):
            note(text)

    def _make_later_loaders(self, source: Any) -> dict[int, Loader]:
        """Return number of steps done -> the loader from then on, of a batch several times as large."""
        run, limits, found = self.run, self.shares.limits, {}
        for steps, factor in growth_by_step(run.batch_growth, len(source), run.batch).items():
            # a larger batch has more microbatches, so an island's limit grows as the batch does
            share_limits = None if limits is None else tuple(each * factor for each in limits)
            across = replace(run.strategy.across, share_limits=share_limits)
            strategy = replace(run.strategy, accumulate=run.strategy.accumulate * factor, across=across)
            grown = replace(run, batch=run.batch * factor, strategy=strategy)
            batches = make_batches(grown, source)
            shares = RowShares(
                self.coordination, batches.row_counts, grown, self.setup.mesh, strategy.accumulate
            )
            found[steps] = shares.loader(batches)
        return found


def _make_setup(run: Run, source: Any, coordination: Coordination, output: RunConsole) -> RunSetup:
    """Make the setup of this island; report unused parameters, and batch statistics that stay apart."""
    microbatch, num_islands = make_microbatch(run, source), coordination.num_islands
    of_lengths = getattr(make_batches(run, source), "rows_by_length", ())
    setup = make_setup(run, num_islands, microbatch, coordination.island, shapes=of_lengths)
    model = setup.whole_model
    if run.strategy.layout.collective_matmul:
        check_sequences(run, model, setup.mesh.shape, microbatch)
    if setup.unused:
        output.note(format_unused(setup.unused, run.optimizer))
    if text := warn_shifted_names(name_arrays(model, jax.eval_shape(model.init, new_key(0))[0])):
        output.note(text)
    if num_islands > 1 and (name := model.axis_name):
        output.note(
            f"WARNING: each island has its own batch statistics, or loads of experts, over the axis {name!r}:"
            " islands do not exchange them. If that matters, use one island, a norm without statistics"
            " (GroupNorm, LayerNorm), or experts with over=sequence and without bias"
        )
    return setup


def make_run_facts(run: Run, setup: RunSetup, description: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that all islands must have in common."""
    trees = {"parameters": setup.placement.specs.abstract.params}
    # the arrays of the state must be the same on all islands, whatever dtype each computes in
    description = {
        **description,
        "synchronisation.rows": _rows_digest(run, setup),
        "an island computes in float16": run.strategy.scales_loss,
    }
    if (stage_model := setup.stage_model) is not None:
        traced, stages = stage_model.traced, stage_model.stages
        trees = {"parameters": traced.params}
        sizes = (stages.num_stages, run.strategy.accumulate, stages.num_chunks)
        sent = None
        if isinstance(traced, ModelTrace):
            sent = [traced.format_sent(stages, part) for part in range(len(stages.counts))]
        description |= {
            "stages": stages.num_stages,
            "accumulate": run.strategy.accumulate,
            "compute_dtype": run.strategy.compute_dtype,
            "pipeline.tasks": _digest(repr(make_table(run.strategy.pipeline.schedule, *sizes).tasks)),
            "pipeline.blocks": [list(cut.counts) for cut in setup.cuts],
            "pipeline.sent": sent,
        }
    return facts(description, trees=trees, fingerprint=description["data.fingerprint"])


def _rows_digest(run: Run, setup: RunSetup) -> str | None:
    """Return a digest of the layer in each row and of the rows in each fragment that islands send.

    None if the layers of an island are in order and sent together: then it is the same on any mesh.
    """
    specs = setup.placement.specs
    rows = [dict(each.rows) for each in split_fragments(run.strategy.synchronisation, specs)]
    stored = None if specs.stages is None or specs.stages.is_plain else specs.stages.stored_blocks
    if setup.stage_model is not None or (len(rows) == 1 and stored is None):
        return None
    return _digest(repr((stored, rows)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
