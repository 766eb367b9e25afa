"""The island of a run whose islands come and go, as the training loop uses it.

Each island runs the whole loop of one device, with the same numbers; only gradients are shared out, and only
the chief writes. An island may have several processes, which share a mesh or are the stages of a pipeline:
each runs the loop, and the first one is the member. Next: `elastic/island.py`, `elastic/group.py`.
"""

import json
import os
import re
import socket
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.checkpoints.folders import first_line
from shardtrain.checkpoints.paths import CHECKPOINTS, delete
from shardtrain.checkpoints.policy import is_due
from shardtrain.checkpoints.reader import visible_readers
from shardtrain.data import Batch as HostBatch
from shardtrain.data import Batches, Loader, Position
from shardtrain.elastic.command_file import write_command
from shardtrain.elastic.engine import Wish
from shardtrain.elastic.epoch_files import find_chiefs, list_epochs, read_epoch
from shardtrain.elastic.group import Group, GroupProgram
from shardtrain.elastic.history import ELASTIC, list_members
from shardtrain.elastic.ledger import is_valid_checkpoint
from shardtrain.elastic.member import Membership
from shardtrain.elastic.program import Program
from shardtrain.elastic.run_files import EPOCHS, RunFiles
from shardtrain.functional.loss import Batch
from shardtrain.imported import select_kept_tokens
from shardtrain.islands.agreement import disagreement
from shardtrain.islands.membership import Islands
from shardtrain.islands.network import ADDRESS
from shardtrain.system import terminal
from shardtrain.system.atomic_write import replace_file
from shardtrain.system.excerpts import short
from shardtrain.system.untrusted_files import read_json
from shardtrain.train_step.elastic_exchange import split_codec
from shardtrain.train_step.elastic_program import ElasticProgram
from shardtrain.train_step.elastic_stages import ElasticStages
from shardtrain.train_step.island_compute import Training
from shardtrain.train_step.stage_compute import StageCompute
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics
from shardtrain.trainer.config import Run
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.coordination import LONG_SECONDS
from shardtrain.trainer.resume import StartPoint, find_parameters, leave_out_base
from shardtrain.trainer.run_checkpoints import WALL_SECONDS, RunCheckpoints
from shardtrain.trainer.setup import FIRST_POSITION, RunSetup
from shardtrain.trainer.synchronisation import compute_fingerprints

if TYPE_CHECKING:
    from shardtrain.elastic.island import ElasticIsland

FACTS, MOST_FACTS_BYTES = "facts-{}.json", 1 << 24
NO_METRICS: Metrics = {"loss_sum": 0.0, "count": 0.0, "skipped": 0.0}
"""Of a step before an exchange, which has the metrics of all steps since the last one."""

GATHER_SECONDS = 0.5
"""Time between two questions to the processes of an island whether a signal asked them to leave."""

LOST_CONNECTION = re.compile(r"Gloo|NCCL|Connection (reset|refused|closed)|[Cc]oordination service|heartbeat")
"""What errors of jax say if another process of the mesh is lost."""

ENDED_EARLY = ("excluded", "cut off", "too few", "no state")
"""Outcomes after which the same command joins the run again, or continues it."""


class IslandEnded(Exception):
    """This island is no member any more, or never was; the same command joins the run again."""


class Standing(NamedTuple):
    """The standing of this island among the members, which its first process tells the others.

    Args:
      name: its name.
      epoch: number of the newest epoch.
      is_chief: whether it writes for all.
      outcome: why it is no member any more, see `engine.Over`; "" while it is.
      batches: number of batches that the steps done have read.
    """

    name: str
    epoch: int
    is_chief: bool
    outcome: str
    batches: int


class ElasticRun:
    """This island: the step, checkpoints, and what only the chief does.

    Args:
      run: the run.
      folder: the folder of the run.
      setup: the setup of this island.
      batches: the whole batches.
      output: shows lines to the user.
      group: the processes of this island, each of which has an `ElasticRun`.

    Attributes:
      leads: whether this is the first process of its island.
      stage: what the stage of this process computes; None if the process has the whole model.
      asked: returns what asks this process to leave, see `StopSignals.asked`.
      save_state: saves the state after the newest step, as the loop does it.
      save_if_best: saves it if its evaluation is better than those of all saved steps.
      write_kept_lines: writes the lines of metrics that this island has kept, if it is the chief now.
      command: the words after `shardtrain train`, for islands that `launch --join` starts; () if not known.
      watched: number of steps done and metrics, of steps that this island has watched before it joined: the
        chief may be lost before it has written them.
    """

    def __init__(
        self, run: Run, folder: Path, setup: RunSetup, batches: Batches, output: RunConsole, group: Group
    ) -> None:
        self._group, self.leads, self._told = group, group.leads, Standing("", 0, True, "", 0)
        group.actions |= {
            "set writer": self._set_writer, "take over": self._take_over,
            "restore": self._restore_arrays, "save": self._save_arrays, "fingerprint": self._fingerprint,
            "gather signals": self._gather_signals,
        }  # fmt: skip
        self.stage: StageCompute | None = None
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
        self._asked_others, self._gathered_seconds = 0, 0.0
        self._every, self._done = run.strategy.synchronisation.every, 0
        self.command: Sequence[str] = ()

    @property
    def outcome(self) -> str:
        """Why this island is no member any more, see `engine.Over`; "" while it is."""
        return self._standing.outcome

    @property
    def name(self) -> str:
        """The name of this island, once `join` has been called."""
        return self._standing.name

    @property
    def _standing(self) -> Standing:
        if self._island is None:
            return self._told
        member, outcome = self._island.member, self._island.outcome
        is_chief = member.fence is not None if outcome else member.is_chief
        batches = self._count_batches(self._done)
        return Standing(member.me.name, member.number, is_chief, outcome, batches)

    def _lead(self, work: Callable[[], Any]) -> Any:
        """Do what decides about this island on its first process; return the result on all of them."""
        try:
            found, told = self._group.run(lambda: [work(), list(self._standing)])
        except jax.errors.JaxRuntimeError as error:
            if self._group.channel is None or not LOST_CONNECTION.search(str(error)):
                raise
            raise IslandEnded(f"a process of this island is lost: {first_line(error)}") from error
        self._told = Standing(*told)
        return found

    @property
    def island(self) -> "ElasticIsland":
        """The island, once `join` has been called."""
        assert self._island is not None
        return self._island

    def find_asked(self) -> int:
        """Return what asks this island to leave, at any of its processes, see `StopSignals.asked`; or 0."""
        return self.asked() or self._asked_others

    def is_chief(self) -> bool:
        """Whether this island writes for all; True before it joins, when nothing is written."""
        return self._standing.is_chief

    def may_save(self) -> bool:
        """Return whether this island has taken over, and is the chief by the run folder too.

        One that slept does not know of a newer chief.
        """
        if not (self._has_taken_over and self.is_chief()):
            return False
        newest = self._files.newest()
        if self.leads:
            return newest == self.island.member.number
        # who is the chief of an epoch was that of all before since it joined
        return read_epoch(self._files, newest).names[0] == self.name

    def may_write(self) -> bool:
        """Return whether this process writes what is not an array for all."""
        return self.leads and self.may_save()

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
        self._program = self._make_program(init())
        trained: Program = self._program
        if self._group.channel is not None:
            whole = NamedSharding(self._setup.mesh, PartitionSpec()) if self.stage is None else None
            trained = GroupProgram(self._group, trained, whole)
        is_over, self._done = self._lead(lambda: self._join(trained))
        self._output.release(self.is_chief() and self.leads, self.name)
        if is_over and self.outcome != "stopped":
            raise IslandEnded(f"this island did not join the run in {self._folder}: {self.outcome}")
        for done, metrics in self._program.recent:
            # as `step` returns them, of the steps until an exchange
            first = (done - 1) // self._every * self._every + 1
            self.watched += [*((each, NO_METRICS) for each in range(first, done)), (done, metrics)]
        self._was_chief = self.is_chief()
        return StartPoint(
            state=self._program.state,
            step=self._done,
            position=self._program.find_position(self._standing.batches),
            # the clock of the run continues, whoever joins
            extra={WALL_SECONDS: time.time() - self._files.begun(), **self._extra},
        )

    def _make_program(self, state: State) -> ElasticProgram | ElasticStages:
        run, batches, slots = self._run, self._batches, self.num_slots
        if self.stage is None:
            return make_program(run, self._setup, batches, slots, state)
        codec, _ = split_codec(run.strategy.synchronisation)
        return ElasticStages(self.stage, batches, slots, run.strategy.accumulate // slots, state, codec)

    def _join(self, trained: Program) -> tuple[bool, int]:
        """Make the island, and wait until it is a member; return whether it is over, and the steps done."""
        self._island = island = self._make_island(trained)
        name = island.member.me.name
        self._group.ask("set writer", name)
        device = self._setup.mesh.devices.flat[0]
        processes = 1 if self._group.channel is None else self._group.channel.size
        own = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "mesh": dict(self._setup.mesh.shape),
            "processes": processes,
            "stages": 1 if self.stage is None else processes,
            "device": device.device_kind,
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
            "started": time.time(),
        }
        self._files.describe_member(name, own)
        island.start()
        step = island.join()
        self._done = island.member.step if step is None else step
        return step is None, self._done

    def _make_island(self, trained: Program) -> "ElasticIsland":
        from shardtrain.elastic.island import ElasticIsland  # a library that other runs need not have

        run = self._run
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
            trained,
            options,
            checkpoints=self,
            host=os.environ.get(ADDRESS),
            patience_seconds=run.elastic.patience_seconds,
            report=self._report,
        )
        island.wants_to_leave = self._wants_to_leave
        island.find_digest = self._find_digest
        return island

    def _wants_to_leave(self) -> bool:
        """Ask all processes of this island, seldom, whether a signal asked them to leave."""
        now = time.monotonic()
        if self.asked() or now > self._gathered_seconds + GATHER_SECONDS:
            self._gathered_seconds = now
            self._group.ask("gather signals")
        return bool(self._asked_others)

    def _gather_signals(self) -> None:
        self._asked_others = max(self._group.all_gather("asked to leave", self.asked()))

    def step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Do the next step with the other islands; the state and the batch are those of the program.

        With local steps the last one before an exchange does them all; the state does not change before.

        Raises:
          IslandEnded: this island is no member any more.
        """
        is_last = (self._done + 1) % self._every == 0
        if self._lead(lambda: self._advance(is_last)):
            raise IslandEnded(self.outcome)
        self._done += 1
        self._show()
        return self._program.state, self._program.metrics if is_last else NO_METRICS

    def _advance(self, is_last: bool) -> bool:
        """Do the next step, the last one before an exchange or not; return whether this island is over."""
        island, is_chief = self.island, self.is_chief()
        seconds = time.monotonic() - self._saved_seconds if is_chief else 0.0
        # the chief before may have been lost while it saved
        is_new = is_chief and not self._was_chief
        self._was_chief = is_chief
        if is_new or is_due(self._run.checkpoints, self._done + 1, seconds):
            island.wish(Wish(saves=True))
        # what follows the last exchange is done before the first of the local steps
        return (island.advance() if is_last else island.join()) is None

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

        def wait() -> None:
            while self.island.advance() is not None:
                pass

        self._lead(wait)
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
        alone = self._checkpoints.checkpoints.discover(gather=lambda _, look: [look(0)])
        return alone.step or 0

    def _drop_void(self) -> None:
        """Delete checkpoints of a past that was left behind, as readers know no epochs, and parts of one."""
        epochs = list_epochs(self._files)

        def is_valid(step: int, saved: Any) -> bool:
            number = saved.get("epoch") if isinstance(saved, dict) else None
            if type(number) is not int or not 1 <= number <= len(epochs):
                return number is None  # of a run that was not elastic then
            return is_valid_checkpoint(epochs, step, number)

        for each in visible_readers(self._folder / CHECKPOINTS):
            # a chief that trains, or another founder, may delete the same one meanwhile; damage is reported
            # by `discover`
            with suppress(ValueError, FileNotFoundError):
                if each.missing or not is_valid(each.step, each.extra.get(ELASTIC)):
                    for folder in each.folders.values():
                        delete(folder)

    def revoke(self, number: int) -> None:
        """Take over the checkpoints from the chiefs before an epoch, which can finish no save after this."""
        checkpoints, self._has_taken_over = self._checkpoints.checkpoints, True
        checkpoints.revoke(lambda names: find_chiefs(self._files, names, number))
        self._group.ask("take over", self._standing)

    def _take_over(self, standing: Sequence[Any]) -> None:
        """Do what each process of a new chief does."""
        self._told, self._has_taken_over = Standing(*standing), True
        if not self.leads:
            # the values of evaluations; the first process has ended what was not finished
            self._checkpoints.checkpoints.revoke(lambda names: set())
        # the chief before may have been lost after an evaluation, before it saved all parts of its step
        is_saved = self._done in self._checkpoints.checkpoints.steps()
        if not all(self._group.all_gather("a part is saved", is_saved)):
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
        start = self._group.ask("restore")
        expected = self._program.find_position(self._count_batches(start.step))
        if start.position != expected:
            raise ValueError(
                f"the checkpoint of step {start.step} continues at {start.position} of the data, and with"
                f" islands that come and go step {start.step} is at {expected}: the batch or the data has"
                " changed, or a rollback skipped data. Use those of before, or continue without --elastic"
            )
        return True

    def _restore_arrays(self) -> StartPoint:
        """Restore the arrays of this process; all of the island do."""
        self._program.state = None
        start = self._find_start()
        self._program.state, self._extra = start.state, start.extra
        return start

    def _set_writer(self, name: str) -> None:
        checkpoints = self._checkpoints.checkpoints
        checkpoints.set_writer(name, self.may_save)
        # parts of one save have this in common
        checkpoints.save_id = name

    def save(self, step: int, *, is_last: bool) -> bool:
        """Save the state after a step; return False if members changed meanwhile."""
        if not self.may_write():
            return False
        self._group.ask("save", self._standing, is_last)
        return True

    def _save_arrays(self, standing: Sequence[Any], is_last: bool) -> None:
        self._told = Standing(*standing)
        self.save_arrays(is_last=is_last)

    def save_arrays(self, *, is_last: bool = False) -> None:
        """Save the arrays of this process after the newest step; all of the island do."""
        self._saved_seconds = time.monotonic()
        self._show()
        # a run that continues from it does not repeat its steps
        self.write_kept_lines()
        self.save_state()
        if is_last:
            self._checkpoints.settle()

    def saved(self) -> dict[str, Any]:
        """Return the entries of a checkpoint about the membership, and the position after the newest step."""
        standing = self._standing
        return {
            ELASTIC: {"epoch": standing.epoch},
            "position": self._program.find_position(standing.batches),
        }

    def _count_batches(self, step: int) -> int:
        """Return the number of batches before a step of the newest epoch, or before its first one."""
        epoch = self.island.member.epoch
        batches = None if epoch is None else epoch.find_batches(step)
        return step if batches is None else batches.start

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
            str([found.get(name, {}).get(key) for key in ("mesh", "processes", "device", "cores")])
            for name in self.island.member.names
        }
        if len(kinds) != 1:
            return ""
        return f"{kinds.pop()}/{self._group.ask('fingerprint'):08x}"

    def _fingerprint(self) -> int:
        """Return a number for the bits of all parameters of this island; all of its processes do this."""
        prints = np.asarray(compute_fingerprints(self._program.state.params)).tolist()
        return zlib.crc32(str(self._group.all_gather("fingerprints", prints)).encode())

    def _show(self) -> None:
        """Let only the chief print steps and notes."""
        self._output.show(self.is_chief() and self.leads, self.name)

    def _report(self, text: str) -> None:
        """Show a line about the members: the chief all of them, others those about themselves."""
        name = self.name
        self._show()
        if "; waits for " in text:
            # at once: the rest of the output may be held until this island trains
            terminal.err(f"{name}: {text}\n")
        elif self.is_chief():
            self._output.note(text)
        elif text.startswith("joins ") or name in text:
            terminal.err(f"{name}: {text}\n")


class ProcessChannel:
    """Connects the processes of an island by MPI, see `elastic.group.Channel`; a collective call.

    Args:
      islands: the processes that were launched together.
    """

    def __init__(self, islands: Islands) -> None:
        self.rank, self.size = islands.environment.rank, islands.environment.size
        self._control, self._mailbox = islands.control, islands.mailbox(0, self.rank, LONG_SECONDS)

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the JSON values of all processes."""
        return self._control.all_gather(name, value, LONG_SECONDS)

    def send(self, array: np.ndarray, to: int) -> None:
        """Send an array, which is not changed afterwards."""
        self._mailbox.send(array, to, 0)

    def receive(self, shape: tuple[int, ...], dtype: Any, source: int) -> np.ndarray:
        """Receive an array."""
        return self._mailbox.receive(shape, dtype, source, 0, "an array of the elastic exchange")

    def close(self) -> None:
        """End the thread that sends."""
        self._mailbox.close()


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
