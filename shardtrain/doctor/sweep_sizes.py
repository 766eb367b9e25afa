"""The sizes of `--sweep`. No jax: the options of the command line are checked by it."""

SMALLEST_BYTES, FACTOR = 1024, 4
LARGEST_BYTES = 64 * 2**20
"""The first and, by default, the last size; each is four times the one before."""

MOST_BYTES = 2**30
"""Upper limit of the last size: a rank holds several arrays of it."""


def sizes(largest_bytes: int) -> list[int]:
    """Return the sizes of a sweep; the last one is `largest_bytes`.

    >>> sizes(20_000)
    [1024, 4096, 16384, 20000]
    """
    found = []
    num_bytes = SMALLEST_BYTES
    while num_bytes < largest_bytes:
        found.append(num_bytes)
        num_bytes *= FACTOR
    return [*found, largest_bytes]


def size_problem(largest_bytes: int) -> str | None:
    """Return why this size cannot be the last one; None if it can.

    >>> size_problem(100)
    '--largest-bytes is 100; use 1024 to 1073741824, such as 67108864 (64 MiB)'
    """
    if SMALLEST_BYTES <= largest_bytes <= MOST_BYTES:
        return None
    allowed = f"{SMALLEST_BYTES} to {MOST_BYTES}"
    return f"--largest-bytes is {largest_bytes}; use {allowed}, such as {LARGEST_BYTES} (64 MiB)"
