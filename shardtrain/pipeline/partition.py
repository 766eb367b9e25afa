"""Cut the blocks of a model into the parts of a pipeline: in equal numbers, by cost, or as given. No jax."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import add

from shardtrain.errors.messages import near, problems_error, refuse
from shardtrain.sharding.shares import shares

WAYS = ("equal", "params", "flops", "time")
"""Words for ways to cut; in their place a list of numbers of blocks may be given."""

BY_TIME = (
    "by 'time' is for stages across islands (--across pipeline), whose speeds differ; the devices of a mesh"
    " are equal: cut by 'flops'"
)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The costs of a model's blocks, and of its layers before and after them, in any unit.

    Args:
      blocks: the cost of each block, in order.
      first: the cost of the layers before the blocks, such as an embedding.
      last: the cost of the layers after the blocks, such as a head.
    """

    blocks: Sequence[float]
    first: float = 0.0
    last: float = 0.0


def cut(
    costs: Sequence[float], num_parts: int, *, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[int]:
    """Cut blocks into parts so that the most expensive part is as cheap as possible.

    Among these cuts it takes one with the least sum of squares, so that the other parts are even too; among
    equal ones the cut whose early parts have more blocks. By dynamic programming.

    Args:
      costs: the cost of each block, in order, 0 or more, in any unit.
      num_parts: how many parts, each with one block or more.
      first_cost: added to the first part, such as an embedding's.
      last_cost: added to the last part, such as a head's.

    Returns:
      The number of blocks of each part.

    Raises:
      ValueError: lists every cost that is not a number from 0; or there are fewer blocks than parts.

    >>> cut([1, 1, 1, 1, 1, 1, 1, 1], 3)
    [3, 3, 2]
    >>> cut([1, 1, 1, 1, 1, 1, 1, 1], 3, last_cost=2)
    [4, 3, 1]
    """
    named = {**{f"block {i}": c for i, c in enumerate(costs)}, "first": first_cost, "last": last_cost}
    problems = [
        f"{what} costs {c}; give a number from 0" for what, c in named.items() if not 0 <= c < math.inf
    ]
    if problems := problems + _find_part_problems(len(costs), num_parts):
        raise problems_error(f"{len(costs)} blocks cannot be cut into {num_parts} parts", problems)
    sums = list(accumulate(costs, initial=0))

    def cost(part: int, begin: int, end: int) -> float:
        ends = (part == 0) * first_cost + (part == num_parts - 1) * last_cost
        return sums[end] - sums[begin] + ends

    def square(part: int, begin: int, end: int) -> float:
        found = cost(part, begin, end)
        return found**2 if found <= limit else math.inf

    # first the smallest cost that the most expensive part can have
    limit, _ = join_least(len(costs), num_parts, cost, max)
    return list(join_least(len(costs), num_parts, square, add)[1])


def cut_narrowly(
    costs: Sequence[float], num_parts: int, sent_bytes: Sequence[float], slack: float = 1.1
) -> list[int]:
    """Cut pieces into parts of about equal cost, where little is sent between them.

    Among the cuts whose most expensive part costs at most `slack` times the least possible, it takes the one
    that sends the least; among equal ones the cut whose early parts have more pieces. By dynamic programming.

    Args:
      costs: the cost of each piece, in order, 0 or more, in any unit.
      num_parts: how many parts, each with one piece or more.
      sent_bytes: bytes that are sent after each piece except the last.
      slack: a factor from 1.

    Returns:
      The number of pieces of each part.

    Raises:
      ValueError: see `cut`.

    >>> cut_narrowly([10, 10, 10, 10, 10, 10], 2, [1, 8, 8, 8, 1])
    [3, 3]
    >>> cut_narrowly([10, 10, 10, 1, 10, 10, 10], 2, [1, 8, 8, 2, 8, 1])
    [4, 3]
    """
    sums = list(accumulate(costs, initial=0.0))
    bounds = accumulate(cut(costs, num_parts), initial=0)
    limit = slack * max(sums[end] - sums[begin] for begin, end in pairwise(bounds))

    def sent(part: int, begin: int, end: int) -> float:
        if sums[end] - sums[begin] > limit:
            return math.inf
        return sent_bytes[end - 1] if part < num_parts - 1 else 0.0

    return list(join_least(len(costs), num_parts, sent, add)[1])


def join_least(
    num_blocks: int,
    num_parts: int,
    cost: Callable[[int, int, int], float],
    joined: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the least joined cost of all parts and their numbers of blocks, by dynamic programming.

    Args:
      num_blocks: number of blocks, at least as many as parts.
      num_parts: how many parts, each with one block or more.
      cost: (part, its first block, the block after its last) -> cost; infinite if such a part is impossible.
      joined: (cost of the parts so far, cost of the next part) -> cost of all of them.

    Returns:
      (cost, blocks of each part); among equal costs, more blocks in early parts. (infinity, ()) if no cut is
      possible.
    """
    # end -> (cost so far, where parts end, negative so that late ends come first)
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for part in range(num_parts):
        after = num_parts - 1 - part
        found = {}
        for end in range(part + 1, num_blocks - after + 1) if after else (num_blocks,):
            ways = [
                (joined(before, cost(part, begin, end)), (*ends, -end))
                for begin, (before, ends) in best.items()
                if begin < end and before < math.inf
            ]
            if ways:
                found[end] = min(ways)
        best = found
    least, ends = best.get(num_blocks, (math.inf, ()))
    return least, tuple(begin - end for begin, end in pairwise((0, *ends)))


def parse_stages(text: str) -> str | tuple[int, ...]:
    """Parse how to cut a model: "equal", "params", "flops", "time", or numbers of blocks, "3,4,4,1".

    Raises:
      ValueError: another word, or a part of the list that is no whole number from 1.

    >>> parse_stages("params"), parse_stages("3,4,4,1")
    ('params', (3, 4, 4, 1))
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1 and words[0] in WAYS:
        return words[0]
    if not any(character.isdecimal() for character in text):
        raise ValueError(f"stages {near(text, WAYS)}; or a list of numbers of blocks, such as 3,4,4,1")
    wrong = [word for word in words if not re.fullmatch("0*[1-9][0-9]*", word)]
    if wrong:
        problems = [f"{word!r} is not a number of blocks; write a whole number from 1" for word in wrong]
        raise problems_error(f"stages {text!r} cannot be read", problems)
    return tuple(int(word) for word in words)


def parse_cuts(text: str) -> list[str | tuple[int, ...]]:
    """Parse one cut for all replicas of a pipeline, or one for each with semicolons between, "3,1;1,3".

    Raises:
      ValueError: see `parse_stages`; or "time" is one of several.

    >>> parse_cuts("flops"), parse_cuts("3,1;1,3")
    (['flops'], [(3, 1), (1, 3)])
    """
    found = [parse_stages(part) for part in text.split(";")]
    if len(found) > 1 and "time" in found:
        raise ValueError(
            f"stages is {text!r}; give 'time' alone, which cuts each pipeline for its own islands, or numbers"
            " of blocks for each"
        )
    return found


def counts(by: str | Sequence[int], num_blocks: int, num_parts: int, costs: Costs | None = None) -> list[int]:
    """Return the number of blocks of each part.

    Args:
      by: "equal" (what is left over goes to the middle: the first part has the embedding, the last the head),
        "params" or "flops" (see `cut`), or the numbers themselves; as `parse_stages` returns it.
      num_blocks: number of blocks of the model.
      num_parts: stages times chunks, in the order in which a microbatch passes them.
      costs: the parameters or flops of each block, needed for "params" and "flops".

    Returns:
      One number from 1 for each part; they add up to `num_blocks`.

    Raises:
      ValueError: fewer blocks than parts, numbers that do not fit, or "time", for which
        `stage_cut.best_cut` needs the devices of each stage.

    >>> counts("equal", 10, 4)
    [2, 3, 3, 2]
    >>> counts("params", 4, 2, Costs(blocks=[9, 3, 3, 3], last=3))
    [2, 2]
    """
    problems = _find_part_problems(num_blocks, num_parts)
    if not isinstance(by, str):
        problems = problems or _list_problems(by, num_blocks, num_parts)
    elif by == "time":
        problems.append(BY_TIME)
    elif by != "equal" and costs is None:
        problems.append(f"by {by!r} needs the costs of each block; give them, or cut by 'equal'")
    refuse(f"{num_blocks} blocks cannot be cut into {num_parts} parts", problems)
    if not isinstance(by, str):
        return list(by)
    if by == "equal":
        return _cut_equally(num_blocks, num_parts)
    assert costs is not None
    return cut(costs.blocks, num_parts, first_cost=costs.first, last_cost=costs.last)


def _cut_equally(num_blocks: int, num_parts: int) -> list[int]:
    least, rest = divmod(num_blocks, num_parts)
    middle = (num_parts - 1) / 2
    # the blocks that are left over go to the parts nearest to the middle
    wider = sorted(range(num_parts), key=lambda part: abs(part - middle))[:rest]
    return [least + (part in wider) for part in range(num_parts)]


def _find_part_problems(num_blocks: int, num_parts: int) -> list[str]:
    if num_parts < 1:
        return [f"parts is {num_parts}; use 1 or more"]
    if num_blocks < num_parts:
        most = f"{num_blocks} part{'' if num_blocks == 1 else 's'}"
        return [f"each part has one block or more; use at most {most}, or {num_parts} blocks"]
    return []


def _list_problems(numbers: Sequence[int], num_blocks: int, num_parts: int) -> list[str]:
    """Return the problem of a list of numbers of blocks, with the nearest list that fits."""
    text = ",".join(map(str, numbers))
    if len(numbers) != num_parts:
        use = ",".join(map(str, _cut_equally(num_blocks, num_parts)))
        return [f"{text} is {len(numbers)} numbers; give {num_parts}, as {use}"]
    if min(numbers) < 1 or sum(numbers) != num_blocks:
        weights = [max(number, 1) for number in numbers]
        use = ",".join(map(str, shares(num_blocks, weights, minimum=1, what="blocks")))
        what = "has a part without blocks" if min(numbers) < 1 else f"adds up to {sum(numbers)}"
        return [f"{text} {what}; each part has one or more and all have {num_blocks}, as {use}"]
    return []
