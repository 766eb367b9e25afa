"""Check what a run needs before it starts: `runner.py` has the table of checks, and runs them.

A check collects plain facts on every rank, and evaluates the facts of all ranks as rows (`check.py`): status,
finding, and the change to make. `start.py` connects the ranks, and runs what may crash in child processes.
"""
