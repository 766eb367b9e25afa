"""Checks before a run: one module per check, with `collect` (facts of a rank) and `evaluate` (table rows).

`collect` runs on every rank and returns plain data. `evaluate` gets the facts of all ranks, and nothing else.
`check.py` defines the interface of a check; `runner.py` has the registry of checks and runs them.
"""
