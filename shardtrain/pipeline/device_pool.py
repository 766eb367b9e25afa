"""A pool of unequal devices, and ways to allocate them to virtual workers: pipelines of several. No jax.

Policies by name are those of Park et al. 2020, HetPipe. Next: `virtual_workers.py`, which predicts
what an allocation gives.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardtrain.errors.messages import near, problems_error
from shardtrain.pipeline.stage_costs import StageDevices


@dataclass(frozen=True, kw_only=True)
class DeviceGroup:
    """Equal devices of one node.

    Args:
      kind: their name.
      node: the name of the node.
      number: how many, from 1.
      device: the speed and memory of one.
    """

    kind: str
    node: str
    number: int
    device: StageDevices


@dataclass(frozen=True, kw_only=True)
class Pool:
    """The devices from which virtual workers are formed.

    Args:
      groups: the devices.
      node_bytes_per_second: between two devices of a node.
      network_bytes_per_second: of each node, in each direction.

    Raises:
      ValueError: no devices, or a rate that is not above 0.
    """

    groups: Sequence[DeviceGroup]
    node_bytes_per_second: float
    network_bytes_per_second: float

    def __post_init__(self) -> None:
        problems = [] if self.groups else ["it has no devices"]
        problems += [
            f"{g.kind} is there {g.number} times; use 1 or more" for g in self.groups if g.number < 1
        ]
        rates = {"inside a node": self.node_bytes_per_second, "network": self.network_bytes_per_second}
        problems += [
            f"{rate} bytes a second ({name}); use more than 0" for name, rate in rates.items() if not rate > 0
        ]
        if problems:
            raise problems_error("this pool cannot be used", problems)

    def link(self, a: int, b: int) -> float:
        """Return the bytes per second between devices of two groups."""
        same = self.groups[a].node == self.groups[b].node
        return self.node_bytes_per_second if same else self.network_bytes_per_second


Workers = tuple[tuple[int, ...], ...]
"""Virtual workers as numbers of groups of the pool, each sorted."""


def node_partition(pool: Pool) -> Workers:
    """Give each node to one virtual worker: equal devices and fast links inside, unequal workers."""
    nodes = list(dict.fromkeys(group.node for group in pool.groups))
    return tuple(
        tuple(i for i, group in enumerate(pool.groups) if group.node == node for _ in range(group.number))
        for node in nodes
    )


def equal_distribution(pool: Pool) -> Workers:
    """Give every virtual worker a device of each group: equal workers, slow links inside.

    Raises:
      ValueError: the groups have different numbers of devices.
    """
    numbers = {group.number for group in pool.groups}
    if len(numbers) > 1:
        kinds = ", ".join(f"{group.number} {group.kind}" for group in pool.groups)
        raise ValueError(
            f"equal workers need as many devices of each kind, and the pool has {kinds}; use search"
        )
    return (tuple(range(len(pool.groups))),) * numbers.pop()


def hybrid_distribution(pool: Pool) -> Workers:
    """Pair the fastest group with the slowest and so on, and split each pair into two virtual workers.

    Raises:
      ValueError: an odd number of groups, or of devices in one.
    """
    if len(pool.groups) % 2 or any(group.number % 2 for group in pool.groups):
        kinds = ", ".join(f"{group.number} {group.kind}" for group in pool.groups)
        raise ValueError(
            f"pairs need even numbers of kinds and of devices, and the pool has {kinds}; use search"
        )
    by_speed = sorted(range(len(pool.groups)), key=lambda i: -pool.groups[i].device.flops_per_second)
    pairs = zip(by_speed, reversed(by_speed[len(by_speed) // 2 :]), strict=False)
    return tuple(
        tuple(sorted(i for i in pair for _ in range(pool.groups[i].number // 2)))
        for pair in pairs
        for _ in range(2)
    )


POLICIES: dict[str, Callable[[Pool], Workers]] = {
    "node partition": node_partition,
    "equal distribution": equal_distribution,
    "hybrid distribution": hybrid_distribution,
}
"""Name -> virtual workers of a pool."""


def all_allocations(remaining: tuple[int, ...], size: int, least: tuple[int, ...] = ()) -> Iterator[Workers]:
    """Yield the allocations of the remaining devices, workers in order, none below `least`.

    Args:
      remaining: number of devices of each group.
      size: devices of each virtual worker; they make whole workers.
      least: workers below it are not yielded.

    >>> list(all_allocations((2, 2), 2))
    [((0, 0), (1, 1)), ((0, 1), (0, 1))]
    """
    if not any(remaining):
        yield ()
        return
    for worker in _compositions(remaining, size, 0):
        if worker < least:
            continue
        left = tuple(number - worker.count(group) for group, number in enumerate(remaining))
        for rest in all_allocations(left, size, worker):
            yield (worker, *rest)


def _compositions(remaining: tuple[int, ...], size: int, group: int) -> Iterator[tuple[int, ...]]:
    """Yield the sorted choices of so many devices, from this group on."""
    if size == 0:
        yield ()
    elif group < len(remaining):
        for number in range(min(size, remaining[group]), -1, -1):
            for rest in _compositions(remaining, size - number, group + 1):
                yield (group,) * number + rest


def policy(name: str, pool: Pool) -> Workers:
    """Return the virtual workers of a policy.

    Raises:
      ValueError: there is no policy of this name, or the pool does not have the numbers for it.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {near(name, POLICIES)}; or search")
    return POLICIES[name](pool)
