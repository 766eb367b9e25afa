"""Exchange small values between the islands of a run around its steps: votes, facts, sums, barriers.

A run of one island makes the same calls, without any exchange. The state is exchanged in
`synchronisation.py`. Next: `train.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from shardtrain.checkpoints.processes import gather_alone
from shardtrain.islands.agreement import check_agreement
from shardtrain.islands.membership import Islands
from shardtrain.islands.mpi_library import cuda_aware, decide_device_memory
from shardtrain.islands.transfer import Transfer
from shardtrain.islands.watchdog.stragglers import StepTimer, Stragglers
from shardtrain.pipeline.stacking import owner_groups
from shardtrain.train_step.stage_links import OwnerTransfers, PipelineGrid
from shardtrain.trainer.config import Run
from shardtrain.trainer.setup import RunSetup

AGREEMENT_SECONDS = 600.0
"""Seconds to wait for a rank that traces a large model."""

LONG_SECONDS = 5 * 60 * 60.0
"""Seconds to wait for a rank that reads data, or finishes a checkpoint, which may take 4 hours."""


class StepVote(NamedTuple):
    """The vote of a process after a step.

    Args:
      stop: the number of the signal that asked to stop, `TIME_OVER`, or 0.
      save: a checkpoint is due.
      saved: the newest step saved by this process; after the vote, by all processes.
      bad: a step that was found to be bad, or 0.
      at_barrier: whether islands voted after this step; a run of one island always does.
    """

    stop: int
    save: bool
    saved: int | None = None
    bad: int = 0
    at_barrier: bool = True


class VoteResult(NamedTuple):
    """The result of the vote of all ranks after a step.

    Args:
      vote: stop if any rank asks to, save if rank 0 does, the newest step that all have saved, the first bad
        step.
      slow: a message about slow islands, or None.
      seconds: seconds of each island's own work in the step; None if they were not measured.
      rest_seconds: seconds of each island from there to the end of the step, waiting included; or None.
    """

    vote: StepVote
    slow: str | None = None
    seconds: Sequence[float] | None = None
    rest_seconds: Sequence[float] | None = None


@dataclass(frozen=True)
class Coordination:
    """The exchange of this island with the others; a run of one island exchanges nothing.

    Args:
      islands: the islands of the run; None for a run of one island.
      transfer: the transfer to the other islands, or None; for islands that hold stages, the transfer to the
        owners of this stage's first blocks.
      grid: the stage and replica of each island; None without stages.
      stragglers: receives the step time of every rank; None disables it.
      timer: measures this rank's own work in a step.
      owners: the transfers to the owners of all blocks of this stage; None without stages.
      is_chief: returns whether this island writes for all, in a run whose islands come and go, of which each
        does what a run of its own does; the others here are its further processes. None in other runs.
    """

    islands: Islands | None = None
    transfer: Transfer | None = None
    grid: PipelineGrid | None = None
    stragglers: Stragglers | None = None
    timer: StepTimer = field(default_factory=StepTimer)
    owners: OwnerTransfers | None = None
    is_chief: Callable[[], bool] | None = None

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """All transfers to other islands."""
        if self.owners is not None:
            return self.owners.transfers
        return () if self.transfer is None else (self.transfer,)

    def bucket_seconds(self) -> dict[int, float]:
        """Return the mean seconds of each bucket since the last call, by its number over all transfers."""
        found, first = {}, 0
        for transfer in self.transfers:
            times = transfer.bucket_times
            found |= {first + number: seconds for number, seconds in times.take().items()}
            first += len(times.sizes_bytes)
        return found

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes metrics for all."""
        is_first = jax.process_index() == 0 if self.islands is None else self.islands.is_first
        return is_first and (self.is_chief is None or self.is_chief())

    @property
    def island(self) -> int:
        """The number of this island."""
        return 0 if self.islands is None else self.islands.placement.island

    @property
    def num_islands(self) -> int:
        """The number of islands."""
        return 1 if self.islands is None else self.islands.placement.num_islands

    @property
    def writes(self) -> bool:
        """Whether this island saves the arrays that all replicas (of its stage) have in common."""
        if self.is_chief is not None:
            return self.is_chief()
        return (self.island if self.grid is None else self.grid.replica) == 0

    def all_gather(self, name: str, value: Any, timeout_seconds: float | None = None) -> list[Any]:
        """Return the values of all ranks, by rank."""
        if self.islands is None:
            return [value]
        return self.islands.control.all_gather(name, value, timeout_seconds)

    def all_gather_islands(self, name: str, value: Any) -> list[Any]:
        """Return the values of all islands, by island."""
        return [value] if self.islands is None else self.islands.all_gather_islands(name, value)

    def gather_islands(self, name: str, find: Callable[[int], Any]) -> list[Any]:
        """Call a function on the first process of each island, and return all results, by island.

        Args:
          name: the name of the all-gather.
          find: number of an island -> a value that JSON can hold.
        """
        if self.islands is None:
            return gather_alone(name, find)
        placement = self.islands.placement
        found = find(placement.island) if placement.process == 0 else None
        values = self.islands.control.all_gather(name, found, LONG_SECONDS)
        return [values[rank] for rank in self.islands.first_ranks]

    def any_rank(self, question: str, answer: bool) -> bool:
        """Return whether the answer is yes on any rank.

        Args:
          question: its name; a rank that asks another question at this point is reported.
          answer: the answer of this rank.
        """
        return any(self.all_gather(question, answer, LONG_SECONDS))

    def gather_after_work(self, name: str, value: Any = None) -> list[Any]:
        """All-gather values after each rank's own work in a step.

        A compiled program with MPI that follows could not name a missing rank.
        """
        if self.islands is not None:
            self.timer.end()
        return self.all_gather(name, value, LONG_SECONDS)

    def check_agreement(self, facts: Mapping[str, Any]) -> None:
        """Compare the facts of all ranks, see `agreement.facts`.

        Raises:
          ValueError: they differ; the message names the facts and the ranks.
        """
        if self.islands is not None:
            control = self.islands.control
            check_agreement(control.all_gather, control.names[control.rank], facts, AGREEMENT_SECONDS)

    def vote(self, step: int, own: StepVote, *, at_barrier: bool = True) -> VoteResult:
        """All-gather the votes of all ranks after a step.

        Args:
          step: steps done.
          own: vote of this rank.
          at_barrier: whether islands exchange anything after this step; one island votes after each.
        """
        if self.is_chief is not None:
            # the islands have agreed on stops and saves within the step
            saved = [-1 if each is None else each for each in self.all_gather("saved", own.saved)]
            return VoteResult(own._replace(stop=0, save=False, saved=min(saved)))
        if self.islands is None:
            return VoteResult(own)
        if not at_barrier:
            # saves and bad steps wait for the next barrier
            return VoteResult(StepVote(stop=0, save=False, at_barrier=False))
        mine = [own, self.timer.take()]
        gathered = self.islands.control.all_gather(f"after step {step}", mine, LONG_SECONDS)
        votes = [StepVote(*vote) for vote, _ in gathered]
        saved = [-1 if vote.saved is None else vote.saved for vote in votes]
        bad = min((vote.bad for vote in votes if vote.bad), default=0)
        result = StepVote(max(vote.stop for vote in votes), votes[0].save, min(saved), bad)
        measured = [each for _, each in gathered]
        if None in measured:
            return VoteResult(result)
        seconds = [own for own, _ in measured]
        # an island is as slow as its slowest process
        ends = [*self.islands.first_ranks[1:], len(seconds)]
        slowest = [max(measured[i:j]) for i, j in zip(self.islands.first_ranks, ends, strict=True)]
        slow = self.stragglers.add(seconds) if self.stragglers else None
        return VoteResult(result, slow, [own for own, _ in slowest], [rest for _, rest in slowest])

    def sum_over_islands(
        self, name: str, sums: Mapping[str, tuple[float, float]]
    ) -> dict[str, tuple[float, float]]:
        """Add up (sum, count) pairs, by name, over islands."""
        if self.islands is None or self.grid is not None:
            return dict(sums)  # the stages of a pipeline have added theirs up already
        by_island = self.all_gather_islands(name, {key: list(pair) for key, pair in sums.items()})
        return {
            key: (sum(found[key][0] for found in by_island), sum(found[key][1] for found in by_island))
            for key in by_island[0]
        }

    def run_in_turn(self, name: str, work: Callable[[], Any]) -> Any:
        """Call `work` on the ranks of a host one after the other, because they share its disk."""
        if self.islands is None:
            return work()
        control = self.islands.control
        hosts = control.all_gather(f"{name}: hosts", self.islands.environment.host)
        turns = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        result = None
        for turn in range(max(turns) + 1):
            if turns[control.rank] == turn:
                result = work()
            control.all_gather(f"{name}: turn {turn}", timeout_seconds=LONG_SECONDS)
        return result

    def close(self, failed: bool = False) -> None:
        """Close the transfers, see `Transfer.close`."""
        for transfer in self.transfers:
            transfer.close(failed)


def make_transfers(
    run: Run, setup: RunSetup, islands: Islands
) -> tuple[Transfer | None, OwnerTransfers | None]:
    """Return the transfer to the other islands, and for islands that hold stages the owner transfers.

    All ranks call it, and make the transfers of all groups in the same order.

    Args:
      run: the run.
      setup: the setup of this island.
      islands: the islands of the run, several of them.
    """
    across, platform = run.strategy.across, jax.devices()[0].platform
    on_device = decide_device_memory(across.memory, islands, platform, cuda_aware)
    if setup.grid is None or setup.stage_model is None:
        return islands.transfer(setup.mesh, across, on_device), None
    found = []
    for group in owner_groups(setup.cuts):
        joins = group.stages[setup.grid.replica] == setup.grid.stage
        if transfer := islands.transfer(setup.mesh, across, on_device, joins=joins):
            found.append((group, transfer))
    groups, transfers = zip(*found, strict=True)
    return transfers[0], OwnerTransfers(setup.stage_model, groups, transfers)
