"""Run one island of an elastic run: the member decides, the caller's program computes. Next: `member.py`.

The thread of the caller computes; a second one has the member, its sockets and the run folder, so that it
answers the others while the first one computes.
"""

import json
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import jax
import numpy as np

from shardtrain.elastic import engine
from shardtrain.elastic.epoch import Epoch, Peer
from shardtrain.elastic.frames import Lost, Received, UnexpectedFrame
from shardtrain.elastic.ledger import is_valid_checkpoint
from shardtrain.elastic.member import Member, Membership, Phase
from shardtrain.elastic.messages import Chunk, Update, from_header, from_json, to_header, to_json
from shardtrain.elastic.run_files import RunFiles, SavedCheckpoint
from shardtrain.elastic.sockets import Transport
from shardtrain.system.untrusted_files import parse_json

TICK_SECONDS = 1.0
KEPT_CHECKPOINTS = 2
MOST_PARTS = 4096
"""Largest number of parts of a sum that are read: of members of a run."""

Arrays = list[np.ndarray]


class Program(Protocol):
    """What the islands train together; it must not depend on who is there.

    Attributes:
      state: all that a step changes, a tree of arrays with the same shapes and dtypes on all islands.
    """

    state: Any

    def compute(self, step: int, slots: Sequence[int]) -> Any:
        """Return the sum over some slots of the batch of a step, added in this order.

        It is a tree of arrays: gradients, losses and counts. The first call, of slot 0 of step 0, is before
        the island joins, so that others do not wait for a compilation.
        """
        ...

    def apply(self, step: int, total: Any) -> None:
        """Set the state after a step, given the sum over all slots."""
        ...

    def save(self, folder: Path) -> None:
        """Save the state into a new folder."""
        ...

    def restore(self, folder: Path) -> None:
        """Set the state that `save` wrote."""
        ...


class FlatSum:
    """A sum of arrays, each cut into chunks; an `OwnSum` and a `Sum` of `ring.py`.

    Args:
      arrays: contiguous.
      num_chunks: number of chunks.
    """

    def __init__(self, arrays: Arrays, num_chunks: int = 1) -> None:
        self.arrays, self.num_chunks = arrays, num_chunks

    def copy(self, num_chunks: int) -> "FlatSum":
        return FlatSum([x.copy() for x in self.arrays], num_chunks)

    def chunk(self, index: int) -> "Part":
        # a copy: the sockets read it later, when it may have been replaced
        arrays = [x.copy() for x in cut_chunk(self.arrays, index, self.num_chunks)]
        return Part(arrays, index, self.num_chunks)

    def add(self, index: int, payload: "Part") -> None:
        for mine, theirs in self._match(index, payload):
            mine += theirs

    def replace(self, index: int, payload: "Part") -> None:
        for mine, theirs in self._match(index, payload):
            mine[...] = theirs

    def _match(self, index: int, payload: "Part") -> Iterable[tuple[np.ndarray, np.ndarray]]:
        if (payload.index, payload.num) != (index, self.num_chunks):
            raise ValueError(
                f"part {payload.index} of {payload.num} of a sum was sent where part {index} of"
                f" {self.num_chunks} is due; all islands must run the same version"
            )
        return zip(cut_chunk(self.arrays, index, self.num_chunks), payload.arrays, strict=True)


@dataclass(frozen=True, eq=False)
class Part:
    """Part `index` of `num` equal parts of each array of a sum."""

    arrays: Arrays
    index: int = 0
    num: int = 1


def cut_chunk(arrays: Arrays, index: int, num_chunks: int) -> Arrays:
    """Return a chunk of each array, views of it.

    >>> [len(cut_chunk([np.zeros(7)], index, 3)[0]) for index in range(3)]
    [2, 2, 3]
    """
    found = []
    for x in arrays:
        flat = x.reshape(-1)
        found.append(flat[index * flat.size // num_chunks : (index + 1) * flat.size // num_chunks])
    return found


@dataclass(frozen=True, eq=False)
class StateArrived:
    """The state of a donor."""

    peer: str
    step: int
    arrays: Arrays


def copy_leaves(tree: Any) -> Arrays:
    """Return contiguous copies of the arrays of a tree, in the memory of the host."""
    return [np.array(x, order="C") for x in jax.tree.leaves(tree)]


def parse_epoch(content: bytes) -> Epoch:
    """Return the epoch of a file.

    Raises:
      ValueError: the file has another form.
    """
    return from_json(parse_json(content.decode()), Epoch, "epoch")


def read_epoch(files: RunFiles, number: int) -> Epoch:
    """Return an epoch of a run, which exists."""
    return parse_epoch(files.wait_for(number))


def list_epochs(files: RunFiles) -> list[Epoch]:
    """Return all epochs of a run, in order."""
    return [read_epoch(files, number) for number in range(1, files.newest() + 1)]


def list_valid_checkpoints(files: RunFiles) -> list[SavedCheckpoint]:
    """Return the checkpoints from which the run can go on, by step: of chiefs that were not left behind."""
    epochs = list_epochs(files)
    found = [each for each in files.list_checkpoints() if each.epoch <= len(epochs)]
    return [each for each in found if is_valid_checkpoint(epochs, each.step, each.epoch)]


class ElasticIsland:
    """One island of an elastic run: the same losses as one process alone, whoever comes and goes.

    Args:
      folder: the run folder, which all islands share.
      program: what it trains.
      options: options of the run, equal on all islands.
      save_every: number of steps between checkpoints. None saves at the end and where the run waits.
      host: the address at which others reach this one. None takes that of the default route.
      patience_seconds: a member that is silent for longer is let go by the others.
      report: receives a line for each change of members.

    Attributes:
      find_digest: called with a step before it is applied; returns the digest of the program's parameters,
        KIND/HASH, or "" to compare none; see `epoch.find_wrong`. Those that differ are let go by the others.
    """

    def __init__(
        self,
        folder: Path,
        program: Program,
        options: Membership,
        *,
        save_every: int | None = None,
        host: str | None = None,
        patience_seconds: float = 10.0,
        report: Callable[[str], None] = print,
    ) -> None:
        self._program, self._save_every, self._num_slots = program, save_every, options.num_slots
        self._report, self._closing = report, False
        self._files = RunFiles(folder / "elastic")
        # what can fail comes before the sockets
        newest = self._files.newest()
        epoch = self._check(read_epoch(self._files, newest)) if newest else None
        sums, self._sum_tree = jax.tree.flatten(program.compute(0, (0,)))
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._sockets = Transport(
            name, self._files, self._expect, host=host, patience_seconds=patience_seconds
        )
        me = Peer(name=name, address=self._sockets.address, key=self._sockets.public_key)
        self.member = Member(me, options, epoch)
        states, self._state_tree = jax.tree.flatten(program.state)
        self._sum_like, self._state_like = (
            [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in each] for each in (sums, states)
        )
        self._own: tuple[int, Arrays] = -1, []
        self._checkpoint: SavedCheckpoint | None = None
        self._is_dealt = False
        self._initial: Arrays | None = None
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._work: SimpleQueue[Any] = SimpleQueue()
        self.find_digest: Callable[[int], str] = lambda step: ""

    def wish(self, wish: engine.Wish) -> None:
        """Tell the members what this island wants, which happens after a step; any thread may call it."""
        self._post(wish)

    def run(self) -> str:
        """Train until the run ends or this island is no member any more; return the outcome (`engine.Over`).

        On SIGTERM or Ctrl-C the island leaves after its step, and the others repeat nothing; the last one
        saves. A second signal ends it at once.
        """
        before: dict[int, Any] = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

        def leave(number: int, _: Any) -> None:
            signal.signal(number, before[number])
            self.wish(engine.Wish(leaves=True))

        for number in before:
            signal.signal(number, leave)
        if self.member.number:
            self._report(
                f"joins a run of {len(self.member.names)} islands; if none answers for"
                f" {self.member.options.found_seconds:g} s, continues from the newest checkpoint"
            )
        thread = threading.Thread(target=self._serve, name="elastic member")
        thread.start()
        try:
            while not isinstance(work := self._work.get(), engine.Over):
                if isinstance(work, BaseException):
                    raise work
                self._do(work)
            return work.outcome
        finally:
            self._closing = True
            self._sockets.wake()
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Close the sockets of an island that was never run."""
        self._sockets.close()

    # -- the thread that computes --------------------------------------------------------------------------

    def _do(self, work: Any) -> None:
        match work:
            case engine.Compute(step, slots):
                self._compute(step, slots)
            case engine.Apply(step, _, total):
                self._program.apply(step, jax.tree.unflatten(self._sum_tree, total.arrays))
                self._post(engine.Applied(step))
            case engine.SendState(peer, step):
                # copies: they are sent while later steps change the state in place
                arrays = copy_leaves(self._program.state)
                self._post(StateArrived(peer, step, arrays))
            case StateArrived(peer, step, arrays):
                if self._initial is None:
                    # without a checkpoint a run that all others have left is founded at its begin
                    self._initial = copy_leaves(self._program.state)
                self._program.state = jax.tree.unflatten(self._state_tree, arrays)
                self._post(engine.StateReceived(peer, step))
            case engine.Restore():
                if self._checkpoint is not None:
                    self._program.restore(self._checkpoint.folder)
                elif self._initial is not None:
                    self._program.state = jax.tree.unflatten(self._state_tree, self._initial)
            case engine.Write(step):
                self._write(step)

    def _compute(self, step: int, slots: tuple[int, ...]) -> None:
        self._initial = None
        if self._save_every and (step + 1) % self._save_every == 0:
            self.wish(engine.Wish(saves=True))
        if self._own[0] != step:
            self._own = step, [np.zeros(x.shape, x.dtype) for x in self._sum_like]
        began = time.monotonic()
        if slots:
            found = jax.tree.leaves(self._program.compute(step, slots))
            for mine, new in zip(self._own[1], found, strict=True):
                mine += np.asarray(new)
            speed = round(1000 * len(slots) / max(time.monotonic() - began, 1e-6))
            self.wish(engine.Wish(speed=max(1, speed), deals=not self._is_dealt))
            self._is_dealt = True
        self._post(engine.Computed(step, slots, FlatSum(self._own[1]), self.find_digest(step)))

    def _write(self, step: int) -> None:
        with self._files.new_checkpoint() as folder:
            self._program.save(folder)
            # read after the state is written: a chief that was left behind meanwhile commits nothing
            number = self.member.fence
            if number is None or not self._files.commit_checkpoint(number, step, folder):
                self._report(f"step {step} is not saved: the members changed meanwhile")
                self.wish(engine.Wish(saves=True))
                return
        for old in list_valid_checkpoints(self._files)[:-KEPT_CHECKPOINTS]:
            shutil.rmtree(old.folder, ignore_errors=True)

    # -- the thread of the member --------------------------------------------------------------------------

    def _post(self, event: Any) -> None:
        self._events.put(event)
        self._sockets.wake()

    def _serve(self) -> None:
        try:
            ticked = -TICK_SECONDS
            while self.member.phase is not Phase.OVER and not self._closing:
                if time.monotonic() >= ticked + TICK_SECONDS:
                    ticked = time.monotonic()
                    self._tell(engine.Tick(self._show_life()))
                for found in self._sockets.receive(TICK_SECONDS / 4):
                    self._take(found)
                while not self._events.empty():
                    event = self._events.get()
                    if isinstance(event, StateArrived):
                        self._sockets.send(event.peer, {"state": event.step}, event.arrays)
                    else:
                        self._tell(event)
        except BaseException as error:
            self._work.put(error)
        finally:
            self._sockets.close()

    def _show_life(self) -> float:
        if self.member.phase is Phase.JOIN:
            return self._files.idle_seconds()
        self._files.touch_alive(self.member.me.name)
        return 0.0

    def _take(self, found: Received | Lost) -> None:
        if isinstance(found, Lost):
            self._report(f"{found.peer}: {found.reason}")
            self._tell(engine.Lost(found.peer, found.closed))
        elif "state" in found.header:
            # one that was the donor before may still send its state, which is older
            if self.member.phase is Phase.JOIN and found.peer == self.member.donor:
                self._work.put(StateArrived(found.peer, found.header["state"], list(found.buffers)))
        else:
            message, part = from_header(found.header["message"]), found.header["part"]
            payload = Part(list(found.buffers), *part) if part else None
            self._tell(engine.Received(found.peer, message, payload))

    def _expect(self, peer: str, header: dict[str, Any]) -> Arrays:
        """Return the arrays that a message fills; see `Transport`."""
        if header.keys() == {"state"} and type(header["state"]) is int and header["state"] >= 0:
            return [np.empty(x.shape, x.dtype) for x in self._state_like]
        if header.keys() != {"message", "part"}:
            raise UnexpectedFrame(f"a header with {', '.join(map(str, header))[:80]}")
        message, part = from_header(header["message"]), header["part"]
        if not isinstance(message, Chunk | Update):
            part = [0, 0] if part is None else part
        if not (isinstance(part, list) and [type(each) for each in part] == [int, int]):
            raise UnexpectedFrame(f"part {str(part)[:80]} of a sum; it is two numbers")
        if part == [0, 0] and header["part"] is None:
            return []
        index, num = part
        if not 0 <= index < num <= MOST_PARTS:
            raise UnexpectedFrame(f"part {index} of {num} of a sum of at most {MOST_PARTS}")
        shapes = [np.broadcast_to(np.zeros((), x.dtype), x.size) for x in self._sum_like]
        like = cut_chunk(shapes, index, num) if isinstance(message, Chunk) else self._sum_like
        return [np.empty(x.shape, x.dtype) for x in like]

    def _check(self, epoch: Epoch) -> Epoch:
        """Return an epoch of a run with the slots of this island; others would be other rows of a batch."""
        if epoch.num_slots != self._num_slots:
            raise ValueError(
                f"this island has num_slots={self._num_slots}, and the run in {self._files.folder} has"
                f" {epoch.num_slots}; use num_slots={epoch.num_slots}, or another run folder"
            )
        return epoch

    def _tell(self, event: engine.Event) -> None:
        before = self.member.epoch
        effects, new = self.member.handle(time.monotonic(), event), self.member.epoch
        if new is not None and new is not before:
            self._check(new)
        for effect in effects:
            self._perform(effect)
        if new is not None and new is not before:
            self._report(f"epoch {new.number} from step {new.step}: {len(new.members)} islands; {new.why}")

    def _perform(self, effect: engine.Effect) -> None:
        match effect:
            case engine.Send(peer, message, payload):
                part = [payload.index, payload.num] if isinstance(payload, Part) else [0, 1]
                header = {"message": to_header(message), "part": None if payload is None else part}
                self._sockets.send(peer, header, () if payload is None else payload.arrays)
            case engine.Connect(peers):
                self._sockets.connect(peers)
            case engine.Look(number):
                if (newest := self._files.newest()) >= number:
                    self._events.put(engine.Seen(read_epoch(self._files, newest)))
            case engine.Propose(epoch):
                content = self._files.propose(epoch.number, json.dumps(to_json(epoch)).encode())
                self._events.put(engine.Seen(parse_epoch(content)))
            case engine.Note(text):
                self._report(text)
            case engine.FindCheckpoint():
                self._checkpoint = next(reversed(list_valid_checkpoints(self._files)), None)
                self._events.put(engine.Checkpoint(self._checkpoint.step if self._checkpoint else 0))
            case _:
                self._work.put(effect)
