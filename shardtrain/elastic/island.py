"""Run one island of an elastic run: the member decides, the caller's program computes. Next: `member.py`.

The thread of the caller computes; a second one has the member, its sockets and the run folder, so that it
answers the others while the first one computes.
"""

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any, Self

import jax
import numpy as np

from shardtrain.elastic import engine
from shardtrain.elastic.epoch import Epoch, Peer, find_next
from shardtrain.elastic.epoch_files import list_epochs, parse_epoch, read_epoch
from shardtrain.elastic.flat_sum import Arrays, FlatSum, Part, cut_chunk
from shardtrain.elastic.folder_checkpoints import FolderCheckpoints, SavedProgram
from shardtrain.elastic.frames import Lost, Received, UnexpectedFrame
from shardtrain.elastic.history import ELASTIC
from shardtrain.elastic.ledger import count_batches
from shardtrain.elastic.member import Member, Membership, Phase
from shardtrain.elastic.messages import Chunk, Update, from_header, to_header, to_json
from shardtrain.elastic.program import IslandCheckpoints, Program, copy_leaves, make_packing
from shardtrain.elastic.run_files import RunFiles
from shardtrain.elastic.sockets import LEAST_WAITING_BYTES, Transport

TICK_SECONDS = 1.0
POLL_SECONDS = 0.5
MEASURED_STEPS, MEASURED_SECONDS, SPEED_RATIO = 32, 30.0, 1.5
"""Slots are dealt anew if the median speed of so many steps, and seconds, is another by this ratio."""

CHECKED = {"batch": "--elastic.batch", "num_slots": "--elastic.slots", "every": "--local-steps"}
"""Option of a run that cannot change -> its name in `train`."""

MOST_PARTS = 4096
"""Largest number of parts of a sum that are read: of members of a run."""


@dataclass(frozen=True, eq=False)
class StateArrived:
    """The state of a donor."""

    peer: str
    step: int
    arrays: Arrays


class ElasticIsland:
    """One island of an elastic run: the same losses as one process alone, whoever comes and goes.

    Iterate over it to train; it yields the number of steps done after each exchange since it joined:

        with ElasticIsland(folder, program, options) as island:
            for step in island:
                ...
        print(island.outcome)

    On SIGTERM or Ctrl-C the island leaves after its step, and the others repeat nothing; the last one saves.
    A second signal ends it at once.

    Args:
      folder: the run folder, which all islands share.
      program: what it trains.
      options: options of the run, equal on all islands.
      checkpoints: where the chief saves. None takes `FolderCheckpoints`, for which the program must be a
        `SavedProgram`.
      save_every: number of steps between checkpoints. None saves at the end and where the run waits.
      host: the address at which others reach this one. None takes that of the default route.
      patience_seconds: a member that is silent for longer is let go by the others.
      report: receives a line for each change of members, on the thread that iterates.

    Attributes:
      member: the protocol's state.
      outcome: see `engine.Over`; "" before the end.
      wants_to_leave: asked about twice a second; once it returns True, the island leaves.
      find_digest: called with a step before it is applied; returns the digest of the program's parameters,
        KIND/HASH, or "" to compare none; see `epoch.find_wrong`. Those that differ are let go by the others.
    """

    def __init__(
        self,
        folder: Path,
        program: Program,
        options: Membership,
        *,
        checkpoints: IslandCheckpoints | None = None,
        save_every: int | None = None,
        host: str | None = None,
        patience_seconds: float = 10.0,
        report: Callable[[str], None] = print,
    ) -> None:
        self._program, self._save_every, self._options = program, save_every, options
        self._report, self._closing = report, False
        self.files = RunFiles(folder / ELASTIC)
        # what can fail comes before the sockets
        newest = self.files.newest()
        epoch = self._check(read_epoch(self.files, newest)) if newest else None
        grows = options.batch == "members"
        first = (range(2), range(2)) if grows else (range(min(2, options.num_slots)),)
        sums, self._sum_tree = jax.tree.flatten(program.compute(0, *first))
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self._sockets = Transport(
            name, self.files, self._expect, host=host, patience_seconds=patience_seconds
        )
        me = Peer(name=name, address=self._sockets.address)
        self.member = Member(me, options, epoch)
        if checkpoints is None:
            assert isinstance(program, SavedProgram), "give checkpoints, or a program with save and restore"
            checkpoints = FolderCheckpoints(self.files, program, self.member)
        self._checkpoints = checkpoints
        states, self._state_tree = jax.tree.flatten(program.state)
        self._state_like = [jax.ShapeDtypeStruct(np.shape(x), x.dtype) for x in states]
        self._packing = make_packing(program, sums)
        # while its state arrives, one that can catch up at all misses no more sums than the state has bytes
        num_bytes = sum(x.size * x.dtype.itemsize for x in self._state_like)
        self._sockets.most_waiting_bytes = max(4 * num_bytes, LEAST_WAITING_BYTES)
        self._own: tuple[int, Arrays] = -1, []
        self._speeds: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._dealt_seconds = 0.0
        self._was_asked = False
        self._initial: Arrays | None = None
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._next: Any = None
        self._thread = threading.Thread(target=self._serve, name="elastic member")
        self._handlers: dict[int, Any] = {}
        self.outcome = ""
        self.wants_to_leave: Callable[[], bool] = lambda: False
        self.find_digest: Callable[[int], str] = lambda step: ""

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._handlers[number] = signal.signal(number, self._leave_on_signal)
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __iter__(self) -> Iterator[int]:
        """Yield the number of steps done after each step."""
        while (step := self.advance()) is not None:
            yield step

    def start(self) -> None:
        """Begin to look for the other members."""
        if self.member.number:
            self._report(
                f"joins the run; if no island answers for {self.member.options.found_seconds:g} s, continues"
                " from the newest checkpoint"
            )
        self._thread.start()

    def join(self) -> int | None:
        """Wait until this island is a member with the state of the others.

        Returns:
          The number of steps done; None if it is over before.
        """
        while not isinstance(work := self._take_work(), engine.Compute):
            if isinstance(work, engine.Over):
                return None
            self._do(work)
        self._next = work
        return work.step

    def advance(self) -> int | None:
        """Do the next step with the others, after `join` if this island is no member yet.

        Returns:
          The number of steps done; None if it is over, see `outcome`.
        """
        if self.join() is None:
            return None
        while not isinstance(work := self._take_work(), engine.Over):
            self._do(work)
            if isinstance(work, engine.Apply):
                return self._find_next(work.step)
        return None

    def close(self) -> None:
        """End the connections; an island that is not over is lost for the others."""
        self._closing = True
        if self._thread.is_alive():
            self._sockets.wake()
            self._thread.join()
        self._sockets.close()

    def wish(self, wish: engine.Wish) -> None:
        """Tell the members what this island wants, which happens after a step; any thread may call it."""
        self._post(wish)

    # -- the thread that computes --------------------------------------------------------------------------

    def _leave_on_signal(self, number: int, _: Any) -> None:
        signal.signal(number, self._handlers[number])
        self.wish(engine.Wish(leaves=True))

    def _take_work(self) -> Any:
        """Wait for what is to be done next."""
        found, self._next = self._next, None
        while found is None:
            if self.outcome:
                return engine.Over(self.outcome)
            self._ask_to_leave()
            with suppress(Empty):
                found = self._work.get(timeout=POLL_SECONDS)
        if isinstance(found, BaseException):
            raise found
        if isinstance(found, engine.Over):
            self.outcome = found.outcome
        return found

    def _ask_to_leave(self) -> None:
        if self.wants_to_leave():
            self.wants_to_leave = lambda: False
            self.wish(engine.Wish(leaves=True))

    def _do(self, work: Any) -> None:
        match work:
            case str():
                self._report(work)
            case engine.Compute(step, slots, batches):
                self._compute(step, slots, batches)
            case engine.Apply(step, _, total):
                self._program.apply(
                    step, jax.tree.unflatten(self._sum_tree, self._packing.view(total.arrays))
                )
                self._post(engine.Applied(step))
            case engine.SendState(peer, step):
                # copies: they are sent while later steps change the state in place
                arrays = copy_leaves(self._program.state)
                self._post(StateArrived(peer, step, arrays))
            case StateArrived(peer, step, arrays):
                self._checkpoints.check_others()
                self._check_num_steps()
                if self._initial is None:
                    # without a checkpoint a run that all others have left is founded at its begin
                    self._initial = copy_leaves(self._program.state)
                self._program.state = jax.tree.unflatten(self._state_tree, arrays)
                self._post(engine.StateReceived(peer, step))
            case Lost():
                # sums have other sizes if islands have other options
                self._checkpoints.check_others()
            case engine.Revoke(number):
                self._checkpoints.revoke(number)
            case engine.FindCheckpoint():
                step = self._checkpoints.find()
                self._post(engine.Checkpoint(step, self._count_batches(step)))
            case engine.Restore():
                if not self._checkpoints.restore() and self._initial is not None:
                    self._program.state = jax.tree.unflatten(self._state_tree, self._initial)
            case engine.Write(step, is_last):
                if not self._checkpoints.save(step, is_last=is_last):
                    self._report(f"step {step} is not saved: the members changed meanwhile")
                    self.wish(engine.Wish(saves=True))
                if is_last:
                    self._post(engine.Written())

    def _count_batches(self, step: int) -> int | None:
        """Return how many batches the steps before one have read, if that depends on the members."""
        if self._options.batch == "fixed":
            return None
        return count_batches(list_epochs(self.files), step, self.files.list_plain())

    def _compute(self, step: int, slots: tuple[int, ...], batches: range | None) -> None:
        self._initial = None
        if self._save_every and self._find_next(step) // self._save_every > step // self._save_every:
            self.wish(engine.Wish(saves=True))
        if self._own[0] != step:
            self._own = step, self._packing.make_zeros()
        began = time.monotonic()
        if slots:
            given = () if batches is None else (batches,)
            found = jax.tree.leaves(self._program.compute(step, slots, *given))
            for mine, new in zip(self._packing.view(self._own[1]), found, strict=True):
                mine += np.asarray(new)
            self._measure(len(slots) / max(time.monotonic() - began, 1e-6))
        # before its vote of this step, which may follow at once
        self._ask_to_leave()
        self._post(
            engine.Computed(step, slots, FlatSum(self._own[1], self._packing.codecs), self.find_digest(step))
        )

    def _find_next(self, step: int) -> int:
        return find_next(step, self._options.every)

    def _measure(self, slots_per_second: float) -> None:
        """Tell the members the speed of this island; slots are dealt anew where it is another than before."""
        self._speeds.append(slots_per_second)
        speed = max(1, round(1000 * median(self._speeds)))
        dealt = {peer.name: peer.speed for peer in self.member.epoch.members} if self.member.epoch else {}
        before = dealt.get(self.member.me.name, 0)
        is_full = len(self._speeds) == MEASURED_STEPS
        is_long = time.monotonic() > self._dealt_seconds + MEASURED_SECONDS
        deals = not before or (is_full and is_long and not 1 / SPEED_RATIO < speed / before < SPEED_RATIO)
        deals = deals and len(dealt) > 1
        if deals:
            self._speeds.clear()
            self._dealt_seconds = time.monotonic()
        self.wish(engine.Wish(speed=speed, deals=deals))

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
                    self._handle(engine.Tick(self._show_life()))
                for found in self._sockets.receive(TICK_SECONDS / 4):
                    self._take(found)
                while not self._events.empty():
                    event = self._events.get()
                    if isinstance(event, StateArrived):
                        self._sockets.send(event.peer, {"state": event.step}, event.arrays)
                    else:
                        self._handle(event)
        except BaseException as error:
            self._work.put(error)
        finally:
            self._sockets.close()

    def _show_life(self) -> float:
        if self.member.phase is Phase.JOIN:
            return self.files.idle_seconds()
        self.files.touch_alive(name := self.member.me.name)
        if not self._was_asked and self.files.is_asked_to_leave(name):
            self._was_asked = True
            self._work.put(f"{name} is asked to leave")
            self.wish(engine.Wish(leaves=True))
        return 0.0

    def _take(self, found: Received | Lost) -> None:
        if isinstance(found, Lost):
            self._work.put(f"{found.peer}: {found.reason}")
            if found.misfits and self.member.phase is Phase.JOIN:
                self._work.put(found)
            self._handle(engine.Lost(found.peer, found.closed))
        elif "state" in found.header:
            # one that was the donor before may still send its state, which is older
            if self.member.phase is Phase.JOIN and found.peer == self.member.donor:
                self._work.put(StateArrived(found.peer, found.header["state"], list(found.buffers)))
        else:
            message, part = from_header(found.header["message"]), found.header["part"]
            payload = Part(list(found.buffers), *part) if part else None
            self._handle(engine.Received(found.peer, message, payload))

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
        like = self._packing.like
        if isinstance(message, Update):
            return [np.empty(x.shape, x.dtype) for x in like]
        codecs = self._packing.codecs
        parts = zip(codecs, cut_chunk(like, index, num, [codec.block for codec in codecs]), strict=True)
        return [x for codec, part in parts for x in codec.list_arrays(part.size)]

    def _check(self, epoch: Epoch) -> Epoch:
        """Return an epoch of a run with the slots of this island; others would be other rows of a batch."""
        for name, option in CHECKED.items():
            own, found = getattr(self._options, name), getattr(epoch, name)
            if own != found:
                raise ValueError(
                    f"this island has {name}={own}, and the run in {self.files.folder} has {found}; use"
                    f" {name}={found} ({option} {found}), or another run folder"
                )
        return epoch

    def _check_num_steps(self) -> None:
        """Refuse another end than the run has: members would wait for each other there."""
        epoch, own = self.member.epoch, self.member.options.num_steps
        if epoch is not None and epoch.num_steps != (own or 0):
            raise ValueError(
                f"this island has num_steps={own}, and the run in {self.files.folder} has"
                f" {epoch.num_steps or None}; use num_steps={epoch.num_steps or None}, or another run folder"
            )

    def _handle(self, event: engine.Event) -> None:
        before = self.member.epoch
        effects, new = self.member.handle(time.monotonic(), event), self.member.epoch
        if new is not None and new is not before:
            self._check(new)
        for effect in effects:
            self._perform(effect)
        if new is not None and new is not before:
            number = len(new.members)
            missing = 0 if new.stops else self._options.min_members - number
            self._work.put(
                f"epoch {new.number} from step {new.step}: {number} island{'s' * (number > 1)}; {new.why}"
                + (f"; waits for {missing} more" if missing > 0 else "")
            )

    def _perform(self, effect: engine.Effect) -> None:
        match effect:
            case engine.Send(peer, message, payload):
                part = [payload.index, payload.num] if isinstance(payload, Part) else [0, 1]
                header = {"message": to_header(message), "part": None if payload is None else part}
                self._sockets.send(peer, header, () if payload is None else payload.arrays)
            case engine.Connect(peers):
                self._sockets.connect(peers)
            case engine.Look(number):
                if (newest := self.files.newest()) >= number:
                    self._events.put(engine.Seen(read_epoch(self.files, newest)))
            case engine.Propose(epoch):
                content = self.files.propose(epoch.number, json.dumps(to_json(epoch)).encode())
                self._events.put(engine.Seen(parse_epoch(content)))
            case engine.Note(text):
                self._work.put(text)
            case _:
                self._work.put(effect)
