"""One island of an elastic run as a state machine: events in, effects out, no I/O (`engine.py` lists both).

A step is a transaction: all members hold its whole sum before one of them applies it. Members change from
epoch to epoch only (`epoch.py`), in which the survivors of a death agree whether the step counts.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardtrain.elastic.engine import (
    Applied,
    Apply,
    Checkpoint,
    Compute,
    Computed,
    Connect,
    Effect,
    Event,
    FindCheckpoint,
    Look,
    Lost,
    Note,
    Over,
    Propose,
    Received,
    Restore,
    Revoke,
    Seen,
    Send,
    SendState,
    StateReceived,
    Tick,
    Wish,
    Write,
    Written,
)
from shardtrain.elastic.epoch import BatchRule, Epoch, Peer, Report, find_wrong, found_epoch, next_epoch
from shardtrain.elastic.messages import Announce, Bye, Chunk, Join, Message, Update, Vote
from shardtrain.elastic.ring import OwnSum, Ring

ENDED_SECONDS = 10.0
"""Time without a sign of life after which members whose ports refuse have ended."""


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Options of an elastic run, equal on all islands.

    Args:
      num_slots: number of equal parts of a batch, which members share.
      num_steps: number of steps of the run. None trains until a member wishes to stop. An island that joins
        must have that of the founder.
      every: number of steps between exchanges, see `Epoch`; `num_steps` is a multiple of it.
      batch: "members" lets a step read a batch for each member; then `every` is 1.
      min_members: with fewer, members save and wait for joiners.
      max_members: further islands watch, and take the place of one that is lost. None has no limit.
      wait_seconds: longest time with fewer members than that.
      minority_seconds: members that may be the smaller side of a cut network wait this long before they
        propose an epoch.
      found_seconds: with no sign of a living member for this long, a joiner continues from a checkpoint;
        longer than a shared folder may hide what is new. A joiner that lacks a connection to a member gives
        up after twice this time.
    """

    num_slots: int
    num_steps: int | None = None
    every: int = 1
    batch: BatchRule = "fixed"
    min_members: int = 1
    max_members: int | None = None
    wait_seconds: float = 600.0
    minority_seconds: float = 10.0
    found_seconds: float = 90.0


class Phase(Enum):
    """What a member is doing."""

    JOIN = "watches, until an epoch names it"
    STEP = "computes and exchanges a step"
    CHANGE = "has promised to apply nothing, until the next epoch"
    STOP = "has applied the last step, until all have"
    OVER = "is no member any more"


class Member:
    """An island, from its wish to join until it is over.

    Args:
      me: this island.
      options: options of the run.
      newest: the newest epoch in the folder; None before the first.
    """

    def __init__(self, me: Peer, options: Membership, newest: Epoch | None) -> None:
        self.me, self.options = me, options
        self.epoch = newest
        self.phase, self.outcome = Phase.JOIN, ""
        self.step = -1  # number of steps applied; -1 without state
        self._now = 0.0
        self._effects: list[Effect] = []
        self._next: Epoch | None = None
        self._lost: set[str] = set()
        self._closed: set[str] = set()
        self._inbox: dict[tuple[Any, ...], tuple[Any, Any]] = {}
        self._speed, self._excluded = me.speed, set[str]()
        self._saves = self._stops = self._leaves = self._deals = False
        # as a joiner
        self._donor, self._updates, self._applied = me, dict[int, tuple[int, Any]](), -1
        self._join: Join | None = None
        self._ready, self._founds = False, -1
        self._cut_since: float | None = None
        # for joiners
        self._joins: dict[str, Join] = {}
        self._watchers: set[str] = set()
        # a step
        self._asked: tuple[int, ...] | None = None
        self._done: set[int] = set()
        self._own: OwnSum | None = None
        self._ring: Ring | None = None
        self._vote: Vote | None = None
        self._digest = ""
        # a change
        self._report: Report | None = None
        self._since = 0.0
        self._proposed = self._stopping = self._has_said_bye = self._is_writing = False
        self._few_since: float | None = None
        if newest is not None:
            self._connect()

    # -- what others see ----------------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Number of the newest epoch that this island knows; 0 before the first."""
        return self.epoch.number if self.epoch else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Members of that epoch, oldest first."""
        return self.epoch.names if self.epoch else ()

    @property
    def others(self) -> list[str]:
        """The other members of that epoch."""
        return [name for name in self.names if name != self.me.name]

    @property
    def donor(self) -> str:
        """The member whose state and sums a joiner takes; this island itself before it knows one."""
        return self._donor.name

    @property
    def is_chief(self) -> bool:
        """Whether this is the oldest member, which writes for all."""
        return self.phase is not Phase.JOIN and self.names[0] == self.me.name

    @property
    def fence(self) -> int | None:
        """The epoch under which this island may commit a checkpoint now; None: not now.

        The name of what is written carries it, and what carries another than the newest epoch is void.
        """
        may = self.phase in (Phase.STEP, Phase.STOP) or self.outcome in ("stopped", "too few")
        return self.number if may and self.is_chief else None

    def handle(self, now: float, event: Event) -> list[Effect]:
        """Take an event, and return what the engine must do, in order.

        Args:
          now: a monotonic time in seconds.
          event: what happened.
        """
        self._now = now
        if self.phase is not Phase.OVER:
            self._take(event)
        while self.phase is not Phase.OVER and self._progress():
            pass
        effects, self._effects = self._effects, []
        return effects

    # -- events -------------------------------------------------------------------------------------------

    def _do(self, *effects: Effect) -> None:
        self._effects += effects

    def _send(self, message: Message, *names: str, payload: Any = None) -> None:
        self._do(*[Send(name, message, payload) for name in names if name not in self._lost])

    def _take(self, event: Event) -> None:
        match event:
            case Received(peer, message, payload):
                self._receive(peer, message, payload)
            case Lost(peer, closed):
                self._lost.add(peer)
                self._closed |= {peer} if closed else set()
                self._joins.pop(peer, None)
                self._watchers.discard(peer)
            case Seen(epoch):
                self._see(epoch)
            case Tick(idle_seconds):
                self._tick(idle_seconds)
            case Checkpoint(step, batch) if self.phase is Phase.JOIN and self._founds == self.number:
                options = self.options
                founded = found_epoch(
                    self.number + 1,
                    self.me,
                    step,
                    options.num_slots,
                    every=options.every,
                    num_steps=options.num_steps or 0,
                    first_batch=batch,
                )
                self._do(Propose(founded))
            case StateReceived(peer, step) if self.phase is Phase.JOIN and peer == self._donor.name:
                self.step = self._applied = step
                self._updates = {later: update for later, update in self._updates.items() if later >= step}
            case Computed(step, slots, own, digest) if step == self.step:
                self._own, self._digest = own, digest
                self._done.update(slots)
            case Applied(step):
                self._applied = self._find_next(step)
            case Written():
                self._is_writing = False
            case Wish():
                self._saves |= event.saves
                self._stops |= event.stops
                self._leaves |= event.leaves
                self._deals |= event.deals
                self._speed = event.speed or self._speed
                self._excluded.update(event.excluded)

    def _receive(self, peer: str, message: Message, payload: Any) -> None:
        if peer in self._lost:
            return
        match message:
            case Announce(epoch=epoch):
                self._see(epoch)
            case Update() if peer == self._donor.name:
                self._updates[message.step] = (message.epoch, payload)
            case Join() if message.peer.name == peer and self.phase is not Phase.JOIN:
                self._receive_join(peer, message)
            case Chunk() | Vote() | Report() | Bye():
                if message.epoch > self.number:
                    self._do(Look(self.number + 1))
                elif message.epoch < self.number and not isinstance(message, Chunk):
                    assert self.epoch
                    self._send(Announce(epoch=self.epoch), peer)
                self._keep(peer, message, payload)

    def _keep(self, peer: str, message: Chunk | Vote | Report | Bye, payload: Any) -> None:
        """Keep a message of this epoch or of a later one, until its time comes."""
        if message.epoch >= self.number:
            self._inbox[_key(message, peer)] = (message, payload)

    def _receive_join(self, peer: str, join: Join) -> None:
        if peer in self.names:
            # it has not seen that it is a member
            assert self.epoch
            self._send(Announce(epoch=self.epoch), peer)
            return
        is_new = peer not in self._joins
        self._joins[peer] = join
        if is_new:
            self._connect()
        asks = join.donor == self.me.name and not join.has_state and peer not in self._watchers
        if asks and not self._is_behind:
            self._watchers.add(peer)
            self._do(SendState(peer, self.step))

    def _see(self, epoch: Epoch) -> None:
        if epoch.number > self.number:
            self._next = epoch

    def _tick(self, idle_seconds: float) -> None:
        # one that the others left behind hears nothing, so it must look
        self._do(Look(self.number + 1))
        if self.phase is Phase.JOIN:
            self._join = None
            if not set(self.names) & self._lost:
                self._cut_since = None
            elif self._cut_since is None:
                self._cut_since = self._now
            # a port that refuses is of a process that has ended; or of another host, if an address is wrong
            have_ended = set(self.names) <= self._closed
            is_alone = set(self.names) <= self._lost
            found_seconds = self.options.found_seconds
            least_seconds = min(ENDED_SECONDS, found_seconds) if have_ended else found_seconds
            if is_alone and (self.epoch is None or idle_seconds >= least_seconds):
                self._founds = self.number
                self._do(FindCheckpoint())
            elif self._cut_since is not None and self._now > self._cut_since + 2 * self.options.found_seconds:
                self._end("cut off")

    # -- progress -----------------------------------------------------------------------------------------

    def _progress(self) -> bool:
        """Do one thing that can be done now; return whether there was one."""
        if self._next is not None:
            self._adopt(self._next)
            return True
        do = {
            Phase.JOIN: self._watch,
            Phase.STEP: self._work,
            Phase.CHANGE: self._elect,
            Phase.STOP: self._part,
        }
        return do[self.phase]()

    def _watch(self) -> bool:
        """Before an epoch names this island: get the state, and keep up with the members."""
        if self._stops or self._leaves:
            return self._end("stopped" if self._stops else "left")
        members = self.epoch.members if self.epoch else ()
        living = {member.name: member for member in members if member.name not in self._lost}
        if self._donor.name not in living:
            self._donor = next(iter(living.values()), self.me)
            self.step, self._updates, self._ready = -1, {}, False
        if self.step in self._updates and self._applied == self.step:
            self._apply(*self._updates.pop(self.step))
            return True
        self._ready = self._ready or 0 <= self.step == self._applied
        ready = self._ready and len(living) == len(self.names)
        peer = Peer(name=self.me.name, address=self.me.address, speed=self._speed)
        join = Join(peer=peer, donor=self._donor.name, has_state=self.step >= 0, ready=ready)
        if join != self._join and living:
            self._join = join
            self._send(join, *living)
        return False

    def _work(self) -> bool:
        """In an epoch: compute, exchange and apply step after step, until something is wrong."""
        assert self.epoch
        names = set(self.names)
        if names & (self._lost | self._excluded) or any(self._get(Report, name) for name in self.others):
            return self._change()
        if self._is_behind:
            return self._catch_up()
        if self.epoch.stops or self._is_last(self.step):
            return self._stop()
        if self._is_waiting:
            return self._wait()
        return self._compute() or self._exchange() or self._commit()

    def _catch_up(self) -> bool:
        """Apply what the donor still sends; this island was let in before it had arrived."""
        if self.step in self._updates:
            self._apply(*self._updates.pop(self.step))
            return True
        return (self.step < 0 or self._donor.name in self._lost) and self._change()

    @property
    def _is_behind(self) -> bool:
        return self.epoch is not None and self.step < self.epoch.step

    def _find_next(self, step: int) -> int:
        assert self.epoch
        return self.epoch.find_next(step)

    def _is_last(self, step: int) -> bool:
        """Return whether the run ends with this number of steps."""
        return self.options.num_steps is not None and step >= self.options.num_steps

    @property
    def _is_waiting(self) -> bool:
        return len(self.names) < self.options.min_members

    @property
    def _wants_change(self) -> bool:
        return self._leaves or self._deals or bool(self._has_room and self._ready_peers)

    @property
    def _ready_peers(self) -> dict[str, Peer]:
        """Joiners that keep up; one whose donor is gone lacks the sums since then."""
        ready = {name: join for name, join in self._joins.items() if join.ready and join.donor in self.names}
        return {name: join.peer for name, join in ready.items()}

    @property
    def _has_room(self) -> bool:
        most = self.options.max_members
        return most is None or len(self.names) < most

    def _wait(self) -> bool:
        """With too few members nobody computes, so a change needs no vote."""
        if self._wants_change or self._stops:
            return self._change()
        assert self._few_since is not None
        return self._now >= self._few_since + self.options.wait_seconds and self._end("too few")

    # -- a step -------------------------------------------------------------------------------------------

    def _compute(self) -> bool:
        assert self.epoch
        mine = self.epoch.slots_of(self.step)[self.me.name]
        new = tuple(slot for slot in mine if slot not in (self._asked or ()))
        if self._asked is not None and not new:
            return False
        self._asked = (self._asked or ()) + new
        self._do(Compute(self.step, new, self.epoch.find_batches(self.step)))
        return True

    def _exchange(self) -> bool:
        """Sum over all members; at the end tell all that this one holds the sum."""
        if self._vote is not None:
            return False
        size, index = len(self.names), self.names.index(self.me.name)
        if self._ring is None:
            if self._own is None or not self._done.issuperset(self._asked or ()):
                return False
            self._ring = Ring(self._own.copy(size), index, size)
        elif not self._ring.is_whole:
            key = (Chunk, self.number, self.step, self._ring.hop, self.names[index - 1])
            if key not in self._inbox:
                return False
            self._ring.receive(self._inbox.pop(key)[1])
        if not self._ring.is_whole:
            message = Chunk(epoch=self.number, step=self.step, hop=self._ring.hop)
            self._send(message, self.names[(index + 1) % size], payload=self._ring.payload())
            return True
        self._vote = Vote(
            epoch=self.number,
            step=self.step,
            saves=self._saves,
            stops=self._stops or self._is_last(self._find_next(self.step)),
            changes=self._wants_change,
            digest=self._digest,
        )
        self._send(self._vote, *self.others)
        return True

    def _commit(self) -> bool:
        """Apply the step once all hold its sum, and do what any of them wants after it."""
        votes = self._votes()
        if votes is None:
            return False
        assert self._ring
        self._apply(self.number, self._ring.total)
        if any(vote.stops for vote in votes.values()):
            return self._stop()
        if self._exclude_wrong(votes):
            # the next step of all is a change; what they wished is in their next votes
            return True
        if any(vote.saves for vote in votes.values()):
            self._write()
        if any(vote.changes for vote in votes.values()):
            self._change()
        return True

    def _exclude_wrong(self, votes: dict[str, Vote]) -> bool:
        """Let members go whose parameters differ; all see the same votes, and name the same ones."""
        digests = {name: vote.digest for name, vote in votes.items() if vote.digest}
        wrong, is_doubtful = find_wrong(digests)
        if is_doubtful:
            text = ", ".join(f"{name} {digest}" for name, digest in digests.items())
            self._do(Note(f"WARNING: parameters differ, and no majority says which are right: {text}"))
        self._excluded |= wrong
        return bool(wrong)

    def _votes(self) -> dict[str, Vote] | None:
        """Return the votes of all members; None while one is missing."""
        votes = {name: self._get(Vote, name, self.step) for name in self.others}
        return {**votes, self.me.name: self._vote} if self._vote and None not in votes.values() else None

    def _apply(self, epoch: int, total: Any) -> None:
        self._do(Apply(self.step, epoch, total))
        for name in sorted(self._watchers):
            self._send(Update(epoch=epoch, step=self.step), name, payload=total)
        self.step = self._find_next(self.step)
        self._asked, self._own, self._ring, self._vote = None, None, None, None
        self._done = set()
        self._inbox = {
            key: kept for key, kept in self._inbox.items() if key[0] is not Vote or key[2] >= self.step
        }

    def _write(self, *, is_last: bool = False) -> None:
        self._saves = False
        if self.is_chief:
            self._do(Write(self.step, is_last))

    # -- a change of members ------------------------------------------------------------------------------

    def _change(self) -> bool:
        """End the epoch for this member: from here on it applies nothing before it knows the next epoch."""
        self.phase, self._since, self._report = Phase.CHANGE, self._now, None
        return True

    def _elect(self) -> bool:
        """Report to all; the oldest living member proposes the next epoch from the reports of the living."""
        assert self.epoch
        self._send_report()
        living = [name for name in self.names if name not in self._lost]
        reports = {name: self._get(Report, name) for name in living}
        reports[self.me.name] = self._report
        if self._proposed or living[0] != self.me.name or None in reports.values() or self._must_wait(living):
            return False
        proposal = next_epoch(self.epoch, reports, self._ready_peers, self.options.max_members)
        if proposal is None:
            return self._end("no state")
        self._proposed = True
        self._do(Propose(proposal))
        return False

    def _must_wait(self, living: list[str]) -> bool:
        """Return whether the larger part of the members may be on the other side of a cut network."""
        others = [name for name in self.names if name not in self._closed]
        is_larger = 2 * len(living) > len(others) or (
            2 * len(living) == len(others) and others[0] == living[0]
        )
        return not is_larger and self._now < self._since + self.options.minority_seconds

    def _send_report(self) -> None:
        """Send the report, again if more peers are lost; the promise in it stays."""
        report = Report(
            epoch=self.number,
            step=max(self.step, 0),
            behind=self._is_behind,
            held=self._vote is not None,
            begun=len(self._asked or ()),
            stops=self._stopping or (self._is_waiting and self._stops),
            leaves=self._leaves,
            speed=self._speed,
            lost=tuple(sorted(self._lost & {*self.names, *self._joins})),
            excluded=tuple(sorted(self._excluded & set(self.names))),
        )
        if report != self._report:
            self._report = report
            self._send(report, *self.others)

    def _adopt(self, epoch: Epoch) -> None:
        """Go over to an epoch: apply what it commits, or leave."""
        self._next = None
        if self._proposed:
            self._send(Announce(epoch=epoch), *sorted({*self.others, *self._joins} - {self.me.name}))
        if self._vote and epoch.number == self.number + 1 and epoch.step == self._find_next(self.step):
            # also one that leaves: it may be a donor
            assert self._ring
            self._apply(self.number, self._ring.total)
        is_named = self.me.name in epoch.names
        if self.phase is not Phase.JOIN and not is_named:
            self._end("left" if self._leaves else "excluded")
            return
        if epoch.names[0] == self.me.name and not self.is_chief:
            self._do(Revoke(epoch.number))
        if self.phase is Phase.JOIN and is_named and epoch.founded:
            self.step = epoch.step
            self._do(Restore(epoch.step))
        if is_named:
            self.phase = Phase.STEP
        self._enter(epoch)

    def _enter(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._ring = self._vote = self._report = self._join = None
        self._proposed = self._deals = False
        self._inbox = {key: kept for key, kept in self._inbox.items() if key[1] >= epoch.number}
        self._joins = {name: join for name, join in self._joins.items() if name not in epoch.names}
        self._watchers -= set(epoch.names)
        self._connect()
        if self.phase is Phase.STEP and self._is_waiting:
            self._few_since = self._now if self._few_since is None else self._few_since
            self._write()
        else:
            self._few_since = None

    def _connect(self) -> None:
        assert self.epoch
        peers = {
            peer.name: peer for peer in (*self.epoch.members, *(join.peer for join in self._joins.values()))
        }
        if self._is_behind:
            # a donor that has left still sends what this island lacks
            peers.setdefault(self._donor.name, self._donor)
        peers.pop(self.me.name, None)
        self._do(Connect(tuple(peers.values())))

    def _get(self, kind: type, name: str, step: int = 0) -> Any:
        kept = self._inbox.get((kind, self.number, step, 0, name))
        return kept and kept[0]

    # -- the end ------------------------------------------------------------------------------------------

    def _stop(self) -> bool:
        """The run ends; to one that lacks a vote, an exit now would look like a death."""
        self.phase, self._stopping, self._has_said_bye = Phase.STOP, True, False
        self._write(is_last=True)
        self._is_writing = self.is_chief
        return True

    def _part(self) -> bool:
        """Wait for the word of all that they know that the run ends; the chief's, that it has saved."""
        if not self._has_said_bye and not self._is_writing:
            self._has_said_bye = True
            self._send(Bye(epoch=self.number), *self.others)
        missing = {name for name in self.others if not self._get(Bye, name)}
        if missing & self._lost or any(self._get(Report, name) for name in self.others):
            return self._change()
        return not (missing or self._is_writing) and self._end("stopped")

    def _end(self, outcome: str) -> bool:
        self.phase, self.outcome = Phase.OVER, outcome
        self._do(Over(outcome))
        return True


def _key(message: Chunk | Vote | Report | Bye, peer: str) -> tuple[Any, ...]:
    """A member sends one message of each key; of its reports the last one counts."""
    step = message.step if isinstance(message, Chunk | Vote) else 0
    return type(message), message.epoch, step, message.hop if isinstance(message, Chunk) else 0, peer
