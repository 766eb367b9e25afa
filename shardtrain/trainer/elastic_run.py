"""The island of a run whose islands come and go, as the training loop uses it.

Each island runs the whole loop of one device, with the same numbers; only gradients are shared out, and only
the chief writes. Next: `elastic/island.py`.
"""

import json
import os
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardtrain.checkpoints.paths import CHECKPOINTS, delete
from shardtrain.checkpoints.policy import is_due
from shardtrain.checkpoints.reader import find_readers
from shardtrain.data import Batch as HostBatch
from shardtrain.data import Batches, Loader, Position
from shardtrain.elastic.command_file import write_command
from shardtrain.elastic.engine import Wish
from shardtrain.elastic.epoch_files import find_chiefs, list_epochs
from shardtrain.elastic.history import ELASTIC, list_members
from shardtrain.elastic.ledger import is_valid_checkpoint
from shardtrain.elastic.member import Membership
from shardtrain.elastic.run_files import EPOCHS, RunFiles
from shardtrain.functional.loss import Batch
from shardtrain.imported import select_kept_tokens
from shardtrain.islands.agreement import disagreement
from shardtrain.islands.network import ADDRESS
from shardtrain.system import terminal
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import read_json
from shardtrain.train_step.elastic_program import ElasticProgram
from shardtrain.train_step.island_compute import Training
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics
from shardtrain.trainer.config import Run
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.resume import StartPoint, find_parameters, leave_out_base
from shardtrain.trainer.run_checkpoints import WALL_SECONDS, RunCheckpoints
from shardtrain.trainer.setup import FIRST_POSITION, RunSetup
from shardtrain.trainer.synchronisation import compute_fingerprints

if TYPE_CHECKING:
    from shardtrain.elastic.island import ElasticIsland

FACTS, MOST_FACTS_BYTES = "facts-{}.json", 1 << 24
NO_METRICS: Metrics = {"loss_sum": 0.0, "count": 0.0, "skipped": 0.0}
"""Of a step before an exchange, which has the metrics of all steps since the last one."""

ENDED_EARLY = ("excluded", "cut off", "too few", "no state")
"""Outcomes after which the same command joins the run again, or continues it."""


class IslandEnded(Exception):
    """This island is no member any more, or never was; the same command joins the run again."""


class ElasticRun:
    """This island: the step, checkpoints, and what only the chief does.

    Args:
      run: the run.
      folder: the folder of the run.
      setup: the setup of this island.
      batches: the whole batches.
      output: shows lines to the user.

    Attributes:
      outcome: why this island is no member any more; "" while it is, see `engine.Over`.
      asked: returns the number of the signal that asks this island to leave, or 0.
      save_state: saves the state after the newest step, as the loop does it.
      save_if_best: saves it if its evaluation is better than those of all saved steps.
      write_kept_lines: writes the lines of metrics that this island has kept, if it is the chief now.
      command: the words after `shardtrain train`, for islands that `launch --join` starts; () if not known.
      watched: number of steps done and metrics, of steps that this island has watched before it joined: the
        chief may be lost before it has written them.
    """

    def __init__(self, run: Run, folder: Path, setup: RunSetup, batches: Batches, output: RunConsole) -> None:
        self._run, self._folder, self._setup, self._batches = run, folder, setup, batches
        assert run.elastic.slots is not None
        self._output, self.num_slots = output, run.elastic.slots
        self._files = RunFiles(folder / ELASTIC)
        self._island: ElasticIsland | None = None
        self._saved_seconds = time.monotonic()
        self.asked: Callable[[], int] = lambda: 0
        self.save_state: Callable[[], object] = lambda: None
        self.save_if_best: Callable[[], object] = lambda: None
        self.write_kept_lines: Callable[[], object] = lambda: None
        self.watched: list[tuple[int, Metrics]] = []
        self._was_chief = self._has_taken_over = False
        self._every, self._done = run.strategy.synchronisation.every, 0
        self.command: Sequence[str] = ()

    @property
    def outcome(self) -> str:
        return "" if self._island is None else self._island.outcome

    @property
    def island(self) -> "ElasticIsland":
        """The island, once `join` has been called."""
        assert self._island is not None
        return self._island

    def is_chief(self) -> bool:
        """Whether this island writes for all; True before it joins, when nothing is written."""
        if self._island is None:
            return True
        return self.island.member.fence is not None if self.outcome else self.island.member.is_chief

    def may_write(self) -> bool:
        """Return whether this island has taken over, and is the chief by the run folder too.

        One that slept does not know of a newer chief.
        """
        is_chief = self._has_taken_over and self.is_chief()
        return is_chief and self._files.newest() == self.island.member.number

    # -- begin and end -------------------------------------------------------------------------------------

    def join(
        self,
        facts: Mapping[str, Any],
        init: Callable[[], State],
        find_start: Callable[[], StartPoint],
        checkpoints: RunCheckpoints,
    ) -> StartPoint:
        """Become a member, with the state of the others or that of the newest checkpoint.

        Args:
          facts: what all islands must have in common, see `agreement.facts`.
          init: makes the state before the first step.
          find_start: restores the newest checkpoint, or makes the state before the first step.
          checkpoints: the checkpoints of the run.

        Raises:
          ValueError: the facts of the run differ.
          IslandEnded: it is over before.
        """
        self._checkpoints, self._find_start = checkpoints, find_start
        self._facts = {"facts": dict(facts), "name": f"{socket.gethostname()}, process {os.getpid()}"}
        base = self._run.start_from
        tokens = {} if base.checkpoint is None else find_parameters(base.checkpoint, base.step).extra
        self._extra: Mapping[str, Any] = select_kept_tokens(tokens)
        leave_out_base(self._run, checkpoints)
        self._island = self._make_island(init())
        name = self._island.member.me.name
        checkpoints.checkpoints.set_writer(name, self.may_write)
        device = self._setup.mesh.devices.flat[0]
        own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "mesh": dict(self._setup.mesh.shape),
            "device": device.device_kind,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
            "started": time.time(),
        }
        self._files.describe_member(name, own)
        self._island.start()
        step = self._island.join()
        self._output.release(self.is_chief(), name)
        if step is None and self.outcome != "stopped":
            raise IslandEnded(f"this island did not join the run in {self._folder}: {self.outcome}")
        if step is None:
            step = self._island.member.step
        for done, metrics in self._program.recent:
            # as `step` returns them, of the steps until an exchange
            first = (done - 1) // self._every * self._every + 1
            self.watched += [*((each, NO_METRICS) for each in range(first, done)), (done, metrics)]
        self._was_chief, self._done = self.is_chief(), step
        return StartPoint(
            state=self._program.state,
            step=step,
            position=self._find_position(step),
            # the clock of the run continues, whoever joins
            extra={WALL_SECONDS: time.time() - self._files.begun(), **self._extra},
        )

    def _make_island(self, state: State) -> "ElasticIsland":
        from shardtrain.elastic.island import ElasticIsland  # a library that other runs need not have

        run, setup = self._run, self._setup
        self._program = make_program(run, setup, self._batches, self.num_slots, state)
        options = Membership(
            num_slots=self.num_slots,
            num_steps=run.steps,
            every=self._every,
            batch=run.elastic.batch,
            min_members=run.elastic.fewest,
            max_members=run.elastic.most,
            wait_seconds=60 * run.elastic.wait_minutes,
            minority_seconds=run.elastic.patience_seconds,
        )
        island = ElasticIsland(
            self._folder,
            self._program,
            options,
            checkpoints=self,
            host=os.environ.get(ADDRESS),
            patience_seconds=run.elastic.patience_seconds,
            report=self._report,
        )
        island.wants_to_leave = lambda: bool(self.asked())
        island.find_digest = self._find_digest
        return island

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Do the next step with the other islands; the state and the batch are those of the program.

        With local steps the last one before an exchange does them all; the state does not change before.

        Raises:
          IslandEnded: this island is no member any more.
        """
        island, is_chief = self.island, self.is_chief()
        seconds = time.monotonic() - self._saved_seconds if is_chief else 0.0
        # the chief before may have been lost while it saved
        is_new = is_chief and not self._was_chief
        self._was_chief = is_chief
        if is_new or is_due(self._run.checkpoints, self._done + 1, seconds):
            island.wish(Wish(saves=True))
        is_last = (self._done + 1) % self._every == 0
        # what follows the last exchange is done before the first of the local steps
        if (island.advance() if is_last else island.join()) is None:
            raise IslandEnded(self.outcome)
        self._done += 1
        self._show()
        return self._program.state, self._program.metrics if is_last else NO_METRICS

    def load_batches(self, step: int) -> list[HostBatch]:
        """Load the batches of a committed step again, or those of all steps since the exchange before it.

        Args:
          step: number of steps done after it.
        """
        # a step is of the newest epoch that begins at it or before it, see `ledger.py`
        epoch = next(each for each in reversed(list_epochs(self._files)) if each.step < step)
        numbers = epoch.find_batches(step - 1) or range(step - self._every, step)
        return [self._batches.load(self._batches.advance(FIRST_POSITION, each)) for each in numbers]

    def finish(self) -> State:
        """Wait until all islands know that the run ends; return the last state."""
        while self.island.advance() is not None:
            pass
        return self._program.state

    def close(self) -> None:
        """End the connections to the others."""
        if self._island is not None:
            self._island.close()

    # -- checkpoints, see `elastic.program.IslandCheckpoints` ----------------------------------------------

    def check_others(self) -> None:
        """Compare the facts of this island with those of the one that founded the run.

        Raises:
          ValueError: the diff.
        """
        # of the newest epoch for which the founder has written its facts; 0 if none
        texts = [path.stem.rpartition("-")[2] for path in (self._folder / ELASTIC).glob(FACTS.format("*"))]
        founded = max((int(text) for text in texts if text.isdecimal()), default=0)
        path = self._folder / ELASTIC / FACTS.format(founded)
        found = read_json(path, MOST_FACTS_BYTES)
        if not (isinstance(found, dict) and isinstance(found.get("facts"), dict)):
            raise ValueError(f"{path} is not what the first island of a run writes; use another --run-dir")
        names = [f"the run ({short(found.get('name'))})", "this island"]
        title = f"this island cannot join the run in {self._folder}:"
        if text := disagreement([found["facts"], self._facts["facts"]], names, title=title):
            raise ValueError(text)

    def find(self) -> int:
        """Return the step of the newest valid checkpoint; void ones are deleted."""
        self._drop_void()
        # the newest one whose files are whole
        return self._checkpoints.checkpoints.discover().step or 0

    def _drop_void(self) -> None:
        """Delete the checkpoints of a past that was left behind, as readers know no epochs."""
        epochs = list_epochs(self._files)

        def is_valid(step: int, saved: Any) -> bool:
            number = saved.get("epoch") if isinstance(saved, dict) else None
            if type(number) is not int or not 1 <= number <= len(epochs):
                return number is None  # of a run that was not elastic then
            return is_valid_checkpoint(epochs, step, number)

        for each in find_readers(self._folder / CHECKPOINTS):
            if not is_valid(each.step, each.extra.get(ELASTIC)):
                delete(each.folders[0])

    def revoke(self, number: int) -> None:
        """Take over the checkpoints from the chiefs before an epoch, which can finish no save after this."""
        checkpoints, self._has_taken_over = self._checkpoints.checkpoints, True
        checkpoints.revoke(lambda names: find_chiefs(self._files, names, number))
        # the chief before may have been lost after an evaluation, before it saved its step
        if self._done not in checkpoints.steps():
            self.save_if_best()

    def restore(self) -> bool:
        """Set the program's state to the newest checkpoint, or to the state before the first step."""
        # an earlier chief may have finished a save since `find`
        self._drop_void()
        # of this epoch: one that was frozen here must not change those of a later founder
        path = self._folder / ELASTIC / FACTS.format(self.island.member.number)
        replace_file(path, json.dumps(self._facts).encode())
        if self.command:
            write_command(self._folder / ELASTIC, self.command)
        self._program.state = None
        start = self._find_start()
        expected = self._find_position(start.step)
        if start.position != expected:
            raise ValueError(
                f"the checkpoint of step {start.step} continues at {start.position} of the data, and with"
                f" islands that come and go step {start.step} is at {expected}: the batch or the data has"
                " changed, or a rollback skipped data. Continue without --elastic"
            )
        self._program.state, self._extra = start.state, start.extra
        return True

    def save(self, step: int, *, is_last: bool) -> bool:
        """Save the state after a step; return False if members changed meanwhile."""
        if not self.may_write():
            return False
        self._saved_seconds = time.monotonic()
        self._show()
        # a run that continues from it does not repeat its steps
        self.write_kept_lines()
        self.save_state()
        if is_last:
            self._checkpoints.settle()
        return True

    def saved(self, step: int) -> dict[str, Any]:
        """Return the entries of a checkpoint about the membership, and the position after it."""
        return {
            ELASTIC: {"epoch": self.island.member.number},
            "position": self._find_position(step),
        }

    def _find_position(self, step: int) -> Position:
        """Return the position in the data after a step of the newest epoch, or before its first one."""
        epoch = self.island.member.epoch
        batches = None if epoch is None else epoch.find_batches(step)
        return self._program.find_position(step if batches is None else batches.start)

    # -- what others see -----------------------------------------------------------------------------------

    def _find_digest(self, step: int) -> str:
        """Return a fingerprint of the parameters if it is due and islands compute equal bits, else ""."""
        every = self._run.recovery.fingerprint_every
        if every is None or step == 0 or step // every == (step - self._every) // every:
            return ""
        try:
            found = list_members(self._folder / ELASTIC)
        except ValueError:  # a damaged description: it is not known who computes equal bits
            return ""
        kinds = {
            str([found.get(name, {}).get(key) for key in ("mesh", "device", "cores")])
            for name in self.island.member.names
        }
        if len(kinds) != 1:
            return ""
        prints = np.asarray(compute_fingerprints(self._program.state.params)).tobytes()
        return f"{kinds.pop()}/{zlib.crc32(prints):08x}"

    def _show(self) -> None:
        """Let only the chief print steps and notes."""
        self._output.show(self.is_chief(), self.island.member.me.name)

    def _report(self, text: str) -> None:
        """Show a line about the members: the chief all of them, others those about themselves."""
        name = self.island.member.me.name
        self._show()
        if self.is_chief():
            self._output.note(text)
        elif text.startswith("joins ") or name in text:
            terminal.err(f"{name}: {text}\n")


def make_program(run: Run, setup: RunSetup, batches: Batches, num_slots: int, state: State) -> ElasticProgram:
    """Make what the islands of an elastic run train together, from a state."""
    training = Training(setup.model, run.loss, setup.optimizer, setup.learning_rate)
    by, members = run.strategy.synchronisation, run.elastic.most if run.elastic.grows else 1
    return ElasticProgram(training, setup.placement, batches, num_slots, state, by, members, run.scaling.rate)


def mark_plain(folder: Path, step: int) -> None:
    """Record that a run continues from a step without `--elastic`, if it had islands that came and went."""
    if (folder / ELASTIC / EPOCHS / "1.json").exists():
        RunFiles(folder / ELASTIC).mark_plain(step)


class PositionLoader(Loader):
    """Yields the positions of batches; an elastic program loads the rows of its slots itself."""

    def iterate(self, position: Position | None = None) -> Any:
        position = position or Position(epoch=0, index=0)
        while True:
            position = self.batches.advance(position)
            yield None, position
