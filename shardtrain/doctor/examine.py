"""The registry of checks, and their execution on all ranks with a time limit for each.

A check that fails or hangs becomes a row of the table; a missing rank ends the checks and is named.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardtrain.doctor import binding, devices, files, links, mpi, names, ports, rates, versions
from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, Verdict, each, some, worst
from shardtrain.islands.rank_timeout import RankTimeout

CHECKS: Mapping[str, Check] = {
    "names": names.CHECK,
    "ports": ports.CHECK,
    "mpi": mpi.CHECK,
    "versions": versions.CHECK,
    "devices": devices.CHECK,
    "binding": binding.CHECK,
    "files": files.CHECK,
    "rates": rates.CHECK,
    "links": links.CHECK,
}
"""Name -> check, in the order in which they run: cheap ones, which explain failures of others, come first."""

SLACK_SECONDS = 10.0
"""Seconds after the time limit of a check in which a rank must send its result."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The result of all checks.

    Args:
      rows: the rows of all checks that ran.
      seconds: check -> its duration on the slowest rank.
      answers: check -> name of a rank -> its facts.
      present: the ranks that took part in the last check.
      hung: whether a check did not end, so that the processes must be killed.
    """

    rows: tuple[Row, ...]
    seconds: Mapping[str, float]
    answers: Mapping[str, Mapping[str, Facts]]
    present: tuple[int, ...]
    hung: bool

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all rows."""
        return worst(row.verdict for row in self.rows)


def examine(
    checks: Mapping[str, Check], heres: Sequence[RankContext], slack_seconds: float = SLACK_SECONDS
) -> Examined:
    """Run the checks; all ranks must run the same ones.

    Args:
      checks: name -> check, in order.
      heres: the context for gathering results, then one for each check; each has its own control channel.
      slack_seconds: see `SLACK_SECONDS`.

    Returns:
      The same result on every rank, unless a rank is missing.
    """
    here, *others = heres
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    kept: dict[str, dict[str, Facts]] = {}
    present, hung = list(range(here.control.size)), False
    for (name, check), own in zip(checks.items(), others, strict=True):
        mine = attempt(check, own)
        answers, missing = _gather(here, name, mine, check.limit_seconds + slack_seconds)
        hung = hung or any(answer["hung"] for answer in answers.values())
        seconds[name] = max(answer["seconds"] for answer in answers.values())
        kept[name] = {here.control.names[rank]: answer["facts"] for rank, answer in answers.items()}
        rows += judged(name, check, here, answers)
        if missing is not None:
            left = list(checks)[list(checks).index(name) + 1 :]
            rows.append(missing_row(name, str(missing), left))
            present, hung = sorted(answers), True
            break
    return Examined(rows=tuple(rows), seconds=seconds, answers=kept, present=tuple(present), hung=hung)


def attempt(check: Check, here: RankContext) -> Facts:
    """Collect the facts of a check in a thread that is abandoned at its time limit.

    Returns:
      `facts` (None: the check failed), the error as text in `failed`, whether it `hung`, and its `seconds`.
    """
    box: Facts = {"facts": None, "failed": None}

    def look() -> None:
        try:
            # through JSON, as facts arrive from other ranks: tuples become lists on every rank
            box["facts"] = json.loads(json.dumps(check.look(here)))
        except Exception as error:
            box["failed"] = f"{type(error).__name__}: {error}"

    began = time.monotonic()
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(check.limit_seconds)
    hung = thread.is_alive()
    failed = f"it did not end within {check.limit_seconds:.0f} s" if hung else box["failed"]
    facts = None if hung else box["facts"]
    return {"facts": facts, "failed": failed, "hung": hung, "seconds": time.monotonic() - began}


def _gather(
    here: RankContext, name: str, mine: Facts, patience_seconds: float
) -> tuple[dict[int, Facts], Any]:
    """All-gather the answers, and return them with the timeout error if a rank is missing."""
    if here.control.size == 1:
        return {0: mine}, None
    try:
        return dict(enumerate(here.control.all_gather(name, mine, patience_seconds))), None
    except RankTimeout as missing:
        return missing.found, missing


def judged(name: str, check: Check, here: RankContext, answers: Mapping[int, Facts]) -> list[Row]:
    """Return the rows of a check: those of its `judge`, and of the ranks where it failed."""
    names = here.control.names
    facts = [
        RankFacts(rank=rank, name=names[rank], host=here.hosts[rank], facts=answer["facts"])
        for rank, answer in sorted(answers.items())
        if answer["facts"] is not None
    ]
    rows: list[Row] = []
    if facts:
        try:
            rows = check.judge(facts)
        except Exception as error:
            # unexpected facts must not hide the results of the other checks
            found = f"the facts were not understood: {type(error).__name__}: {error}"
            rows = [Row(check=name, what="check", found=found, verdict="warning", do="see them with --json")]
    # then the ranks on which the check itself failed or hung
    for hung in (True, False):
        failed = {r: a["failed"] for r, a in sorted(answers.items()) if a["failed"] and a["hung"] == hung}
        if failed:
            everyone = len(failed) == len(names) == 1
            found = (
                next(iter(failed.values())) if everyone else each((names[r], t) for r, t in failed.items())
            )
            do = check.if_it_hangs if hung else "the check could not run there; see its error"
            rows.append(
                Row(check=name, what="check", found=found, verdict="wrong" if hung else "warning", do=do)
            )
    return rows


def missing_row(name: str, text: str, left: Sequence[str]) -> Row:
    """Return the row for missing ranks.

    >>> missing_row("files", "rank 1 (host b) did not reach 'files' within 40 s", ["rates"]).found
    "rank 1 (host b) did not reach 'files' within 40 s; not checked: rates"
    """
    rest = f"; not checked: {some(left, 9)}" if left else ""
    do = (
        "its process is stopped, dead or cut off: look on that host with ps, dmesg and ping; then leave"
        " it out"
        " (--hosts) or start again"
    )
    return Row(check="ranks", what="missing", found=f"{text}{rest}", verdict="wrong", do=do)
