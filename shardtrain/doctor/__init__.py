"""What stands in the way of a run, looked for before it starts: one file a subject, `look` and `judge`.

`examine.py` has them all in one dict, `check.py` says what a check is. `look` gathers facts on every rank,
plain data; `judge` makes rows of the facts of all ranks, and knows nothing else.
"""
