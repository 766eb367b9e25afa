"""Elastic islands in a simulated world with faults: invariants hold, mutants of the protocol are found."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulation import Simulation, draw_scenario

from shardtrain.elastic.engine import (
    Checkpoint,
    Compute,
    Connect,
    FindCheckpoint,
    Lost,
    Over,
    Propose,
    Restore,
    Revoke,
    Seen,
    Send,
    StateReceived,
    Tick,
    Write,
    Written,
)
from shardtrain.elastic.epoch import Epoch, Peer, Report
from shardtrain.elastic.member import Member, Membership, Phase
from shardtrain.elastic.messages import Chunk, Join

CALM = ("start", "start", "leave", "save", "deal")
MOST_SEEDS = 400
"""Seeds within which each mutant is found."""


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_runs_with_faults_keep_every_invariant(first):
    counts = sum((Simulation(seed).run().counts for seed in range(first, first + 100)), Counter())
    # the faults happened, and runs went on after them
    for what in (
        "killed",
        "freeze",
        "partition",
        "repeated",
        "excluded",
        "left",
        "cut off",
        "no state",
        "saved",
        "revoked",
        "late state",
        "planned end",
        "epoch excluded",
    ):
        assert counts[what] > 0, what
    assert counts["steps"] > 10 * 50


def test_islands_that_join_and_leave_repeat_nothing():
    counts = Counter[str]()
    for seed in range(60):
        scenario = replace(draw_scenario(Random(seed)), faults=CALM, min_members=1)
        world = Simulation(seed, scenario=scenario).run()
        counts += world.counts
        for before, epoch in pairwise(world.epochs):
            # a joiner that is asked to stop at the end may be a member already, without knowing it
            gone = [name for name in before.names if name not in epoch.names]
            if any(world.outcomes[name][0] == "stopped" for name in gone):
                continue
            assert not epoch.repeats, (seed, epoch)
            assert {world.outcomes[name][0] for name in gone} <= {"left"}, (seed, epoch)
    assert counts["epoch joined"] > 100
    assert counts["left"] > 60


class AppliesBeforeTheVotes(Member):
    def _votes(self):
        return self._vote and {self.me.name: self._vote}


class EndsBeforeItHasSaved(Member):
    def _stop(self):
        stopped, self._is_writing = super()._stop(), False
        return stopped


class WritesWithoutFence(Member):
    @property
    def fence(self):
        return 1 << 30


class RevokesNobody(Member):
    def _do(self, *effects):
        super()._do(*[effect for effect in effects if not isinstance(effect, Revoke)])


class BreaksItsPromise(Member):
    def _elect(self):
        return self._exchange() or self._commit() or super()._elect()


class TakesLateChunks(Member):
    def _keep(self, peer, message, payload):
        late = isinstance(message, Chunk) and message.epoch < self.number
        super()._keep(peer, replace(message, epoch=self.number) if late else message, payload)


class WaitsForALostDonor(Member):
    def _catch_up(self):
        return self.step in self._updates and super()._catch_up()


class ProposesAlone(Member):
    def _get(self, kind, name, step=0):
        invented = self._report if kind is Report and self.phase is Phase.CHANGE else None
        return super()._get(kind, name, step) or invented


class TrainsAStepTooMany(Member):
    def _is_last(self, step):
        return super()._is_last(step - self.options.every)


class StopsAloneAtTheLastStep(Member):
    def _commit(self):
        if not self._is_last(self._find_next(self.step)) or not self._vote:
            return super()._commit()
        assert self._ring
        self._apply(self.number, self._ring.total)
        return self._stop()


class ComparesNoNumbers(Member):
    def _exclude_wrong(self, votes):
        return False


class CountsStepsAsBatches(Member):
    def _do(self, *effects):
        found = []
        for each in effects:
            if isinstance(each, Compute) and each.batches is not None:
                each = replace(each, batches=range(each.step, each.step + len(each.batches)))
            found.append(each)
        super()._do(*found)


MUTANTS = {
    AppliesBeforeTheVotes: 6,
    EndsBeforeItHasSaved: 273,
    WritesWithoutFence: 334,
    RevokesNobody: 6,
    BreaksItsPromise: 6,
    TakesLateChunks: 20,
    WaitsForALostDonor: 81,
    ProposesAlone: 5,
    TrainsAStepTooMany: 3,
    StopsAloneAtTheLastStep: 18,
    ComparesNoNumbers: 132,
    CountsStepsAsBatches: 8,
}
"""One mutant for each invariant -> the first seed that found it, to save time; else others do."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant):
    for seed in (MUTANTS[mutant], *range(MOST_SEEDS)):
        try:
            Simulation(seed, kind=mutant).run()
        except AssertionError:
            return
    pytest.fail(f"{mutant.__name__} breaks no invariant in {MOST_SEEDS} seeds")


def test_the_state_of_a_donor_that_is_lost_since_does_not_count():
    a, b, c = (Peer(name=name, address="") for name in "abc")
    epoch = Epoch(number=1, step=0, members=(a, b), slots=((0,), (1,)), why="founded")
    member = Member(c, Membership(num_slots=2), epoch)
    member.handle(0.0, Tick())
    assert member.donor == "a"
    member.handle(0.1, Lost("a"))
    effects = member.handle(0.2, StateReceived("a", 5))
    assert member.donor == "b"
    assert member.step == -1
    assert not effects
    effects = member.handle(0.3, StateReceived("b", 6))
    assert member.step == 6
    assert [
        each.message.ready for each in effects if isinstance(each, Send) and isinstance(each.message, Join)
    ] == [False]


def test_a_run_with_all_its_steps_is_stopped_and_computes_no_more():
    """Also where the votes for the last step are lost, so that an epoch begins after it."""
    member = Member(Peer(name="a", address=""), Membership(num_slots=2, num_steps=3), None)
    assert FindCheckpoint() in member.handle(0.0, Tick())
    (proposal,) = member.handle(0.1, Checkpoint(3))
    assert isinstance(proposal, Propose)
    effects = member.handle(0.2, Seen(proposal.epoch))
    assert effects == [Revoke(1), Restore(3), Connect(()), Write(3, is_last=True)]
    # it ends once all is saved
    assert member.handle(0.3, Written()) == [Over("stopped")]
