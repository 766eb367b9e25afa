"""Compute the expected time and cost of a run on hosts that may be revoked, by formulas and by simulation.

Source: Li, Walls and Guo 2020 (CM-DARE), https://arxiv.org/abs/2004.03072: time = steps / speed + saves +
revocations x (replacement and start-up), at the speed of the present hosts.
"""

import heapq
import math
import random
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shardtrain.plan.advice.checkpoint_interval import estimate_seconds

MOST_EVENTS = 2_000_000
"""Largest number of revocations to simulate in all runs, which takes a second or two."""


@dataclass(frozen=True, kw_only=True)
class RevocableRun:
    """A run on equal hosts that may be taken away.

    Args:
      hosts: number of hosts.
      work_seconds: seconds of the run on all hosts, without saves and revocations.
      interval_seconds: seconds of work between saves.
      save_seconds: seconds for which a save stops the training.
      host_life_seconds: mean seconds until a host is revoked, exponential.
      replace_seconds: seconds from a revocation until the new host trains: request, start of the machine and
        of the program, compilation.
      others: what the other hosts do in this time. "wait": the run restarts from its last save with the new
        host, as synchronous islands do. "continue": they train without it and lose no work.
      price_per_hour: price of a host; waiting hosts are paid, a revoked host is not.
    """

    hosts: int
    work_seconds: float
    interval_seconds: float
    save_seconds: float
    host_life_seconds: float
    replace_seconds: float = 0.0
    others: Literal["wait", "continue"] = "wait"
    price_per_hour: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds with all hosts, including saves, also the last one, as in Daly's formula."""
        return self.work_seconds * (1 + self.save_seconds / min(self.interval_seconds, self.work_seconds))


class Outcome(NamedTuple):
    """Time and cost of a run.

    Args:
      seconds: seconds from its start to its end.
      revocations: number of revoked hosts.
      cost: cost in the unit of the price.
    """

    seconds: float
    revocations: float
    cost: float


def compute_outcome(run: RevocableRun) -> Outcome:
    """Return the mean time, revocations and cost.

    If the other hosts wait, the run is one machine that fails as often as any of its hosts (Daly 2006); the
    revoked host is not paid until the run trains again, and another revocation restarts the replacement. If
    they continue, each host is present for life / (life + replacement) of the time, in a long run.

    >>> run = RevocableRun(hosts=8, work_seconds=36000, interval_seconds=1800, save_seconds=30,
    ...     host_life_seconds=86400, replace_seconds=300, price_per_hour=1.0)
    >>> round(compute_outcome(run).seconds), round(compute_outcome(replace(run, others="continue")).seconds)
    (41007, 36727)
    """
    if run.others == "wait":
        failure_seconds = run.host_life_seconds / run.hosts
        seconds = estimate_seconds(
            run.work_seconds, run.interval_seconds, run.save_seconds, failure_seconds, run.replace_seconds
        )
        # the run ends with its work, so it fails as often as its busy time and its restarts allow
        revocations = seconds / failure_seconds
        # an outage of mean M (e^(R / M) - 1) begins every M of the rest: it is 1 - e^(-R / M) of the time
        there = math.exp(-min(run.replace_seconds / failure_seconds, 700.0))
        paid = seconds * (run.hosts - 1 + there)
    else:
        there = run.host_life_seconds / (run.host_life_seconds + run.replace_seconds)
        seconds = run.busy_seconds / there
        revocations = seconds * there * run.hosts / run.host_life_seconds
        paid = seconds * run.hosts * there
    return Outcome(seconds, revocations, paid / 3600 * run.price_per_hour)


def simulate_outcome(run: RevocableRun, runs: int = 200, seed: int = 0) -> Outcome:
    """Return the mean time, revocations and cost of simulated runs.

    Args:
      run: the run.
      runs: number of runs to simulate.
      seed: seed of the random times.

    Raises:
      ValueError: too many revocations are expected.
    """
    events = runs * compute_outcome(run).revocations
    if events > MOST_EVENTS:
        raise ValueError(
            f"a simulation of {runs} runs was asked for: {events:.2g} revocations are expected; use at most"
            f" {MOST_EVENTS}, by fewer runs or hosts, or save more often"
        )
    draw = random.Random(seed)
    one = _simulate_waiting if run.others == "wait" else _simulate_continuing
    outcomes = [one(run, draw) for _ in range(runs)]
    return Outcome(*(sum(values) / runs for values in zip(*outcomes, strict=True)))


def _simulate_waiting(run: RevocableRun, draw: random.Random) -> Outcome:
    """Simulate hosts that all must be present: a revocation costs the work since the last save."""
    rate = run.hosts / run.host_life_seconds
    now, revocations, left, outages = 0.0, 0, run.work_seconds, 0.0
    fails_at = draw.expovariate(rate)
    while left > 1e-9 * run.work_seconds:
        piece = min(run.interval_seconds, left)
        # a shorter last piece has a shorter save, as in the formula
        ends_at = now + piece + run.save_seconds * piece / min(run.interval_seconds, run.work_seconds)
        if fails_at >= ends_at:
            now, left = ends_at, left - piece
            continue
        outages -= fails_at
        while fails_at < now or fails_at < ends_at:
            # a host that is lost during a restart begins the restart again
            revocations += 1
            restarts_at = fails_at + run.replace_seconds
            fails_at += draw.expovariate(rate)
            if fails_at >= restarts_at:
                now = restarts_at
                break
            ends_at = restarts_at
        outages += now
    paid = now * run.hosts - outages
    return Outcome(now, revocations, paid / 3600 * run.price_per_hour)


def _simulate_continuing(run: RevocableRun, draw: random.Random) -> Outcome:
    """Simulate hosts that are revoked and replaced: the speed is proportional to the present hosts."""
    events = [(draw.expovariate(1 / run.host_life_seconds), True) for _ in range(run.hosts)]
    heapq.heapify(events)
    now, revocations, left, there, paid = 0.0, 0, run.busy_seconds, run.hosts, 0.0
    while True:
        at, is_lost = heapq.heappop(events)
        done = (at - now) * there / run.hosts
        if done >= left and there:
            ends = now + left * run.hosts / there
            paid += (ends - now) * there
            return Outcome(ends, revocations, paid / 3600 * run.price_per_hour)
        now, left, paid = at, left - done, paid + (at - now) * there
        there += -1 if is_lost else 1
        revocations += is_lost
        wait = run.replace_seconds if is_lost else draw.expovariate(1 / run.host_life_seconds)
        heapq.heappush(events, (at + wait, not is_lost))


def best_hosts(run: RevocableRun, counts: list[int]) -> list[tuple[int, Outcome]]:
    """Return the outcome for each number of hosts, for the same total work.

    Args:
      run: the run; its work is for its own number of hosts.
      counts: numbers of hosts.
    """
    host_seconds = run.work_seconds * run.hosts
    return [
        (count, compute_outcome(replace(run, hosts=count, work_seconds=host_seconds / count)))
        for count in counts
    ]
