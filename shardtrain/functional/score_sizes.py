"""Sizes of the blocks of scores of attention over context, as values. No jax.

Next: `score_blocks.py` and `ring_attention.py`, which compute them.
"""

KEYS_AT_ONCE = 1024
"""Scores exist for this many keys at a time."""

LOOPED_KEYS = 256
"""From this many keys on there are at least two such blocks, computed by a loop: compilers give the scores of
all steps of a ring memory of their own, at once, but those of loops the same."""

LEAST_KEYS = 32
"""Keys that fit one block stay in one where a loop would have fewer at a time, as of a prime number."""


def num_key_blocks(num_keys: int, at_once: int = KEYS_AT_ONCE) -> int:
    """Return the number of equal blocks of keys whose scores exist one after the other.

    >>> num_key_blocks(128), num_key_blocks(1024), num_key_blocks(1025), num_key_blocks(4096)
    (1, 2, 5, 4)

    A loop over a few keys at a time takes longer than the memory that it saves is worth:

    >>> num_key_blocks(257), num_key_blocks(301)
    (1, 7)
    """
    least = max(-(-num_keys // at_once), 2 if num_keys >= LOOPED_KEYS else 1)
    found = next(n for n in range(least, num_keys + 1) if num_keys % n == 0)
    return 1 if num_keys <= at_once and num_keys // found < LEAST_KEYS else found


def window_reach(num: int, num_queries: int, window: int) -> int | None:
    """Return how many halves of shards before its own a query of a contiguous ring sees at most.

    Args:
      num: devices of the ring.
      num_queries: of a device, even.
      window: how many keys a query sees at most, its own and those just before it.

    Returns:
      None where a balanced ring computes less.

    >>> window_reach(4, 8, window=5), window_reach(4, 8, window=21)
    (1, None)
    """
    # the first query of a part, d parts behind, is (d - 1) * size + 1 places from the nearest key
    reach = min(2 * num - 1, 1 + (window - 2) // (num_queries // 2)) if window > 1 else 0
    # of each two parts of queries, reach + 1 of keys; the balanced ring computes 2 num + 1 of these blocks
    return reach if 2 * (reach + 1) < 2 * num + 1 else None
