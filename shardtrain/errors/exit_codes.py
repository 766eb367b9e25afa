"""Exit codes of a process, and those at which a scheduler restarts it. Values only."""

DONE = 0
FAILED = 1

USAGE_ERROR = 2
"""Something that was asked for cannot be: starting it again would say the same."""

TEMPORARY_FAILURE = 75
"""EX_TEMPFAIL of sysexits.h: a rank was lost or hung, or the time was over and the state is saved."""

STOPPED_BY_USR1 = 138
"""128 + SIGUSR1: asked to stop before the time limit, and saved."""

REQUEUED = (TEMPORARY_FAILURE, STOPPED_BY_USR1)
"""What a batch script puts back into the queue."""
