"""All checks in one dict, and how they run: on every rank, with a time limit each.

A check that fails or hangs becomes a row; a rank that does not come ends the examination, by name.
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
"""In the order in which they are made: what costs little and explains the others comes first."""

SLACK_SECONDS = 10.0
"""How much later than a check's limit a rank may say how it went."""


@dataclass(frozen=True, kw_only=True)
class Examined:
    """The result of all checks.

    Args:
      rows: of all checks that were made.
      seconds: check -> how long it took, on the rank where it took longest.
      answers: check -> name of a rank -> its facts, or how it failed.
      present: the ranks that were there to the end.
      hung: something did not end: the processes must be ended from outside.
    """

    rows: tuple[Row, ...]
    seconds: Mapping[str, float]
    answers: Mapping[str, Mapping[str, Facts]]
    present: tuple[int, ...]
    hung: bool

    @property
    def verdict(self) -> Verdict:
        """The worst of all rows."""
        return worst(row.verdict for row in self.rows)


def examine(
    checks: Mapping[str, Check], heres: Sequence[RankContext], slack_seconds: float = SLACK_SECONDS
) -> Examined:
    """Run checks; all ranks run the same ones.

    Args:
      checks: by name, in order.
      heres: of the examination itself, then of each check: a control of its own each.
      slack_seconds: see `SLACK_SECONDS`.

    Returns:
      The same on every rank, up to who is missing.
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
      `facts` (None: it failed), `failed` in words, whether it `hung`, and the `seconds` it took.
    """
    box: Facts = {"facts": None, "failed": None}

    def look() -> None:
        try:
            # as it arrives at the others, so that a judge sees no tuple here and a list there
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
    """Gather the answers of all ranks, and the error if some did not come."""
    if here.control.size == 1:
        return {0: mine}, None
    try:
        return dict(enumerate(here.control.all_gather(name, mine, patience_seconds))), None
    except RankTimeout as missing:
        return missing.found, missing


def judged(name: str, check: Check, here: RankContext, answers: Mapping[int, Facts]) -> list[Row]:
    """Return the rows of a check: those of its `judge`, and of the ranks where it failed."""
    called = here.control.names
    told = [
        RankFacts(rank=rank, name=called[rank], host=here.hosts[rank], facts=answer["facts"])
        for rank, answer in sorted(answers.items())
        if answer["facts"] is not None
    ]
    rows: list[Row] = []
    if told:
        try:
            rows = check.judge(told)
        except Exception as error:
            # of facts that nobody foresaw; the other checks shall still be seen
            found = f"the facts were not understood: {type(error).__name__}: {error}"
            rows = [Row(check=name, what="check", found=found, verdict="warning", do="see them with --json")]
    for hung in (True, False):
        failed = {r: a["failed"] for r, a in sorted(answers.items()) if a["failed"] and a["hung"] == hung}
        if failed:
            everyone = len(failed) == len(called) == 1
            found = (
                next(iter(failed.values())) if everyone else each((called[r], t) for r, t in failed.items())
            )
            do = check.if_it_hangs if hung else "the check could not be made there; its error says why"
            rows.append(
                Row(check=name, what="check", found=found, verdict="wrong" if hung else "warning", do=do)
            )
    return rows


def missing_row(name: str, text: str, left: Sequence[str]) -> Row:
    """Return the row for ranks that did not come.

    >>> missing_row("files", "rank 1 (host b) did not reach 'files' within 40 s", ["rates"]).found
    "rank 1 (host b) did not reach 'files' within 40 s; not looked at: rates"
    """
    rest = f"; not looked at: {some(left, 9)}" if left else ""
    do = (
        "its process is stopped, dead or cut off: look on that host with ps, dmesg and ping; then leave"
        " it out"
        " (--hosts) or start again"
    )
    return Row(check="ranks", what="missing", found=f"{text}{rest}", verdict="wrong", do=do)
