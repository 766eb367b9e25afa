"""Split a whole number into whole shares in proportion to weights. No jax.

Used for the rows of a batch over islands (in multiples that each island can shard) and for layers over
stages (at least one each). The arithmetic is exact, so every host computes the same shares.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from shardtrain.errors.messages import refuse


def shares(
    total: int,
    weights: Sequence[float],
    *,
    minimum: int = 0,
    multiples: int | Sequence[int] = 1,
    what: str = "rows",
) -> list[int]:
    """Split a whole number in proportion to weights.

    Uses largest remainders (Hamilton's method): each share is its proportional part rounded down, and the
    remaining units go one by one to the largest remainders, with ties to the lower index. This minimises the
    squared distance from the proportional parts, which is also minimised for unequal multiples.

    Args:
      total: the number to split, 0 or more.
      weights: one per part, 0 or more; a part of weight 0 gets 0.
      minimum: smallest share of each part of positive weight; the other shares stay in proportion.
      multiples: each share is a multiple of this; one number for all parts, or one per part.
      what: what is counted, for error messages.

    Returns:
      One whole number per part; their sum is `total`.

    Raises:
      ValueError: lists all values out of range; or there is no such split, and it gives the nearest totals
        that can be split.

    >>> shares(32, [3, 1])
    [24, 8]
    >>> shares(7, [1, 1, 1], minimum=1, what="layers")
    [3, 2, 2]
    >>> shares(30, [1, 1], multiples=[4, 2])
    [16, 14]
    """
    multiples = [multiples] * len(weights) if isinstance(multiples, int) else list(multiples)
    problems = find_weight_problems(weights)
    if total < 0 or minimum < 0:
        problems.append(f"{total} {what} with a minimum of {minimum}; use 0 or more for both")
    if len(multiples) != len(weights) or any(multiple < 1 for multiple in multiples):
        problems.append(f"multiples is {multiples}; give {len(weights)} numbers from 1")
    refuse(f"{total} {what} cannot be split", problems)
    # as near to the proportions as minimum and multiples allow
    found = _split(total, weights, minimum, multiples)
    if found is None:
        raise ValueError(_format_no_split(total, weights, minimum, multiples, what))
    return found


def starts(shares: Sequence[int]) -> list[int]:
    """Return the offset of each part, the parts being consecutive.

    >>> starts([24, 0, 8])
    [0, 24, 24]
    """
    return [end - share for end, share in zip(accumulate(shares), shares, strict=True)]


def parse_weights(text: str) -> tuple[float, ...]:
    """Read weights such as `3,1`.

    Raises:
      ValueError: lists every weight that is not a number from 0.

    >>> parse_weights("3, 1.5")
    (3.0, 1.5)
    """
    words = [word.strip() for word in text.split(",")]
    wrong = [
        word for word in words if not re.fullmatch(r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", word)
    ]
    problems = [f"{word!r} is not a number from 0, as in 3,1" for word in wrong]
    if not wrong:
        problems += find_weight_problems([float(word) for word in words])
    refuse(f"weights {text!r} cannot be used", problems)
    return tuple(float(word) for word in words)


def find_weight_problems(weights: Sequence[float]) -> list[str]:
    """List the problems of these weights, one sentence each.

    >>> find_weight_problems([1, -2.5, 0])
    ['weight 1 is -2.5; use a number from 0']
    """
    problems = [
        f"weight {index} is {weight}; use a number from 0"
        for index, weight in enumerate(weights)
        if not (math.isfinite(weight) and weight >= 0)
    ]
    if not problems and not any(weights):
        problems.append(f"weights is {list(weights)}; at least one must be above 0")
    return problems


def _split(total: int, weights: Sequence[float], minimum: int, multiples: Sequence[int]) -> list[int] | None:
    """Return the nearest split; None if there is none."""
    least = [-(-minimum // m) * m if w else 0 for w, m in zip(weights, multiples, strict=True)]
    if sum(least) > total:
        return None
    wanted = _find_proportional(total, weights, least)
    used = [m for w, m in zip(weights, multiples, strict=True) if w]
    if len(set(used)) > 1:
        return _find_nearest(total, wanted, least, multiples)
    if total % used[0]:
        return None
    units = _round_by_remainder(total // used[0], [want / used[0] for want in wanted])
    return [unit * used[0] for unit in units]


def _find_proportional(total: int, weights: Sequence[float], least: Sequence[int]) -> list[Fraction]:
    """Return exact proportional parts; small parts get their minimum, the others split the remainder."""
    exact = [Fraction(weight) for weight in weights]
    fixed = {index for index, weight in enumerate(exact) if not weight}
    while True:
        rest = total - sum(least[index] for index in fixed)
        weight = sum(w for index, w in enumerate(exact) if index not in fixed)
        parts = [
            Fraction(least[index]) if index in fixed else rest * w / weight for index, w in enumerate(exact)
        ]
        small = {index for index, part in enumerate(parts) if part < least[index]}
        if not small:
            return parts
        fixed |= small


def _round_by_remainder(total: int, wanted: Sequence[Fraction]) -> list[int]:
    found = [math.floor(want) for want in wanted]
    by_remainder = sorted(range(len(wanted)), key=lambda index: found[index] - wanted[index])
    for index in by_remainder[: total - sum(found)]:
        found[index] += 1
    return found


def _find_nearest(
    total: int, wanted: Sequence[Fraction], least: Sequence[int], multiples: Sequence[int]
) -> list[int] | None:
    """Return the split into multiples of least squared distance, by dynamic programming.

    No share is further from its proportional part than the least common multiple, as two such shares could
    exchange one; so only shares in that window are tried.
    """
    window = math.lcm(*multiples)
    # for each suffix of the parts: its possible sums -> (least distance, share of its first part)
    tables: list[dict[int, tuple[Fraction, int]]] = [{0: (Fraction(0), 0)}]
    for want, low, multiple in zip(*(reversed(x) for x in (wanted, least, multiples)), strict=True):
        first = max(low, math.ceil((want - window) / multiple) * multiple)
        last = min(total, math.floor(want + window)) if want else 0
        table: dict[int, tuple[Fraction, int]] = {}
        for share in range(first, last + 1, multiple):
            for after, (distance, _) in tables[-1].items():
                candidate = (distance + (share - want) ** 2, share)
                known = table.get(after + share)
                # at equal distances the lower index gets more
                if known is None or (candidate[0], -share) < (known[0], -known[1]):
                    table[after + share] = candidate
        tables.append(table)
    # walk back from the first part: each table has the share of its part for the remaining total
    found = []
    for table in reversed(tables[1:]):
        if total not in table:
            return None
        found.append(table[total][1])
        total -= found[-1]
    return found


def _format_no_split(
    total: int, weights: Sequence[float], minimum: int, multiples: Sequence[int], what: str
) -> str:
    """Format the error for a total that cannot be split, with the nearest totals that can."""
    used = [multiple for weight, multiple in zip(weights, multiples, strict=True) if weight]
    same = len(set(used)) == 1
    least = sum(-(-minimum // multiple) * multiple for multiple in used)
    asked = [f"at least {minimum} each"] if minimum else []
    if set(used) != {1}:
        asked.append(f"multiples of {used[0] if same else ', '.join(map(str, used))}")
    reach = math.lcm(*used)
    lower = range(total - 1, max(least, 1, total - reach) - 1, -1)
    upper = range(total + 1, max(total, least) + reach + 1)
    fits = [
        next((n for n in around if _split(n, weights, minimum, multiples)), None) for around in (lower, upper)
    ]
    use = f"use {' or '.join(str(n) for n in fits if n is not None)} {what}"
    if minimum and total < least and set(used) == {1}:
        use += f", or a minimum of {total // len(used)}"
    parts = f"{len(used)} part{'' if len(used) == 1 else 's'}"
    return f"{total} {what} cannot be split into {parts}, {' and '.join(asked)}; {use}"
