"""Answers to questions before and during a run, as pure functions of numbers: no jax, no devices.

Each function cites its source. Next: `report/advice.py`, which formats them for `shardtrain advise`.
"""
