"""Check what a run needs before it starts: one module per check, with `collect` and `evaluate`.

`collect` runs on every rank and returns plain facts; `evaluate` converts the facts of all ranks to rows.
`check.py` defines the interface of a check; `runner.py` has the registry of checks and runs them.
"""
