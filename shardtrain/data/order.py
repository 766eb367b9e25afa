"""Compute the random order of the samples of an epoch, block by block, without a stored permutation.

A block cipher of 4 rounds permutes the indices; an index that it maps outside of the samples is mapped again
(cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002, section 3). Saved positions
refer to this order: its numbers never change. Next: `batches.py`.
"""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

ROUNDS = 4
BLOCK = 2**14
"""Number of positions whose samples are computed together, as each call of numpy has a fixed cost."""

LEAST_BITS = 8
"""Smallest number of bits of half an index, so that small permutations are random too."""


@lru_cache(maxsize=256)  # a mixture reads its sources in turn; each order keeps 256 kB at most
def epoch_order(num_samples: int, seed: int, epoch: int) -> Callable[[int], int]:
    """Return the order of an epoch.

    Args:
      num_samples: length of the source.
      seed: 0 or more.
      epoch: 0 or more.

    Returns:
      position in the epoch -> sample of the source.

    >>> order = epoch_order(5, seed=0, epoch=0)
    >>> sorted(order(position) for position in range(5))
    [0, 1, 2, 3, 4]
    """
    # the sum of seed and epoch would make epoch 1 of seed 0 equal to epoch 0 of seed 1
    keys = round_keys(int(np.random.SeedSequence((seed, epoch)).generate_state(1)[0]))
    # the bits of the highest index, made odd as always, so that saved positions stay those of their samples
    bits = max((((num_samples - 1) | 1).bit_length() + 1) // 2, LEAST_BITS)

    # threads that load batches ahead may be in the next block
    @lru_cache(maxsize=2)
    def block(number: int) -> np.ndarray:
        return find_samples(
            range(number * BLOCK, min((number + 1) * BLOCK, num_samples)), num_samples, keys, bits
        )

    def sample(position: int) -> int:
        assert 0 <= position < num_samples, (position, num_samples)
        number, place = divmod(position, BLOCK)
        return int(block(number)[place])

    return sample


def find_samples(positions: range, num_samples: int, keys: list[int], bits: int) -> np.ndarray:
    """Return the samples at some positions: encrypt each until it is below the number of samples.

    Args:
      positions: positions below `num_samples`.
      num_samples: number of samples, at most 4 ** `bits`.
      keys: one key for each round.
      bits: number of bits of half an index.

    Returns:
      Unsigned integers (len(positions),).
    """
    dtype = np.min_scalar_type(4**bits - 1)
    if bits == LEAST_BITS:
        # few samples may be far apart in the cycles, so all indices take each step, twice as far as the last
        found = encrypt(np.arange(4**bits, dtype=dtype), keys, bits)
        while np.any(found[positions.start : positions.stop] >= num_samples):
            found = np.where(found < num_samples, found, np.take(found, found))
        return found[positions.start : positions.stop].copy()
    found = encrypt(np.arange(positions.start, positions.stop, dtype=dtype), keys, bits)
    while len(outside := np.flatnonzero(found >= num_samples)):
        found[outside] = encrypt(found[outside], keys, bits)
    return found


def encrypt(indices: np.ndarray, keys: list[int], bits: int) -> np.ndarray:
    """Permute the numbers below 4 ** `bits` by rounds of the cipher Simon.

    Args:
      indices: unsigned integers (n,), of 2 * `bits` bits or more.
      keys: one key for each round; an even number of rounds.
      bits: number of bits of half an index, 8 to 32.

    References:
      Beaulieu et al., The Simon and Speck Families of Lightweight Block Ciphers, 2013, section 3.
    """
    mask = 2**bits - 1

    def rotate(half: np.ndarray, by: int) -> np.ndarray:
        return (half << by | half >> (bits - by)) & mask

    def mix(half: np.ndarray) -> np.ndarray:
        return rotate(half, 1) & rotate(half, 8) ^ rotate(half, 2)

    left, right = indices >> bits, indices & mask
    for key in keys:
        left, right = right, left ^ mix(right) ^ (key & mask)
    return left << bits | right


def round_keys(seed: int) -> list[int]:
    """Return the keys of the rounds, of 32 bits: four numbers of `std::seed_seq` of C++.

    References:
      ISO C++ 2011, section 26.5.7.1, paragraph 8, with n = 4, s = 1, p = 1 and q = 2.

    >>> round_keys(5489)
    [3078589754, 2126075023, 4255833496, 582627599]
    """
    keys = [0x8B8B8B8B] * ROUNDS
    for step in range(2 * ROUNDS):
        here, near, far, before = ((step + by) % ROUNDS for by in (0, 1, 2, -1))
        if step < ROUNDS:
            mixed = keys[here] ^ keys[near] ^ keys[before]
            first = 1664525 * (mixed ^ mixed >> 27) % 2**32
            second = first + (1, here + seed, here, here)[step]
            keys[near], keys[far] = (keys[near] + first) % 2**32, (keys[far] + second) % 2**32
        else:
            mixed = (keys[here] + keys[near] + keys[before]) % 2**32
            first = 1566083941 * (mixed ^ mixed >> 27) % 2**32
            second = first - here
            keys[near], keys[far] = keys[near] ^ first, keys[far] ^ second % 2**32
        keys[here] = second % 2**32
    return keys
