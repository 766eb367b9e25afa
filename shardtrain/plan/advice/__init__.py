"""Formulas that answer questions about a run, as pure functions of numbers. Each cites its source.

Next: `report/advice.py`, which formats the answers for `shardtrain advise`.
"""
