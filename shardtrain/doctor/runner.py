"""Run the registered checks on all ranks, each with a time limit, and format the table of their rows.

A check that fails or hangs becomes a row of the table. A missing rank becomes a row, and ends the checks.
"""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from shardtrain.doctor import binding, devices, files, hosts, links, mpi, rates, versions
from shardtrain.doctor.check import STATUSES, Facts, RankContext, RankFacts, Row, Status, join_texts
from shardtrain.islands.rank_timeout import RankTimeout
from shardtrain.system.excerpts import some
from shardtrain.system.terminal import printable


@dataclass(frozen=True)
class Check:
    """A check: a function that collects its facts, and one that converts them to rows.

    Args:
      collect: collects facts; runs on every rank at the same time.
      evaluate: returns the rows for the facts of all ranks on which `collect` succeeded (at least one).
      limit_seconds: time limit of `collect`.
      if_it_hangs: the fix if `collect` exceeds its time limit.
      measures: whether it is a slow measurement, which --quick skips.
    """

    collect: Callable[[RankContext], Facts]
    evaluate: Callable[[Sequence[RankFacts]], list[Row]]
    limit_seconds: float
    if_it_hangs: str
    measures: bool = False


NETWORK = (
    "messages do not pass: see ports and mpi; MPI may have chosen a network that hosts do not share"
    " (MPICH: UCX_NET_DEVICES or FI_PROVIDER=tcp; Open MPI: --mca btl_tcp_if_include)"
)

CHECKS: Mapping[str, Check] = {
    "names": Check(
        hosts.collect_names, hosts.evaluate_names, 60.0,
        "name servers do not answer: correct /etc/resolv.conf, or put the hosts into /etc/hosts",
    ),
    "ports": Check(hosts.collect_ports, hosts.evaluate_ports, 90.0, "see names and the host's firewall"),
    "mpi": Check(
        mpi.collect, mpi.evaluate, mpi.CHILD_SECONDS + mpi.PROBE_SECONDS + 30.0,
        "a child process could not be ended: look for processes in state D on that host",
    ),
    "versions": Check(
        versions.collect, versions.evaluate, 60.0,
        "Python's environment is on a file system that does not answer",
    ),
    "devices": Check(
        devices.collect, devices.evaluate, devices.CHILD_SECONDS + 60.0,
        "a GPU's driver hangs: nvidia-smi, dmesg; a reboot of that host is usual",
    ),
    "binding": Check(
        binding.collect, binding.evaluate, 20.0,
        "/proc or /sys does not answer: the kernel of that host has a problem, see dmesg",
    ),
    "files": Check(
        files.collect, files.evaluate, 90.0,
        "the run folder's file system does not answer: see mount, dmesg, the server; or another --run-dir",
    ),
    "rates": Check(
        rates.collect, rates.evaluate, 180.0,
        "a device does not answer: nvidia-smi and dmesg there; see the row of devices", measures=True,
    ),
    "links": Check(links.collect, links.evaluate, 180.0, NETWORK, measures=True),
}  # fmt: skip
"""Name -> check, in the order in which they run: cheap ones, which explain failures of others, come first."""

SLACK_SECONDS = 10.0
"""Seconds after the time limit of a check in which a rank must send its result."""

STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "wrong": "bold red"}
"""Status -> rich style."""


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
        return STATUSES[max((STATUSES.index(row.status) for row in self.rows), default=0)]


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
    control = contexts[0].control
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    facts: dict[str, dict[str, Facts]] = {}
    present, hung = list(range(control.size)), False
    for (name, check), own in zip(checks.items(), contexts[1:], strict=True):
        outcome, missing = collect_in_thread(check, own), None
        try:
            outcomes = dict(enumerate(control.all_gather(name, outcome, check.limit_seconds + slack_seconds)))
        except RankTimeout as timeout:
            outcomes, missing = timeout.received, str(timeout)
        hung = hung or any(one["hung"] for one in outcomes.values())
        seconds[name] = max(one["seconds"] for one in outcomes.values())
        facts[name] = {control.names[rank]: one["facts"] for rank, one in outcomes.items()}
        rows += evaluate_check(name, check, contexts[0], outcomes)
        if missing is not None:
            rows.append(report_missing(missing, list(checks)[len(seconds) :]))
            present, hung = sorted(outcomes), True
            break
    return CheckResults(rows=tuple(rows), seconds=seconds, facts=facts, present=tuple(present), hung=hung)


def collect_in_thread(check: Check, context: RankContext) -> Facts:
    """Collect the facts of a check in a thread that is abandoned at its time limit.

    Returns:
      The outcome: `facts` (None if the check failed), `failed` (the error text, or None), `hung`, `seconds`.
    """
    collected: Facts = {"facts": None, "failed": None}

    def collect() -> None:
        try:
            # through JSON, as facts arrive from other ranks: tuples become lists on every rank
            collected["facts"] = json.loads(json.dumps(check.collect(context)))
        except Exception as error:
            collected["failed"] = f"{type(error).__name__}: {error}"

    began = time.monotonic()
    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(check.limit_seconds)
    hung = thread.is_alive()
    found = (
        {"facts": None, "failed": f"it did not end within {check.limit_seconds:.0f} s"} if hung else collected
    )
    return {**found, "hung": hung, "seconds": time.monotonic() - began}


def evaluate_check(name: str, check: Check, context: RankContext, outcomes: Mapping[int, Facts]) -> list[Row]:
    """Return the rows of a check, and rows for the ranks on which it failed or hung."""
    names = context.control.names
    found = {rank: one["facts"] for rank, one in sorted(outcomes.items()) if one["facts"] is not None}
    rows: list[Row] = []
    if found:
        try:
            rows = check.evaluate([RankFacts(r, names[r], context.hosts[r], one) for r, one in found.items()])
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


def report_missing(text: str, left: Sequence[str]) -> Row:
    """Return the row for missing ranks.

    >>> report_missing("rank 1 (host b) did not reach 'files' within 40 s", ["rates"]).finding
    "rank 1 (host b) did not reach 'files' within 40 s; not checked: rates"
    """
    rest = f"; not checked: {some(left, 9)}" if left else ""
    fix = (
        "its process is stopped, dead or unreachable: use ps, dmesg and ping on that host; then exclude it"
        " (--hosts) or start again"
    )
    return Row("missing", f"{text}{rest}", "wrong", fix, check="ranks")


def doctor_table(rows: Sequence[Row], seconds: Mapping[str, float]) -> Group:
    """Return the table of all rows, a summary and the duration of each check, for a rich console."""
    table = Table(box=box.SIMPLE_HEAD)
    for name, share in (("check", None), ("finding", 3), ("status", None), ("what to do", 3)):
        table.add_column(name, ratio=share, overflow="fold", no_wrap=share is None)
    for number, row in enumerate(rows):
        if number and row.check != rows[number - 1].check:
            table.add_section()
        texts = (f"{row.check}: {row.item}", printable(row.finding), row.status, row.fix)
        table.add_row(*(Text(text, style=STYLES.get(text, "")) for text in texts))
    times = ", ".join(f"{name} {time:.1f}" for name, time in seconds.items())
    took = f"took {sum(seconds.values()):.1f} s: {times}"
    return Group(table, Text(summary([row.status for row in rows])), Text(took))


def summary(statuses: Sequence[str]) -> str:
    """Format the number of rows of each status, the worst first.

    >>> summary(["ok", "warning", "ok"]), summary(["ok"]), summary(["wrong", "wrong"])
    ('1 warning, 2 ok', 'nothing is wrong: 1 ok', '2 wrong')
    """
    counts = Counter(statuses)
    text = ", ".join(f"{counts[status]} {status}" for status in reversed(STATUSES) if counts[status])
    return text if counts["wrong"] or counts["warning"] else f"nothing is wrong: {text}"
