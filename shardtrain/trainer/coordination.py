"""What several islands do together around their steps: agree, begin, share out rows, stop and save.

An island that is alone does all this by itself, through the same calls. Next: `train.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardtrain.checkpoints.checkpointer import alone
from shardtrain.data import BatchShard, RowSplit, batch_shard, split_over_islands
from shardtrain.functional.model import path_text
from shardtrain.islands.agreement import check_agreement
from shardtrain.islands.membership import Islands
from shardtrain.islands.transfer import Transfer
from shardtrain.islands.watchdog.stragglers import StepTimer, Stragglers
from shardtrain.train_step.stage_step import Seats
from shardtrain.train_step.state import State
from shardtrain.trainer.fingerprints import fingerprints, odd
from shardtrain.trainer.loop import StepVote

AGREEMENT_SECONDS = 600.0
"""How long to wait for a rank that traces a large model slowly. A difference is told once all have come."""

LONG_SECONDS = 5 * 60 * 60.0
"""How long to wait for a rank that may be reading data, or finishing a checkpoint, which may take 4 hours."""


@dataclass(frozen=True)
class Coordination:
    """The islands of a run at work, or the one that is alone.

    Args:
      islands: None for one that is alone.
      crossing: to the others, None likewise; to those of the same stage where islands hold stages.
      seats: which stage of which pipeline each island holds, where they do.
      stragglers: told what every rank works; None: nobody is.
      work: of this rank in the step under way.
    """

    islands: Islands | None = None
    crossing: Transfer | None = None
    seats: Seats | None = None
    stragglers: Stragglers | None = None
    work: StepTimer = field(default_factory=StepTimer)

    @property
    def is_first(self) -> bool:
        """This process speaks and writes for all."""
        return jax.process_index() == 0 if self.islands is None else self.islands.is_first

    @property
    def writes(self) -> bool:
        """This process belongs to an island that saves: what all have in common, or what its stage has."""
        if self.seats is not None:
            return self.seats.replica == 0
        return self.islands is None or self.islands.seat.island == 0

    def rows(
        self,
        batch: int,
        weights: Sequence[float] | None,
        mesh: Mesh,
        batch_axes: Sequence[str],
        microbatches: int,
    ) -> BatchShard:
        """The rows of this process.

        Args:
          batch: rows of a whole batch.
          weights: island -> weight; None: its number of devices.
          mesh, batch_axes, microbatches: of this island.

        Raises:
          ValueError: there are not as many weights as islands; or one island cannot split the batch.
        """
        if self.islands is None:
            if weights is not None and len(weights) != 1:
                raise ValueError(
                    f"shares has {len(weights)} weights, and this run is alone: leave --shares out, or start"
                    f" {len(weights)} islands: shardtrain launch --islands {len(weights)} -- train ..."
                )
            return batch_shard([batch], 0, mesh, batch_axes, microbatches)
        unit = RowSplit.of(mesh.shape, batch_axes, microbatches).multiple
        found = self.islands.by_island("rows", [mesh.devices.size, unit])
        replica = self.islands.seat.island
        if (seats := self.seats) is not None:
            # all stages of a pipeline work on the same rows
            pipelines = [seats.of_replica(found, i) for i in range(seats.num_replicas)]
            found = [[sum(n for n, _ in each), math.lcm(*(unit for _, unit in each))] for each in pipelines]
            replica, unit = seats.replica, found[seats.replica][1]
        if weights is not None and len(weights) != len(found):
            raise ValueError(
                f"shares has {len(weights)} weights, and there are {len(found)}"
                f" {'islands' if self.seats is None else 'pipelines'}; give one each"
            )
        if len(found) == 1:
            RowSplit({"data": unit // microbatches}, microbatches).check(batch)
        shares = split_over_islands(batch, weights or [n for n, _ in found], [unit for _, unit in found])
        return batch_shard(shares, replica, mesh, batch_axes, microbatches, unit)

    def share(self, name: str, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        return [value] if self.islands is None else self.islands.control.share(name, value)

    def check(self, facts: Mapping[str, Any]) -> None:
        """Compare the facts of all ranks, see `agreement.facts`.

        Raises:
          ValueError: they differ; the message says in what, and where.
        """
        if self.islands is not None:
            control = self.islands.control
            check_agreement(control.share, control.names[control.rank], facts, AGREEMENT_SECONDS)

    def agree(self, step: int, wish: StepVote, local_steps: int = 1) -> tuple[StepVote, str | None]:
        """What all islands do after a step: what any of them must, and what the first would; who is slow.

        Args:
          step: steps done.
          wish: of this island.
          local_steps: replicas are combined after so many, and nothing happens in between.
        """
        if step % local_steps:
            # what is saved and what is bad is told when all meet
            return StepVote(stop=0, save=False), None
        if self.islands is None:
            return wish, None
        mine = [wish, self.work.take()]
        told = self.islands.control.share(f"after step {step}", mine, LONG_SECONDS)
        self.work.begin()
        wishes = [StepVote(*each) for each, _ in told]
        saved = [-1 if each.saved is None else each.saved for each in wishes]
        bad = min((each.bad for each in wishes if each.bad), default=0)
        agreed = StepVote(max(each.stop for each in wishes), wishes[0].save, min(saved), bad)
        seconds = [each for _, each in told]
        return agreed, self.stragglers.add(seconds) if self.stragglers and None not in seconds else None

    def totals(self, name: str, sums: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        """(sum, count) by name, added up over islands."""
        if self.islands is None or self.seats is not None:
            return dict(sums)  # pipelines have told each other already
        by_island = self.islands.by_island(name, {key: list(pair) for key, pair in sums.items()})
        return {
            key: (sum(found[key][0] for found in by_island), sum(found[key][1] for found in by_island))
            for key in by_island[0]
        }

    def in_turn(self, name: str, work: Any) -> Any:
        """Let the ranks of a host do something one after the other, for they share its disk."""
        if self.islands is None:
            return work()
        control = self.islands.control
        hosts = control.share(f"{name}: hosts", self.islands.place.host)
        turns = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        done = None
        for turn in range(max(turns) + 1):
            if turns[control.rank] == turn:
                done = work()
            control.share(f"{name}: turn {turn}", timeout_seconds=LONG_SECONDS)
        return done

    def meet(self, name: str) -> None:
        """Wait for all ranks, by name: what follows, MPI in compiled programs, cannot say who is missing."""
        if self.islands is not None:
            self.work.end()
            self.islands.control.share(name, timeout_seconds=LONG_SECONDS)

    def anywhere(self, question: str, here: bool) -> bool:
        """Whether something is so on any rank.

        Args:
          question: its name; ranks at another one are told apart.
          here: the answer of this rank.
        """
        if self.islands is None:
            return here
        return any(self.islands.control.share(question, here, LONG_SECONDS))

    def look(self, name: str, look: Callable[[int], Any]) -> list[Any]:
        """What the first process of each island finds out, told to all.

        Args:
          name: of what it is.
          look: number of an island -> what it finds, such as JSON has it.
        """
        if self.islands is None:
            return alone(name, look)
        seat = self.islands.seat
        found = look(seat.island) if seat.process == 0 else None
        values = self.islands.control.share(name, found, LONG_SECONDS)
        return [values[rank] for rank in self.islands.first_ranks]

    def same_state(self, state: State, own_optimizers: bool) -> State:
        """What islands have in common, as island 0 has it.

        Args:
          state: of this island.
          own_optimizers: the optimizer's state is each island's own, and stays.
        """
        if self.crossing is None:
            return state
        return state._replace(**self.crossing.map(_broadcast, _common(state, own_optimizers)))

    def differing(self, state: State, own_optimizers: bool) -> list[str]:
        """The arrays, of those that islands have in common, that are not the same bits on all of them."""
        if self.crossing is None:
            return []
        assert self.islands is not None
        common = _common(state, own_optimizers)
        paths = [path_text(path) for path, _ in jax.tree.leaves_with_path(common)]
        prints = self.islands.by_island("fingerprints", np.asarray(fingerprints(common)).tolist())
        if self.seats is not None:
            prints = prints[self.seats.stage :: self.seats.num_stages]
        return [path for path, *found in zip(paths, *prints, strict=True) if len(set(found)) > 1]

    def odd_copies(self, step: int, problem: str, kind: str, params: Any) -> str | None:
        """What is wrong with the copies of the parameters anywhere, in a sentence; None where nothing is.

        Islands alike in hardware and mesh compute the same bits; others drift apart by the last ones, which
        `same_state` mends at every save.

        Args:
          step: steps done.
          problem: what was found on this island's own devices, or "".
          kind: of this island's devices and mesh.
          params: of this island.
        """
        if self.islands is None:
            return problem or None
        prints = str(np.asarray(fingerprints(params)).tolist())
        group = [kind, 0 if self.seats is None else self.seats.stage]
        told = self.share(f"copies after step {step}", [problem, group, prints])
        if problems := [each for each, _, _ in told if each]:
            return problems[0]
        names = self.islands.control.names
        wrong = []
        for group in {str(group) for _, group, _ in told}:
            alike = [rank for rank, (_, other, _) in enumerate(told) if str(other) == group]
            wrong += [names[rank] for rank in odd([told[rank][2] for rank in alike], alike)]
        if not wrong:
            return None
        which = "has" if len(wrong) == 1 else "one of them has"
        return (
            f"after step {step} {', '.join(sorted(wrong))} {which} other parameters than islands of the same"
            " hardware: a device, or its memory, is faulty"
        )

    def close(self) -> None:
        """End what runs in the background."""
        if self.crossing is not None:
            self.crossing.close()


def _common(state: State, own_optimizers: bool) -> dict[str, Any]:
    names = ("step", "seed", "params", "model_state", *(() if own_optimizers else ("opt_state",)))
    return {name: getattr(state, name) for name in names}


def _broadcast(arrays: Any, group: Any) -> Any:
    return [group.broadcast(x) for x in arrays]
