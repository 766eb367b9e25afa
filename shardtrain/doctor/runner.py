"""Run the registered checks on all ranks, each with a time limit.

A check that fails or hangs becomes a row of the table. A missing rank becomes a row, and ends the checks.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardtrain.doctor import binding, devices, files, links, mpi, names, ports, rates, versions
from shardtrain.doctor.check import Check, Facts, RankContext, RankFacts, Row, Status, join_texts, worst
from shardtrain.islands.rank_timeout import RankTimeout
from shardtrain.system.excerpts import some

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
class CheckResults:
    """The results of all checks.

    Args:
      rows: the rows of all checks that ran.
      seconds: check -> its duration on the slowest rank.
      facts: check -> name of a rank -> its facts.
      present: the ranks that took part in the last check.
      hung: whether a check did not end, so that the processes must be killed.
    """

    rows: tuple[Row, ...]
    seconds: Mapping[str, float]
    facts: Mapping[str, Mapping[str, Facts]]
    present: tuple[int, ...]
    hung: bool

    @property
    def status(self) -> Status:
        """The worst status of all rows."""
        return worst(row.status for row in self.rows)


def run_checks(
    checks: Mapping[str, Check], contexts: Sequence[RankContext], slack_seconds: float = SLACK_SECONDS
) -> CheckResults:
    """Run the checks; all ranks must run the same ones.

    Args:
      checks: name -> check, in order.
      contexts: the context that gathers results, then one for each check, with its own control channel.
      slack_seconds: see `SLACK_SECONDS`.

    Returns:
      The same result on every rank, unless a rank is missing.
    """
    context, *others = contexts
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    facts: dict[str, dict[str, Facts]] = {}
    present, hung = list(range(context.control.size)), False
    for (name, check), own in zip(checks.items(), others, strict=True):
        outcome = collect_in_thread(check, own)
        outcomes, missing = _gather_outcomes(context, name, outcome, check.limit_seconds + slack_seconds)
        hung = hung or any(one["hung"] for one in outcomes.values())
        seconds[name] = max(one["seconds"] for one in outcomes.values())
        facts[name] = {context.control.names[rank]: one["facts"] for rank, one in outcomes.items()}
        rows += evaluate_check(name, check, context, outcomes)
        if missing is not None:
            left = list(checks)[list(checks).index(name) + 1 :]
            rows.append(report_missing(name, str(missing), left))
            present, hung = sorted(outcomes), True
            break
    return CheckResults(rows=tuple(rows), seconds=seconds, facts=facts, present=tuple(present), hung=hung)


def collect_in_thread(check: Check, context: RankContext) -> Facts:
    """Collect the facts of a check in a thread that is abandoned at its time limit.

    Returns:
      The outcome: `facts` (None if the check failed), `failed` (the error text, or None), `hung`, `seconds`.
    """
    box: Facts = {"facts": None, "failed": None}

    def collect() -> None:
        try:
            # through JSON, as facts arrive from other ranks: tuples become lists on every rank
            box["facts"] = json.loads(json.dumps(check.collect(context)))
        except Exception as error:
            box["failed"] = f"{type(error).__name__}: {error}"

    began = time.monotonic()
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(check.limit_seconds)
    hung = thread.is_alive()
    failed = f"it did not end within {check.limit_seconds:.0f} s" if hung else box["failed"]
    facts = None if hung else box["facts"]
    return {"facts": facts, "failed": failed, "hung": hung, "seconds": time.monotonic() - began}


def _gather_outcomes(
    context: RankContext, name: str, outcome: Facts, timeout_seconds: float
) -> tuple[dict[int, Facts], Any]:
    """All-gather the outcomes; also return the timeout error if a rank is missing."""
    if context.control.size == 1:
        return {0: outcome}, None
    try:
        return dict(enumerate(context.control.all_gather(name, outcome, timeout_seconds))), None
    except RankTimeout as missing:
        return missing.received, missing


def evaluate_check(name: str, check: Check, context: RankContext, outcomes: Mapping[int, Facts]) -> list[Row]:
    """Return the rows of a check, and rows for the ranks on which it failed or hung."""
    names = context.control.names
    facts = [
        RankFacts(rank=rank, name=names[rank], host=context.hosts[rank], facts=one["facts"])
        for rank, one in sorted(outcomes.items())
        if one["facts"] is not None
    ]
    rows: list[Row] = []
    if facts:
        try:
            rows = check.evaluate(facts)
        except Exception as error:
            # unexpected facts must not hide the results of the other checks
            finding = f"the facts were not understood: {type(error).__name__}: {error}"
            rows = [Row("check", finding, "warning", "see them with --json")]
    # then the ranks on which the check itself failed or hung
    for hung, fix in ((True, check.if_it_hangs), (False, "the check could not run there; see its error")):
        failed = {r: a["failed"] for r, a in sorted(outcomes.items()) if a["failed"] and a["hung"] == hung}
        if failed:
            texts = ((names[rank], text) for rank, text in failed.items())
            rows.append(Row("check", join_texts(texts), "wrong" if hung else "warning", fix))
    return [replace(row, check=row.check or name) for row in rows]


def report_missing(name: str, text: str, left: Sequence[str]) -> Row:
    """Return the row for missing ranks.

    >>> report_missing("files", "rank 1 (host b) did not reach 'files' within 40 s", ["rates"]).finding
    "rank 1 (host b) did not reach 'files' within 40 s; not checked: rates"
    """
    rest = f"; not checked: {some(left, 9)}" if left else ""
    fix = (
        "its process is stopped, dead or unreachable: use ps, dmesg and ping on that host; then exclude it"
        " (--hosts) or start again"
    )
    return Row("missing", f"{text}{rest}", "wrong", fix, check="ranks")
