"""Select the environment variables that may be written to files, by an allow list without secrets. No jax."""

import re
from collections.abc import Mapping

NAMES = (
    *("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_VISIBLE_CHIPS"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("GLIBC_TUNABLES", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONWARNINGS"),
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK"),
    *("SLURM_MPI_TYPE", "SLURM_CPU_BIND_TYPE", "SLURM_RESTART_COUNT"),
    *("FLUX_JOB_ID", "PBS_JOBID", "LSB_JOBID"),
)
"""Allowed variables by name."""

PREFIXES = (
    *("JAX_", "XLA_PYTHON_", "NCCL_", "SHARDTRAIN_"),
    *("MPI4JAX_", "MPI4PY_", "MPICH_", "MPIR_CVAR_", "OMPI_MCA_", "I_MPI_", "MV2_", "UCX_", "FI_"),
)
"""Allowed prefixes: variables of jax, of communication libraries and of this package."""

SECRET = re.compile(r"TOKEN|SECRET|PASS|CREDENTIAL|AUTH|PRIVATE|(^|_)KEY(_|$)|COOKIE", re.IGNORECASE)
"""Pattern of names that are never shown, whatever their prefix is."""

LONGEST = 1000
"""Largest number of characters of a value."""


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the allow list that are set, sorted, without names and passwords in URLs.

    >>> shown_variables({"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "AWS_SECRET_ACCESS_KEY": "x"})
    {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': ''}
    >>> shown_variables({"NCCL_AUTH_TOKEN": "x", "JAX_CACHE": "s3://me:secret@host/cache"})
    {'JAX_CACHE': 's3://***@host/cache'}
    """
    return {name: _value(environ[name]) for name in sorted(environ) if is_shown(name)}


def is_shown(name: str) -> bool:
    """Return whether a variable is on the allow list."""
    return (name in NAMES or name.startswith(PREFIXES)) and not SECRET.search(name)


def _value(text: str) -> str:
    text = re.sub(r"(?<=://)[^/\s]*@", "***@", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text)} characters)"
