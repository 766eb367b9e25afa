"""One command starts many ranks: a job becomes command, environment and files, by one file per launcher.

`job.py` is what to run, `registry.py` lists the launchers, `supervise.py` runs a launch, `rank.py` runs
beside each rank, `outcome.py` reports how it ended. No jax, no MPI library.
"""
