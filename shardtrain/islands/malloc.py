"""Settings of glibc's malloc that keep the memory of large buffers between steps.

On a CPU, page faults were half of the time of a transfer (docs/benchmarks/bridge.md). No jax, no MPI.
"""

import ctypes
import os
import resource
from collections.abc import Mapping

MALLOC = "SHARDTRAIN_MALLOC"
"""`no` in this variable of the environment leaves malloc as it is."""

RESERVE_BYTES = 4 << 30
"""Address space that may get huge pages. Memory that is not written to is not allocated."""

HUGE_PAGE_BYTES = 2 << 20

# malloc.h and sys/mman.h
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
MADV_HUGEPAGE = 14


def tune_malloc(environ: Mapping[str, str] | None = None, reserve_bytes: int = RESERVE_BYTES) -> bool:
    """Set malloc to return no memory to the system, and ask for huge pages.

    A buffer that comes straight from the system is zeroed page by page when it is written: by default that
    is every buffer above 32 MB, and every one above 64 MB of a thread's own arena, whatever the threshold.
    So there is one arena, which keeps what was freed. Must be called before threads that allocate begin.

    Args:
      environ: environment variables; by default those of this process.
      reserve_bytes: how much of what malloc will give out may lie on huge pages; 0 asks for none.

    Returns:
      Whether it was done: not where malloc is not glibc's, or the environment says no.

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
