"""Checks before a run: one file per subject, each with `look` (collect facts) and `judge` (rows from them).

`examine.py` has them all in one dict, `check.py` says what a check is. `look` gathers facts on every rank,
plain data; `judge` makes rows of the facts of all ranks, and knows nothing else.
"""
