"""Start many ranks by one command: each launcher converts a job to command, environment and files.

`job.py` defines a job, `registry.py` lists the launchers, `supervise.py` runs a launch, `rank.py` keeps the
log of each rank, `outcome.py` reports how the launch ended. No jax, no MPI library.
"""
