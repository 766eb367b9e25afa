"""The step of a run, whose programs are checked before the first array is made.

Next: `multi_island_step.py`, the step of several islands; `prepared_run.py`, which uses this one.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain.data import Loader
from shardtrain.train_step.delta_island_step import DeltaIslandStep
from shardtrain.train_step.initial_state import restorable_state
from shardtrain.train_step.island_step import GradientIslandStep, IslandStep
from shardtrain.train_step.meetings import Meetings
from shardtrain.train_step.stage_step import StageStep
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Step, make_step
from shardtrain.trainer.config import Run
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.context_checks import check_permutes, has_permutes
from shardtrain.trainer.coordination import Coordination
from shardtrain.trainer.multi_island_step import make_multi_island_step
from shardtrain.trainer.program_mark import make_mark
from shardtrain.trainer.row_shares import RowShares
from shardtrain.trainer.run_facts import step_program
from shardtrain.trainer.setup import RunSetup
from shardtrain.trainer.wave_log import WaveLog
from shardtrain.trainer.waves import make_meetings


class CheckedStep(NamedTuple):
    """A step, and what belongs to it.

    Args:
      step: the step, which is compiled when it is first called.
      island_step: the same of several islands; None for a run of one island.
      meetings: after which steps all islands meet.
      wanted: the shapes, dtypes and shardings of its state.
    """

    step: Step
    island_step: IslandStep | None
    meetings: Meetings
    wanted: State


def make_checked_step(
    run: Run,
    folder: Path,
    setup: RunSetup,
    coordination: Coordination,
    loader: Loader,
    batch: Any,
    shares: RowShares,
    output: RunConsole,
    stack: ExitStack,
) -> CheckedStep:
    """Make the step of a run, and check that islands of the same mesh and rows have the same programs.

    Args:
      run: the run.
      folder: the folder of the run.
      setup: model, optimizer, mesh and placement.
      coordination: the exchange with the other islands.
      loader: the loader of this process's rows.
      batch: the first batch, on the mesh.
      shares: the rows of each island.
      output: receives notes.
      stack: closes what is opened here.

    Raises:
      ValueError: islands differ; or see `check_permutes` and `make_multi_island_step`.
    """
    meetings, islands = make_meetings(run), coordination.islands
    wave_log = WaveLog(folder, 0 if islands is None else islands.seat.island, output.note)
    stack.callback(wave_log.close)
    island_step = make_multi_island_step(
        run, setup, coordination, loader, batch, shares=shares, meetings=meetings, wave_log=wave_log
    )
    step, wanted = island_step, restorable_state(setup.placement)
    if island_step is not None:
        stack.callback(island_step.close)
        wanted = island_step.wanted(wanted, batch)
    if step is None:
        rate = setup.learning_rate
        step = make_step(setup.model, run.loss, setup.optimizer, setup.placement, rate, last_step=run.steps)
    # the program of a pipeline is compiled for its check, where XLA may end the process already
    with make_mark(run.strategy, folder, coordination).running("the training step"):
        _check_programs(run, setup, coordination, step, wanted, batch)
    return CheckedStep(step, island_step, meetings, wanted)


def _check_programs(
    run: Run, setup: RunSetup, coordination: Coordination, step: Any, wanted: State, batch: Any
) -> None:
    """Check the programs of a step, which it uses when it is called, without tracing them again."""
    in_stages = has_permutes(setup.mesh, sequence_sharded=run.strategy.layout.sequence_sharded)
    if isinstance(step, StageStep) or not (in_stages or coordination.islands):
        return
    several = isinstance(step, GradientIslandStep | DeltaIslandStep)
    programs = step.lowered(wanted, batch) if several else [step.lower(wanted, batch)]
    if in_stages:
        check_permutes(programs[0])
    if coordination.islands is not None:
        coordination.check_agreement(step_program(run, setup, batch, programs))
