"""Compute what islands send to synchronise, and how long a step waits for it.

The combiner of the islands counts the bytes (`combine/messages.py`). Next: `islands.py`, the plan.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain import axes
from shardtrain.combine import Combiner
from shardtrain.combine.messages import ALL_GATHER, ALL_REDUCE, Message, trace_messages
from shardtrain.combine.replicas import find_stacked_paths, shard_shapes, split_layers
from shardtrain.combine.synchronisation import PRESETS, Synchronisation
from shardtrain.islands.buckets import BucketSizes
from shardtrain.islands.options import Across
from shardtrain.plan.prediction import Choice
from shardtrain.plan.subject import Subject
from shardtrain.plan.traffic import GRADIENT_BYTES, count_sent_bytes
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import abstract_mesh
from shardtrain.train_step.bucket_exchange import BucketExchange
from shardtrain.train_step.gradient_pieces import PartPlan
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_gradients import plan_parts
from shardtrain.train_step.placement import Specs, make_placement, state_specs
from shardtrain.train_step.state import split_fragments


class MergeBytes(NamedTuple):
    """Bytes that one replica sends, by ring algorithms, without sums of the loss and the model's state.

    Args:
      num_replicas: number of replicas.
      merges: bytes of each merge in `every` steps, or of the gradients of a step.
      every: steps between merges of a fragment.
      synchronous: bytes of one of the first steps, in which gradients are averaged; 0 if there are none.
    """

    num_replicas: int
    merges: tuple[int, ...]
    every: int = 1
    synchronous: int = 0

    @property
    def most(self) -> int:
        """Bytes of the largest merge."""
        return max(self.merges)

    @property
    def per_step(self) -> float:
        """Mean bytes of a step, if no merge is skipped."""
        return sum(self.merges) / self.every


class SyncCosts(NamedTuple):
    """Costs of synchronising islands, as means over steps.

    Args:
      steps: steps between merges of a parameter.
      bytes_per_step: bytes that an island sends in a step.
      seconds: seconds of a step in which it waits.
    """

    steps: int
    bytes_per_step: float
    seconds: float


def compute_join(
    synchronisation: Synchronisation, merges: MergeBytes, bytes_per_second: float, step_seconds: float
) -> SyncCosts:
    """Return the costs of synchronising islands, if they skip no merge.

    Sending during later steps (`overlap`) costs no time while these steps run.

    Args:
      synchronisation: how islands are synchronised.
      merges: bytes that each sends.
      bytes_per_second: rate at which an island sends. inf means that no link is given.
      step_seconds: seconds of a step of the slowest island.

    >>> every = compute_join(Synchronisation(), MergeBytes(2, (4000,)), 4e3, 0.1)
    >>> every.bytes_per_step, every.seconds
    (4000.0, 1.0)
    >>> rare = Synchronisation(on="deltas", every=10, overlap=4)
    >>> [round(each, 3) for each in compute_join(rare, MergeBytes(2, (4000,), every=10), 4e3, 0.1)]
    [10, 400.0, 0.06]
    """
    seconds = [num_bytes / bytes_per_second for num_bytes in merges.merges]
    hidden = [min(each, synchronisation.overlap * step_seconds) for each in seconds]
    return SyncCosts(merges.every, merges.per_step, (sum(seconds) - sum(hidden)) / merges.every)


def own_copies(synchronisation: Synchronisation) -> int:
    """Count the float32 copies of the parameters that an island keeps to synchronise with others.

    They are its changes since the last merge, a merge that is under way, and the momentum of the outer
    optimizer, unless that is given in Python.

    >>> [own_copies(PRESETS[name]) for name in ("every-step", "local-sgd", "diloco")]
    [0, 1, 2]
    """
    if not synchronisation.on_deltas:
        return 0
    momentum = getattr(synchronisation.outer, "momentum", 0.0)
    return 1 + (synchronisation.overlap > 0) + (momentum > 0)


def candidates(given: Synchronisation) -> Mapping[str, Synchronisation]:
    """Return the synchronisations that a plan compares: the one of the run, and the presets."""
    own = {} if given in PRESETS.values() else {"of the run": given}
    return {**own, **PRESETS}


def island_merges(
    synchronisation: Synchronisation, specs: Specs, num_islands: int, across: Across = Across()
) -> MergeBytes:
    """Return the bytes that an island sends to the others.

    Args:
      synchronisation: how islands are synchronised.
      specs: specs of the state of an island.
      num_islands: number of islands.
      across: dtype and buckets of what they send.
    """
    buckets = BucketSizes(cap_bytes=across.bucket_bytes, first_bytes=across.first_bucket_bytes)

    def exchanged(combiner: Combiner, params: Any = None, **options: Any) -> int:
        exchange = BucketExchange(combiner, specs, buckets.assign, params, **options)
        return _count_by_rings(exchange.messages(num_islands))

    def of_gradients(by: Synchronisation) -> int:
        return exchanged(by.combiner, of_sums=by.is_mean, dtype=across.reduce_dtype)

    if not synchronisation.on_deltas:
        return MergeBytes(num_islands, (of_gradients(synchronisation),))
    fragments = [each.take(specs.abstract.params) for each in split_fragments(synchronisation, specs)]
    if synchronisation.distance is not None:
        # it pushes changes to the shards of others, and sends its own shard: as many bytes as a ring
        size = sum(x.size for each in fragments for x in each.values())
        merges = [_count_by_rings([Message(ALL_REDUCE, GRADIENT_BYTES * size, num_islands)])]
    else:
        merges = _repeat_rounds(
            synchronisation,
            [exchanged(of.combiner, x) for of, x in zip(synchronisation.rounds, fragments, strict=True)],
        )
    synchronous = of_gradients(Synchronisation()) if synchronisation.synchronous_steps else 0
    return MergeBytes(num_islands, tuple(merges), synchronisation.every, synchronous)


def mesh_merges(synchronisation: Synchronisation, specs: Specs, sizes: Mapping[str, int]) -> MergeBytes:
    """Return the bytes that a device sends over the axis data, whose indices are replicas, for its shards.

    Args:
      synchronisation: how replicas are synchronised; a mean of gradients is part of the step's traffic.
      specs: specs of the state.
      sizes: axis -> size.
    """
    num_replicas, whole_bytes, merges = sizes[axes.DATA], 0, []
    stacked = find_stacked_paths(specs.arrays, specs.sharded)
    fragments = split_fragments(synchronisation, specs)
    for each, of in zip(fragments, synchronisation.rounds, strict=True):
        shards = shard_shapes(each.take(specs.abstract.params), each.select(specs.sharded), sizes)
        # gradients and changes are float32, whatever the dtype of the parameters
        shards = {path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for path, x in shards.items()}
        whole_bytes += sum(GRADIENT_BYTES * x.size for x in shards.values())
        layers = split_layers(shards, stacked & each.rows.keys())
        merges.append(_count_by_rings(trace_messages(of.combiner, layers, num_replicas)))
    if not synchronisation.on_deltas:
        return MergeBytes(num_replicas, tuple(merges))
    merges, synchronous = _repeat_rounds(synchronisation, merges), 0
    if synchronisation.synchronous_steps:
        # the mean gradient, and the update that the first replica computes from it
        synchronous = _count_by_rings([Message(ALL_REDUCE, whole_bytes, num_replicas)] * 2)
    return MergeBytes(num_replicas, tuple(merges), synchronisation.every, synchronous)


def _repeat_rounds(synchronisation: Synchronisation, sizes_bytes: Sequence[int]) -> list[int]:
    """Return the bytes of each merge in `every` steps, given those of each round."""
    first = synchronisation.synchronous_steps + 1
    steps = range(first, first + synchronisation.every)
    return [
        size
        for number, size in enumerate(sizes_bytes)
        for step in steps
        if synchronisation.is_sent(number, step)
    ]


def _count_by_rings(messages: Iterable[Message]) -> int:
    """Return the bytes that a rank sends for its messages."""
    found = 0.0
    for kind, num_bytes, num_ranks in messages:
        # a gathered array has the parts of all ranks
        whole = num_bytes * num_ranks if kind == ALL_GATHER else num_bytes
        found += count_sent_bytes(kind, num_ranks, whole)
    return round(found)


NUMS_PROGRAMS = (1, 2, 4)
"""Numbers of programs to compare."""

EXTRA_SHARE = 0.15
"""Fraction of a step that several programs cost, as values between them are written to memory and less is
fused; measured with 2, 3 and 4 programs on CPUs of one host (docs/benchmarks/bridge.md)."""

SAME_SHARE = 0.01
"""Relative difference up to which steps count as equally fast."""


class EarlyGradients(NamedTuple):
    """A step with gradients in several programs.

    Args:
      num_programs: largest number of programs; there are fewer if few gradients are ready early.
      seconds: seconds of the step, with sending and the update.
    """

    num_programs: int
    seconds: float


class IslandStepTimes(NamedTuple):
    """Times of a step of the slowest island in one program, without sending.

    Args:
      gradient_seconds: seconds of loss and gradients of all microbatches.
      update_seconds: seconds of the optimizer, after the last gradient has been sent.
      microbatches: number of microbatches; the gradients are final in the last one.
    """

    gradient_seconds: float
    update_seconds: float
    microbatches: int = 1


def time_early_gradients(
    step: IslandStepTimes, ready: Sequence[float], seconds_of_parts: Sequence[float]
) -> EarlyGradients:
    """Compute the seconds of a step whose gradients are sent in parts, one after the other.

    A part is sent when it has been computed and the part before it has been sent. If there are several,
    `EXTRA_SHARE` makes loss and gradients longer.

    Args:
      step: the step without sending.
      ready: fraction of the last microbatch's loss and gradients after which each part is ready.
      seconds_of_parts: seconds to send each part.

    >>> time_early_gradients(IslandStepTimes(0.9, 0.1), [1.0], [0.5])
    EarlyGradients(num_programs=1, seconds=1.5)
    >>> round(time_early_gradients(IslandStepTimes(0.9, 0.1), [2 / 3, 1.0], [0.25, 0.25]).seconds, 3)
    1.4
    """
    extra = EXTRA_SHARE * (step.gradient_seconds + step.update_seconds) if len(ready) > 1 else 0.0
    computed = step.gradient_seconds + extra
    last = computed / step.microbatches
    end = 0.0
    for share, seconds in zip(ready, seconds_of_parts, strict=True):
        end = max(end, computed - (1 - share) * last) + seconds
    return EarlyGradients(len(ready), end + step.update_seconds)


def choose_fastest(found: Sequence[EarlyGradients]) -> EarlyGradients:
    """Return the step with the fewest programs, which take longer to compile, within 1 % of the fastest.

    >>> choose_fastest([EarlyGradients(1, 2.0), EarlyGradients(2, 1.005), EarlyGradients(4, 1.0)])[0]
    2
    """
    most = (1 + SAME_SHARE) * min(each.seconds for each in found)
    near = (each for each in found if each.seconds <= most)
    return min(near, key=lambda each: each.num_programs)


def make_merge_bytes(
    subject: Subject, num_islands: int, across: Across
) -> Callable[[Synchronisation], MergeBytes]:
    """Return a cached function synchronisation -> bytes that an island sends.

    Args:
      subject: the model.
      num_islands: number of islands.
      across: dtype and buckets of what they send.
    """
    sizes: dict[str, int] = dict.fromkeys(axes.AXES, 1)
    # islands send whole arrays, whatever shards them inside an island
    layout = Layout(mesh=sizes, unnamed="replicate")
    specs = state_specs(subject.find_model(None), subject.optimizer, layout, sizes)
    return cache(partial(island_merges, specs=specs, num_islands=num_islands, across=across))


def plan_sent(subject: Subject, choice: Choice, num_devices: int, across: Across, most: int) -> PartPlan:
    """Return the parts of the gradients that an island sends after each of several programs.

    Args:
      subject: the model.
      choice: choice of island 0, whose parts all islands send.
      num_devices: number of devices of that island.
      across: dtype of the sent gradients.
      most: largest number of programs.
    """
    sizes = axis_sizes(choice.layout.mesh, num_devices)
    model = subject.find_model(choice.remat)
    stages = subject.stages(sizes[axes.PIPELINE], choice.virtual_stages)
    placement = make_placement(
        model, subject.optimizer, choice.layout, abstract_mesh(sizes), stages=stages, schedule=choice.schedule
    )
    gradients = make_gradients(model, subject.loss, placement, mean=False)
    batch = {name: jax.ShapeDtypeStruct((1, *x.shape), x.dtype) for name, x in subject.batch.items()}
    return plan_parts(gradients, placement, Synchronisation(), across.reduce_dtype, most, batch)


def plan_early(
    subject: Subject,
    choice: Choice,
    num_devices: int,
    across: Across,
    step: IslandStepTimes,
    sending_seconds: float,
    nums_programs: Sequence[int] = NUMS_PROGRAMS,
) -> tuple[EarlyGradients, ...]:
    """Return the step with gradients in different numbers of programs.

    Args:
      subject, choice, num_devices, across: as for `plan_sent`.
      step: times of the slowest island.
      sending_seconds: seconds to send all gradients.
      nums_programs: numbers of programs to compare.
    """
    found: dict[int, EarlyGradients] = {}
    for most in nums_programs:
        parts = plan_sent(subject, choice, num_devices, across, most)
        seconds = [sending_seconds * size / sum(parts.sizes_bytes) for size in parts.sizes_bytes]
        each = time_early_gradients(step, parts.ready, seconds)._replace(num_programs=most)
        found.setdefault(len(seconds), each)
    return tuple(found.values())
