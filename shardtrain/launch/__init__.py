"""One command starts many ranks: a job -> command, environment, files, one file per environment.

`job.py` is what is asked, `local.py`, `mpi.py` and `slurm.py` write it down for a launcher, `supervise.py`
runs it, `rank.py` runs beside each rank, `outcome.py` says how it ended. No jax, no MPI library.
"""
