"""Elastic islands in a simulated world: network, folder, clock, faults; the protocol itself is the product's.

    python tests/elastic/simulation.py --seeds 10000

A seed is a run of some 40 simulated seconds with faults, and an end at which all must stop. `Violation` names
the first event after which an invariant is broken. The numbers of the toy problem are whole: the sum counts
each slot, the update does not depend on who is there, and a trace depends on the order of additions.
"""

import argparse
import heapq
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardtrain.elastic import engine
from shardtrain.elastic.epoch import BatchRule, Epoch, Peer, find_next
from shardtrain.elastic.ledger import count_batches, is_valid_checkpoint, list_ledger
from shardtrain.elastic.member import Member, Membership, Phase
from shardtrain.elastic.messages import Vote, from_header, to_header

PATIENCE, ELEMENTS, MODULUS = 3.0, 3, (1 << 61) - 1
START = tuple(range(ELEMENTS))


class Violation(AssertionError):
    """An invariant is broken."""


def check(holds: bool, text: str, *facts: Any) -> None:
    if not holds:
        raise Violation(f"{text}: {facts}")


# -- the toy problem ----------------------------------------------------------------------------------------


def gradient(params, step, slot, batch):
    added = step * 7 + slot * 13 + batch * 17
    return [(p * (2 * slot + 3) + added + i) % MODULUS for i, p in enumerate(params)]


def update(params, values):
    return tuple((p * 31 + value) % MODULUS for p, value in zip(params, values, strict=True))


class OwnSum:
    """An island's own sum: for each element slots counted, a value, and a trace of the order of additions."""

    def __init__(self, note: Callable[[tuple[tuple[int, ...], ...]], None]) -> None:
        self.groups: list[tuple[int, ...]] = []
        self.elements = [(0, 0, 1)] * ELEMENTS
        self._note = note

    def add(self, params, step, slots, find_batch):
        self.groups += [slots] if slots else []
        for slot in slots:
            added = [(1000**slot, value, value) for value in gradient(params, step, slot, find_batch(slot))]
            self.elements = [_plus(*pair) for pair in zip(self.elements, added, strict=True)]

    def copy(self, num_chunks):
        self._note(tuple(self.groups))
        return WholeSum(list(self.elements), num_chunks)


class WholeSum:
    def __init__(self, elements, num_chunks):
        self.elements, self.num_chunks = elements, num_chunks

    def _range(self, index):
        return range(index * ELEMENTS // self.num_chunks, (index + 1) * ELEMENTS // self.num_chunks)

    def chunk(self, index):
        return tuple(self.elements[i] for i in self._range(index))

    def add(self, index, payload):
        own = self.chunk(index)
        check(len(own) == len(payload), "a chunk is of another exchange", index, payload)
        self.replace(index, [_plus(*pair) for pair in zip(own, payload, strict=True)])

    def replace(self, index, payload):
        places = self._range(index)
        check(len(places) == len(payload), "a chunk is of another exchange", index, payload)
        self.elements[places.start : places.stop] = payload

    def finish(self, index):
        """Nothing is encoded here."""


def _plus(a, b):
    return a[0] + b[0], (a[1] + b[1]) % MODULUS, (a[2] * 31 + b[2]) % MODULUS


# -- the world ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """What may happen in a run; drawn from the seed unless given."""

    starters: int
    min_members: int
    num_slots: int
    delay: float
    folder_lag: float
    faults: tuple[str, ...]
    fault_seconds: float
    state_seconds: float
    duration: float
    encodes: bool
    every: int
    num_steps: int | None
    batch: BatchRule


HUNTED = ("vote", "report", "propose", "state", "write", "bye", "apply", "announce", "chunk", "compute")
FAULTS = (
    ["start"] * 8
    + ["kill", "kill", "kill chief", "kill chief", "kill two", "leave", "leave", "save", "save", "deal"]
    + [
        "corrupt",
        "freeze",
        "freeze chief",
        "partition",
        "partition",
        "cut",
        "cut one way",
        "exclude",
        "stop start",
    ]
    + [f"hunt {what}" for what in HUNTED]
)


def draw_scenario(rng: random.Random) -> Scenario:
    # in thirds of the runs members take three local steps before each exchange
    every = rng.choice([1, 1, 3])
    return Scenario(
        starters=rng.randint(1, 5),
        min_members=rng.choice([1, 1, 1, 2, 3]),
        num_slots=rng.choice([4, 6, 12]),
        delay=rng.choice([0.01, 0.1, 0.4]),
        folder_lag=rng.choice([0.0, 0.5, 3.0, 15.0]),
        faults=tuple(rng.sample(FAULTS, rng.randint(3, len(FAULTS)))),
        fault_seconds=rng.choice([1.0, 2.0, 4.0, 8.0]),
        state_seconds=rng.choice([0.2, 1.0, 5.0]),
        duration=rng.choice([20.0, 40.0, 60.0]),
        encodes=rng.random() < 0.1,
        every=every,
        num_steps=rng.choice([None, None, every * rng.randint(1, 40)]),
        batch=rng.choice(["fixed", "members"]) if every == 1 else "fixed",
    )


class Node:
    """An island's engine: the member, and what a process has beside it."""

    def __init__(self, world: "Simulation", name: str) -> None:
        self.name = name
        newest = world.newest(name)
        options = Membership(
            num_slots=world.scenario.num_slots,
            num_steps=world.scenario.num_steps,
            every=world.scenario.every,
            batch=world.scenario.batch,
            min_members=world.scenario.min_members,
            wait_seconds=40.0,
            minority_seconds=5.0,
            found_seconds=8.0,
        )
        self.member = world.kind(Peer(name=name, address=f"tcp://{name}"), options, newest)
        self.alive, self.thaws, self.is_gone = True, 0.0, False
        self.todo: deque[Callable[[], engine.Event | None]] = deque()
        self.works_until = 0.0
        self.peers: set[str] = set()
        self.step, self.params = -1, START
        self.own: OwnSum | None = None
        self.speed = world.rng.uniform(0.02, 0.2)
        self.kind = world.rng.choice(["a", "a", "b"])
        self.is_faulty = False
        self.fuse: int | None = None  # effects until it dies

    @property
    def lives(self) -> bool:
        return self.alive and self.member.phase is not Phase.OVER

    @property
    def is_member(self) -> bool:
        return self.lives and self.member.phase is not Phase.JOIN


class Simulation:
    """A world with its islands; `run` runs it to the end and checks it."""

    def __init__(self, seed: int, kind: type[Member] = Member, scenario: Scenario | None = None) -> None:
        self.rng = random.Random(seed)
        self.kind, self.traces = kind, False
        self.scenario = scenario or draw_scenario(self.rng)
        self.now = 0.0
        self.queue: list[Any] = []
        self.num_events, self.num_pushed = 0, 0
        self.nodes: dict[str, Node] = {}
        self.arrivals: dict[tuple[str, str], float] = {}
        self.cut_at: dict[tuple[str, str], float] = {}  # (from, to): what arrives later is lost
        self.sides: tuple[set[str], set[str], float] = (set(), set(), 0.0)
        self.epochs: list[Epoch] = []
        self.visible: dict[tuple[str, int], float] = {}
        self.touched = 0.0
        self.unfinished: dict[int, str] = {}  # number of a save -> its chief
        self.num_saves = 0
        self.used = 0  # the newest epoch whose chief has used the checkpoints
        self.checkpoints: list[tuple[int, int, tuple[int, ...]]] = []
        self.applied: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.given: dict[tuple[int, int, str], tuple[tuple[int, ...], ...]] = {}
        # (number of foundations, steps) -> parameters of one process, and batches that it has read
        self.reference: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
        self.hunts: list[str] = []
        self.counts: Counter[str] = Counter()
        self.digests: dict[tuple[int, int], dict[str, str]] = {}
        self.may_exclude: set[str] = set()
        self.outcomes: dict[str, tuple[str, int, int, tuple[int, ...]]] = {}

    # -- clock ----------------------------------------------------------------------------------------------

    def after(self, seconds: float, do: Callable[[], None], node: Node | None = None) -> None:
        """Do something later; what a frozen node would do waits until it thaws."""
        self.num_pushed += 1
        heapq.heappush(self.queue, (self.now + seconds, self.num_pushed, do, node))

    def run(self) -> "Simulation":
        for _ in range(self.scenario.starters):
            self.after(self.rng.uniform(0, 2), self.start)
        self.after(self.rng.expovariate(1 / self.scenario.fault_seconds), self.fault)
        self.after(self.scenario.duration, self.end)
        limit = self.scenario.duration + 200
        while self.queue:
            when, _, do, node = heapq.heappop(self.queue)
            check(when < limit, "the run does not end", self.describe())
            self.now = when
            if node is not None and node.thaws > when:
                self.after(node.thaws - when, do, node)
                continue
            if node is None or node.alive:
                self.num_events += 1
                do()
        self.check_end()
        return self

    def describe(self) -> Any:
        return [
            (n.name, n.member.phase.name, n.member.number, n.member.step)
            for n in self.nodes.values()
            if n.lives
        ]

    # -- islands --------------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.now < self.scenario.duration and sum(node.lives for node in self.nodes.values()) < 6:
            name = f"i{len(self.nodes)}"
            self.counts["started"] += 1
            node = self.nodes[name] = Node(self, name)
            self.tick(node)

    def tick(self, node: Node) -> None:
        if not node.lives:
            return
        if node.is_member:
            self.touched = self.now
        self.event(node, engine.Tick(self.now - self.touched))
        self.after(self.rng.uniform(0.9, 1.1), lambda: self.tick(node), node)

    def event(self, node: Node, event: engine.Event) -> None:
        if not node.lives:
            return
        effects = node.member.handle(self.now, event)
        if self.traces and not isinstance(event, engine.Tick):
            print(
                f"{self.now:8.3f} {node.name} {node.member.phase.name} {event}", *effects, sep="\n         "
            )
        for effect in effects:
            if not node.alive:
                break
            if self.is_hunted(effect):
                node.fuse = self.rng.randint(0, 2)
            if node.fuse is not None:
                node.fuse -= 1
                if node.fuse < 0:
                    self.kill(node)
                    break
            self.counts[type(effect).__name__] += 1
            getattr(self, f"do_{type(effect).__name__.lower()}")(node, effect)

    def is_hunted(self, effect: engine.Effect) -> bool:
        what = type(effect.message if isinstance(effect, engine.Send) else effect).__name__.lower()
        what = {"sendstate": "state"}.get(what, what)
        if what in self.hunts:
            self.hunts.remove(what)
            return True
        return False

    def later(self, node: Node, seconds: float, event: Callable[[], engine.Event | None]) -> None:
        def do() -> None:
            made = event()
            if made is not None:
                self.event(node, made)

        self.after(seconds, do, node)

    def work(self, node: Node, seconds: float, do: Callable[[], engine.Event | None]) -> None:
        """Do what the thread that computes does, one after the other, while the member goes on."""
        node.works_until = max(node.works_until, self.now) + seconds
        node.todo.append(do)
        self.later(node, node.works_until - self.now, lambda: node.todo.popleft()())

    # -- network --------------------------------------------------------------------------------------------

    def is_cut(self, a: str, b: str) -> bool:
        nodes = (self.nodes[a], self.nodes[b])
        return (a, b) in self.cut_at or any(node.is_gone or not node.alive for node in nodes)

    def is_apart(self, a: str, b: str) -> bool:
        left, right, until = self.sides
        return self.now < until and ((a in left and b in right) or (b in left and a in right))

    def carry(
        self, sender: Node, to: str, seconds: float, do: Callable[[Node], None], fifo: bool = True
    ) -> None:
        """Deliver something, unless the connection is lost before it arrives."""
        pair = (sender.name, to)
        if to not in sender.peers or self.is_cut(*pair):
            return
        wait = self.sides[2] - self.now if self.is_apart(*pair) else 0.0
        arrival = self.now + wait + seconds
        if fifo:
            arrival = self.arrivals[pair] = max(self.arrivals.get(pair, 0.0), arrival)

        def deliver() -> None:
            # the order of a connection stays through a freeze of the receiver: `after` keeps it
            if arrival <= self.cut_at.get(pair, self.now):
                do(self.nodes[to])

        self.after(arrival - self.now, deliver, self.nodes[to])

    def delay(self) -> float:
        return (
            self.rng.expovariate(1 / self.scenario.delay)
            if self.rng.random() < 0.9
            else self.rng.uniform(0, 1)
        )

    def lose(self, a: str, b: str, grace: float, seconds: float, closed: bool = False) -> None:
        """Cut what `a` sends to `b`; `b` is told, once it would notice."""
        if (a, b) in self.cut_at:
            return
        self.cut_at[a, b] = self.now + grace
        node = self.nodes[b]
        self.after(max(seconds, grace) + 1e-6, lambda: self.tell_lost(node, a, closed), node)

    def tell_lost(self, node: Node, peer: str, closed: bool) -> None:
        if peer in node.peers:
            self.event(node, engine.Lost(peer, closed))

    def break_pair(self, a: str, b: str, seconds: float) -> None:
        for pair in ((a, b), (b, a)):
            self.lose(*pair, 0.0, seconds * self.rng.uniform(1, 1.3))

    # -- effects --------------------------------------------------------------------------------------------

    def do_send(self, node: Node, effect: engine.Send) -> None:
        message, payload = effect.message, effect.payload
        if isinstance(message, Vote) and message.digest:
            self.digests.setdefault((message.epoch, message.step), {})[node.name] = message.digest
        if isinstance(payload, WholeSum):
            payload = tuple(payload.elements)
        if self.scenario.encodes:
            message = from_header(to_header(message))
            check(message == effect.message, "a header changes a message", message)
        received = engine.Received(node.name, message, payload)
        self.carry(node, effect.peer, self.delay(), lambda to: self.event(to, received))

    def do_connect(self, node: Node, effect: engine.Connect) -> None:
        names = {peer.name for peer in effect.peers}
        for name in sorted(node.peers - names):
            if not self.is_cut(node.name, name):
                grace = max(self.arrivals.get((node.name, name), 0.0) - self.now, 0.0)
                self.lose(node.name, name, grace, self.delay())
                self.cut_at[name, node.name] = self.now
        for name in sorted(names - node.peers):
            if self.is_cut(node.name, name):
                self.after(self.delay(), lambda name=name: self.tell_lost(node, name, False), node)
            elif self.is_apart(node.name, name) and self.sides[2] > self.now + PATIENCE:
                self.break_pair(node.name, name, PATIENCE)
        node.peers = names

    def newest(self, name: str) -> Epoch | None:
        seen = [epoch for epoch in self.epochs if self.sees(name, epoch.number)]
        return seen[-1] if seen else None

    def sees(self, name: str, number: int) -> bool:
        """Return whether a node sees an epoch file; each node sees a new file at a time of its own."""
        if number > len(self.epochs):
            return False
        lag = self.rng.uniform(0, self.scenario.folder_lag)
        return self.visible.setdefault((name, number), self.now + lag) <= self.now

    def do_look(self, node: Node, effect: engine.Look) -> None:
        def look() -> engine.Event | None:
            newest = self.newest(node.name)
            return engine.Seen(newest) if newest and newest.number >= effect.number else None

        self.later(node, self.delay() / 4, look)

    def do_propose(self, node: Node, effect: engine.Propose) -> None:
        def link() -> engine.Event | None:
            number = effect.epoch.number
            if number == len(self.epochs) + 1:
                self.link(node, effect.epoch)
            return engine.Seen(self.epochs[number - 1]) if self.sees(node.name, number) else None

        self.later(node, self.delay(), link)

    def link(self, node: Node, epoch: Epoch) -> None:
        self.epochs.append(epoch)
        self.touched = self.now
        self.visible[node.name, epoch.number] = self.now
        self.counts["founded"] += epoch.founded
        self.counts["repeated"] += epoch.repeats
        for word in ("joined", "left", "lost", "excluded"):
            self.counts[f"epoch {word}"] += word in epoch.why
        for step, number in self.applied:
            self.check_epoch_of(step, number)
        for number, step in self.digests:
            self.find_wrong(number, step, self.epochs[number - 1].names)
        self.check_size(epoch)
        gone = set(epoch.why.partition("excluded ")[2].partition(";")[0].split(", ")) - {""}
        check(gone <= self.may_exclude, "a member is excluded without a reason", gone)

    def check_size(self, epoch: Epoch) -> None:
        """A step has the slots of all its batches: one, or one for each member of the epoch that began it."""
        size = len(epoch.names) if self.scenario.batch == "members" else 1
        if epoch.repeats:
            size = self.size_of(self.epochs[epoch.number - 2], epoch.step)
        check(self.size_of(epoch, epoch.step) == size, "a step has another size", epoch)

    def size_of(self, epoch: Epoch, step: int) -> int:
        return sum(map(len, epoch.slots_of(step).values())) // self.scenario.num_slots

    def era(self, number: int) -> int:
        return sum(epoch.founded for epoch in self.epochs[:number])

    def do_findcheckpoint(self, node: Node, effect: engine.FindCheckpoint) -> None:
        def find() -> engine.Event:
            self.drop_void()
            step = max([0, *(step for step, _, _ in self.checkpoints)])
            grows = self.scenario.batch == "members"
            return engine.Checkpoint(step, count_batches(self.epochs, step) if grows else None)

        self.later(node, self.delay(), find)

    def list_void(self) -> list[Any]:
        return [each for each in self.checkpoints if not is_valid_checkpoint(self.epochs, *each[:2])]

    def drop_void(self) -> None:
        void = self.list_void()
        self.checkpoints = [each for each in self.checkpoints if each not in void]

    def do_restore(self, node: Node, effect: engine.Restore) -> None:
        def restore() -> None:
            self.use_checkpoints(node)
            self.drop_void()
            found = [(p, self.era(number)) for s, number, p in self.checkpoints if s == effect.step]
            params, era = found[0] if found else (START, 0)
            node.step, node.params, node.is_faulty, node.own = effect.step, params, False, None
            if found or not effect.step:
                before = self.reference.get((era, effect.step), (START, 0))
                self.reference.setdefault((self.era(node.member.number), effect.step), before)
                self.check_params(node, node.member.number)

        self.work(node, 0.0, restore)

    def do_revoke(self, node: Node, effect: engine.Revoke) -> None:
        def revoke() -> None:
            earlier = {epoch.names[0] for epoch in self.epochs[: effect.number - 1]}
            check(self.epochs[-1].names[0] not in earlier - {node.name}, "a chief is revoked", node.name)
            self.unfinished = {save: name for save, name in self.unfinished.items() if name not in earlier}

        self.work(node, 0.0, revoke)

    def use_checkpoints(self, node: Node) -> None:
        """The chief of an epoch relies on what is saved: no earlier one may save any more."""
        self.used = max(self.used, node.member.number)

    def do_sendstate(self, node: Node, effect: engine.SendState) -> None:
        def send() -> None:
            check(node.step == effect.step, "a donor sends another step than it has", node.name, effect)
            state = node.step, node.params, node.is_faulty
            seconds = self.rng.uniform(0, self.scenario.state_seconds)
            self.carry(
                node, effect.peer, seconds, lambda to: self.receive_state(to, node.name, *state), fifo=False
            )

        self.work(node, 0.0, send)

    def receive_state(
        self, node: Node, donor: str, step: int, params: tuple[int, ...], is_faulty: bool
    ) -> None:
        def copy() -> engine.Event:
            node.step, node.params, node.is_faulty, node.own = step, params, is_faulty, None
            # the joiner may have another donor by now
            self.counts["late state"] += node.member.donor != donor
            return engine.StateReceived(donor, step)

        if node.lives and node.member.phase is Phase.JOIN and node.member.donor == donor:
            self.work(node, self.rng.choice([0.0, 0.0, self.rng.uniform(0, 3)]), copy)

    def do_compute(self, node: Node, effect: engine.Compute) -> None:
        name, member = node.name, node.member
        planned = self.scenario.num_steps
        check(planned is None or effect.step < planned, "a step after the last one is computed", name, effect)
        wrong = self.find_wrong(member.number, effect.step - self.scenario.every, member.names)
        check(not wrong, "a member with other numbers stays", name, effect, wrong)

        def note(groups: tuple[tuple[int, ...], ...]) -> None:
            self.given[member.number, effect.step, name] = groups

        def find_batch(slot: int) -> int:
            first = effect.step if effect.batches is None else effect.batches.start
            return first + slot // self.scenario.num_slots

        def compute() -> engine.Event:
            check(node.step == effect.step, "a member computes another step than it has", name, effect)
            node.own = node.own or OwnSum(note)
            node.own.add(node.params, effect.step, effect.slots, find_batch)
            if effect.step // self.scenario.every % 2:
                return engine.Computed(effect.step, effect.slots, node.own)
            digest = f"{node.kind}/{effect.step + 1000 * node.is_faulty}"
            return engine.Computed(effect.step, effect.slots, node.own, digest)

        self.work(node, 0.05 + node.speed * len(effect.slots), compute)

    def find_wrong(self, number: int, step: int, names: tuple[str, ...]) -> set[str]:
        """Return the members of an epoch whose digest is not that of the majority of their kind."""
        found = self.digests.get((number, step), {})
        wrong = set()
        for name in names if found.keys() == set(names) else ():
            same = [found[other] for other in names if found[other][0] == found[name][0]]
            wrong |= (
                {name}
                if any(same.count(other) > len(same) / 2 for other in {*same} - {found[name]})
                else set()
            )
        self.may_exclude |= wrong
        return wrong

    def do_note(self, node: Node, effect: engine.Note) -> None:
        self.counts["doubt"] += 1

    def do_apply(self, node: Node, effect: engine.Apply) -> None:
        step, epoch, total = effect.step, effect.epoch, effect.total
        elements = tuple(total.elements if isinstance(total, WholeSum) else total)
        size = self.size_of(self.epochs[epoch - 1], step)
        slots = sum(1000**slot for slot in range(self.scenario.num_slots * size))
        check(all(e[0] == slots for e in elements), "a slot is not counted exactly once", node.name, step)
        first = self.applied.setdefault((step, epoch), elements)
        check(first == elements, "two islands apply unequal sums", node.name, step, epoch)
        self.check_epoch_of(step, epoch)

        def apply() -> engine.Event:
            check(node.step == step, "an island applies another step than its next", node.name, effect)
            values = [e[1] for e in elements]
            node.params, node.own = update(node.params, values), None
            node.step = find_next(step, self.scenario.every)
            self.refer(step, epoch, size)
            self.check_params(node, epoch)
            return engine.Applied(step)

        self.work(node, self.rng.uniform(0, 0.1), apply)

    def refer(self, step: int, epoch: int, size: int) -> None:
        """Do a step of so many batches as one process."""
        # what is computed in an exchange depends on its first step alone here
        era, after = self.era(epoch), find_next(step, self.scenario.every)
        if (era, after) not in self.reference:
            params, read = self.reference[era, step]
            slots = range(self.scenario.num_slots * size)
            grads = [gradient(params, step, slot, read + slot // self.scenario.num_slots) for slot in slots]
            values = [sum(g) % MODULUS for g in zip(*grads, strict=True)]
            read += size if self.scenario.batch == "members" else after - step
            self.reference[era, after] = update(params, values), read

    def check_params(self, node: Node, epoch: int) -> None:
        expected, _ = self.reference[self.era(epoch), node.step]
        check(node.params == expected, "parameters differ from one process", node.name)

    def check_epoch_of(self, step: int, number: int) -> None:
        """Some may have applied a step only if no later epoch repeats it, other than from a checkpoint."""
        check(self.epochs[number - 1].step <= step, "a step is applied before its epoch", step, number)
        if number < len(self.epochs) and not self.epochs[number].founded:
            check(
                step < self.epochs[number].step,
                "a step is applied by some and repeated by others",
                step,
                number,
            )

    def do_write(self, node: Node, effect: engine.Write) -> None:
        def write() -> None:
            check(node.step == effect.step, "a chief writes another step than it has", node.name, effect)
            self.use_checkpoints(node)
            if node.member.number == len(self.epochs):
                # readers know no epochs: all that they find must count
                check(not self.list_void(), "a checkpoint is of a past that was left behind", node.name)
            self.num_saves += 1
            saved = node.step, min(node.member.number, len(self.epochs)), node.params
            save = self.num_saves
            self.unfinished[save] = node.name
            self.after(self.rng.uniform(0, 2), lambda: look(save, saved), node)

        def look(save: int, saved: tuple[int, int, tuple[int, ...]]) -> None:
            fence = node.member.fence
            if fence is not None and fence >= len(self.epochs):
                check(self.epochs[-1].names[0] == node.name, "one that is not chief writes", node.name, saved)
                # it may sleep here, for as long as it likes
                if "freeze chief" in self.scenario.faults and self.rng.random() < 0.2:
                    self.fault_freeze(node, "", [], [])
                self.after(0.001, lambda: commit(save, saved), node)
            elif node.lives:
                self.counts["refused"] += 1
                self.after(1.0, lambda: look(save, saved), node)

        def commit(save: int, saved: tuple[int, int, tuple[int, ...]]) -> None:
            if self.unfinished.pop(save, None) is None:
                self.counts["revoked"] += 1
                return
            later = [epoch for epoch in self.epochs[: self.used] if epoch.names[0] != node.name]
            check(not later or later[-1].number < saved[1], "a chief that was left behind saves", node.name)
            self.checkpoints.append(saved)
            self.counts["saved"] += 1
            if effect.is_last:
                self.event(node, engine.Written())

        self.work(node, 0.0, write)

    def do_over(self, node: Node, effect: engine.Over) -> None:
        def end() -> None:
            self.outcomes[node.name] = (effect.outcome, node.member.number, node.step, node.params)

        self.work(node, 0.0, end)
        self.counts[effect.outcome] += 1
        for name, other in self.nodes.items():
            if node.name in other.peers and not self.is_cut(node.name, name):
                grace = max(self.arrivals.get((node.name, name), 0.0) - self.now, 0.0)
                self.lose(node.name, name, grace, self.delay(), self.rng.random() < 0.8)
        node.is_gone = True
        if effect.outcome in ("excluded", "cut off", "no state") and self.now < self.scenario.duration:
            self.after(self.rng.uniform(0, 3), self.start)

    # -- faults ---------------------------------------------------------------------------------------------

    def kill(self, node: Node) -> None:
        node.alive = False
        self.counts["killed"] += 1
        for name, other in self.nodes.items():
            if other.alive and (node.name, name) not in self.cut_at:
                # a process that ends closes its connections; a host that ends is only silent
                closed = self.rng.random() < 0.7
                seconds = self.delay() if closed else PATIENCE * self.rng.uniform(1, 1.3)
                self.lose(node.name, name, self.rng.uniform(0, 0.3), seconds, closed)

    def fault(self) -> None:
        if self.now >= self.scenario.duration:
            return
        if not any(node.lives for node in self.nodes.values()):
            self.start()
        what, _, whom = self.rng.choice(self.scenario.faults).partition(" ")
        lives = [node for node in self.nodes.values() if node.lives]
        members = [node for node in lives if node.is_member]
        chiefs = [node for node in members if node.member.is_chief]
        targets = chiefs if whom == "chief" else members if self.rng.random() < 0.7 else lives
        if targets:
            self.counts[what] += 1
            getattr(self, f"fault_{what}")(self.rng.choice(targets), whom, members, lives)
        self.after(self.rng.expovariate(1 / self.scenario.fault_seconds), self.fault)

    def fault_start(self, node, whom, members, lives):
        self.start()

    def fault_stop(self, node, whom, members, lives):
        """End the run in the middle, for a joiner to continue it from its checkpoint."""
        if self.rng.random() < 0.2:
            for each in members:
                self.event(each, engine.Wish(stops=True))
            self.after(self.rng.uniform(0, 4), self.start)

    def fault_kill(self, node, whom, members, lives):
        self.kill(node)
        rest = [other for other in lives if other is not node]
        if whom == "two" and rest:
            self.kill(self.rng.choice(rest))

    def fault_hunt(self, node, whom, members, lives):
        self.hunts.append(whom)

    def fault_leave(self, node, whom, members, lives):
        if members:
            self.event(self.rng.choice(members), engine.Wish(leaves=True))

    def fault_save(self, node, whom, members, lives):
        self.event(node, engine.Wish(saves=True))

    def fault_deal(self, node, whom, members, lives):
        for each in members:
            self.event(each, engine.Wish(speed=max(round(1 / each.speed), 1), deals=each is members[0]))

    def fault_exclude(self, node, whom, members, lives):
        if node in members and len(members) > 2:
            self.may_exclude.add(node.name)
            for each in members:
                self.after(
                    self.delay(), lambda each=each: self.event(each, engine.Wish(excluded=(node.name,))), each
                )

    def fault_corrupt(self, node, whom, members, lives):
        node.is_faulty = True

    def fault_freeze(self, node, whom, members, lives):
        seconds = self.rng.choice([0.5, PATIENCE, 2 * PATIENCE, 5 * PATIENCE]) * self.rng.uniform(0.5, 1.5)
        node.thaws = self.now + seconds
        if seconds > PATIENCE:
            for name, other in self.nodes.items():
                if other.alive and other is not node:
                    self.lose(node.name, name, 0.0, PATIENCE * self.rng.uniform(1, 1.3))
                    # what came before waits in its buffers
                    self.lose(name, node.name, PATIENCE, seconds + self.rng.uniform(0, 1))

    def fault_partition(self, node, whom, members, lives):
        if self.now < self.sides[2]:
            return
        left = {each.name for each in lives if self.rng.random() < 0.5}
        right = {each.name for each in lives} - left
        seconds = self.rng.choice([1.0, PATIENCE, 4 * PATIENCE]) * self.rng.uniform(0.5, 1.5)
        self.sides = (left, right, self.now + seconds)
        if seconds > PATIENCE:
            for a in sorted(left):
                for b in sorted(right):
                    self.break_pair(a, b, PATIENCE)

    def fault_cut(self, node, whom, members, lives):
        others = [other for other in lives if other is not node]
        if others and whom == "one way":
            other = self.rng.choice(others).name
            self.lose(node.name, other, 0.0, self.rng.uniform(0.1, PATIENCE))
            self.lose(other, node.name, PATIENCE, PATIENCE * self.rng.uniform(1, 2))
        elif others:
            self.break_pair(node.name, self.rng.choice(others).name, self.rng.choice([0.1, PATIENCE]))

    # -- the end --------------------------------------------------------------------------------------------

    def end(self) -> None:
        """No more faults: every island is asked to stop, until all have."""
        self.sides = (set(), set(), 0.0)
        self.hunts = []
        lives = [node for node in self.nodes.values() if node.lives]
        for node in lives:
            node.thaws = min(node.thaws, self.now)
            node.fuse = None
            self.event(node, engine.Wish(stops=True))
        if lives:
            self.after(1.0, self.end)

    def check_end(self) -> None:
        check(not self.describe(), "an island waits for ever", self.describe())
        ends: dict[int, tuple[int, Any]] = {}
        for name, (outcome, number, step, params) in self.outcomes.items():
            if outcome == "stopped" and step >= 0 and name in self.epochs[number - 1].names:
                era = sum(epoch.founded for epoch in self.epochs[:number])
                end = ends.setdefault(era, (step, params))
                check(end == (step, params), "members end at different steps", name, era, end, step)
                saved = any(each[0] == step for each in self.checkpoints)
                check(saved or not step, "a run has ended, and its last step is not saved", name, step)
        num_steps = max([step + self.scenario.every for step, _ in self.applied], default=0)
        if self.epochs:
            for line in list_ledger(self.epochs, num_steps):
                if (line.step, line.epoch) in self.applied:
                    given = {name: self.given.get((line.epoch, line.step, name)) for name in line.groups}
                    check(given == line.groups, "the ledger tells another story", line, given)
                    _, read = self.reference[self.era(line.epoch), line.step]
                    counted = count_batches(self.epochs, line.step)
                    check(counted == read, "the ledger counts other batches", line, counted, read)
        self.counts["steps"] += num_steps
        self.counts["planned end"] += num_steps == self.scenario.num_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="print each event with its effects")
    asked = parser.parse_args()
    began, totals, num_events, failed = time.monotonic(), Counter[str](), 0, []
    for seed in range(asked.first, asked.first + asked.seeds):
        world = Simulation(seed)
        world.traces = asked.trace
        try:
            world.run()
        except AssertionError as error:
            failed.append(seed)
            print(f"seed {seed}, at {world.now:.2f} s: {error}"[:600])
        totals += world.counts
        num_events += world.num_events
    print(f"{asked.seeds} seeds, {len(failed)} failed {failed[:20]}, {num_events} events,", end=" ")
    print(f"{time.monotonic() - began:.0f} s; {dict(totals.most_common())}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
