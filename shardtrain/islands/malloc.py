"""Set glibc's malloc to keep the memory of large buffers between steps.

On a CPU, page faults took half of the time of a transfer (docs/benchmarks/bridge.md). No jax, no MPI.
"""

import ctypes
import os
import resource
from collections.abc import Mapping

MALLOC = "SHARDTRAIN_MALLOC"
"""Variable: the value `no` leaves malloc unchanged."""

RESERVE_BYTES = 4 << 30
"""Address space that may get huge pages. The system allocates only memory that is written."""

HUGE_PAGE_BYTES = 2 << 20

# malloc.h and sys/mman.h
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MADV_HUGEPAGE = 14


def tune_malloc(environ: Mapping[str, str] | None = None, reserve_bytes: int = RESERVE_BYTES) -> bool:
    """Set malloc to return no memory to the system, and ask for huge pages.

    The system zeroes a new buffer page by page when it is written. By default every buffer above 32 MB is
    new, and in arenas of threads every buffer above 64 MB, whatever the threshold is. Therefore one arena
    keeps all freed memory. Call this before threads that allocate start.

    Args:
      environ: environment variables; None means those of this process.
      reserve_bytes: address space that may get huge pages; 0 disables them.

    Returns:
      Whether the settings were made: False without glibc, or if the variable is `no`.

    Source: mallopt(3), madvise(2); malloc/arena.c of glibc 2.36, HEAP_MAX_SIZE.

    >>> tune_malloc({"SHARDTRAIN_MALLOC": "no"})
    False
    """
    if (os.environ if environ is None else environ).get(MALLOC) == "no":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
        libc.mallopt(option, value)
    if reserve_bytes and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        _reserve(libc, reserve_bytes)
    return True


def _reserve(libc: ctypes.CDLL, num_bytes: int) -> None:
    """Reserve address space for huge pages and free it: malloc takes later buffers from it."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    start = libc.malloc(num_bytes)
    if not start:
        return
    first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    # where the system has no huge pages this fails, and nothing is lost
    libc.madvise(first, (start + num_bytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE)
    libc.free(start)
