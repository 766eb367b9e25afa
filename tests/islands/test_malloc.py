"""What malloc gave out once costs no page faults again, in any thread."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, resource, sys, threading
from shardtrain.islands.malloc import tune_malloc
NUM_BYTES = 200 << 20  # above all that a thread's own arena can hold
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
found = []

def use():
    start = libc.malloc(NUM_BYTES)
    ctypes.memset(start, 1, NUM_BYTES)
    libc.free(start)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

print(tune_malloc(reserve_bytes=int(sys.argv[1])))
for target in (use, use, use):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
print(found[2] - found[1])
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("Rss")))
"""


@pytest.fixture(scope="module")
def run():
    def run(reserve_bytes: int, malloc: str = "") -> tuple[str, int, int]:
        """(what `tune_malloc` said, page faults of the second use of 200 MB, kB resident in the end)."""
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(reserve_bytes)],
            env={"SHARDTRAIN_MALLOC": malloc},
            capture_output=True,
            text=True,
            check=True,
        )
        said, faults, resident = done.stdout.split()
        return said, int(faults), int(resident)

    return run


def test_address_space_for_huge_pages_takes_no_memory(run):
    said, faults, resident = run(4 << 30)
    assert said == "True"
    assert faults < 100
    assert resident < 1 << 20  # kB


def test_the_environment_says_no(run):
    said, faults, _ = run(4 << 30, malloc="no")
    assert said == "False"
    # 200 MB in pages of at most 4 kB each, or fewer huge ones, all anew
    assert faults >= 100


def test_no_address_space_is_taken_where_it_is_limited():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + PROGRAM, str(8 << 30)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == "True"
