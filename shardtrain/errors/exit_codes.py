"""Define the exit codes of a process, and those at which a scheduler restarts it. Values only."""

DONE = 0
FAILED = 1

USAGE_ERROR = 2
"""A mistake in the options or inputs: another start would fail with the same message."""

TEMPORARY_FAILURE = 75
"""EX_TEMPFAIL of sysexits.h: a rank was lost or hung, or the time limit was over and the state is saved."""

STOPPED_BY_USR1 = 138
"""128 + SIGUSR1: stopped on request before the time limit, with the state saved."""

REQUEUED = (TEMPORARY_FAILURE, STOPPED_BY_USR1)
"""Exit codes at which a batch script requeues its job."""
