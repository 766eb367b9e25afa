"""Bytes that a replica sends to stay one of several, counted by the combiner that merges them.

Next: `join.py`, how long a step waits for it; `combine/messages.py`, how they are counted.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain import axes
from shardtrain.combine.messages import ALL_GATHER, ALL_REDUCE, Message, messages_of
from shardtrain.combine.replicas import shard_shapes, split_layers, stacked_paths
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.islands.buckets import BucketSizes
from shardtrain.islands.options import Across
from shardtrain.plan.join import MergeBytes
from shardtrain.plan.traffic import sent_bytes
from shardtrain.plan.weights import GRADIENT_BYTES
from shardtrain.train_step.bucket_exchange import BucketExchange
from shardtrain.train_step.placement import Specs
from shardtrain.train_step.replica_state import fragments_of


def island_merges(
    synchronisation: Synchronisation, specs: Specs, num_islands: int, across: Across = Across()
) -> MergeBytes:
    """Return what an island sends to the others.

    Args:
      synchronisation: how islands are synchronised.
      specs: of the state of an island.
      num_islands: how many.
      across: dtype and buckets of what they send.
    """
    buckets = BucketSizes(cap_bytes=across.bucket_bytes, first_bytes=across.first_bucket_bytes)

    def exchanged(by: Synchronisation, params: Any = None, **options: Any) -> int:
        exchange = BucketExchange(by.combiner, specs, buckets.assign, params, **options)
        return _by_rings(exchange.messages(num_islands))

    def of_gradients(by: Synchronisation) -> int:
        return exchanged(by, of_sums=by.is_mean, dtype=across.reduce_dtype)

    if not synchronisation.on_deltas:
        return MergeBytes(num_islands, (of_gradients(synchronisation),))
    fragments = [each.take(specs.abstract.params) for each in fragments_of(synchronisation, specs)]
    if synchronisation.distance is not None:
        # pushed to the shards of the others, and its own shard sent to them: what a ring sends
        size = sum(x.size for each in fragments for x in each.values())
        merges = [_by_rings([Message(ALL_REDUCE, GRADIENT_BYTES * size, num_islands)])]
    else:
        merges = [exchanged(synchronisation, each) for each in fragments]
    synchronous = of_gradients(Synchronisation()) if synchronisation.synchronous_steps else 0
    return MergeBytes(num_islands, tuple(merges), synchronisation.every, synchronous)


def mesh_merges(synchronisation: Synchronisation, specs: Specs, sizes: Mapping[str, int]) -> MergeBytes:
    """Return what a device sends over `data`, whose indices are the replicas, for its shards of arrays.

    Args:
      synchronisation: how they are synchronised; no mean of gradients, which is part of the step's traffic.
      specs: of the state.
      sizes: axis -> size.
    """
    num_replicas, whole_bytes, merges = sizes[axes.DATA], 0, []
    stacked = stacked_paths(specs.arrays, specs.sharded)
    for each in fragments_of(synchronisation, specs):
        shards = shard_shapes(each.take(specs.abstract.params), each.select(specs.sharded), sizes)
        # gradients and what replicas changed are float32, whatever the parameters are
        shards = {path: jax.ShapeDtypeStruct(x.shape, jnp.float32) for path, x in shards.items()}
        whole_bytes += sum(GRADIENT_BYTES * x.size for x in shards.values())
        layers = split_layers(shards, stacked & each.rows.keys())
        merges.append(_by_rings(messages_of(synchronisation.combiner, layers, num_replicas)))
    if not synchronisation.on_deltas:
        return MergeBytes(num_replicas, tuple(merges))
    synchronous = 0
    if synchronisation.synchronous_steps:
        # the mean gradient, and the update that the first replica made of it
        synchronous = _by_rings([Message(ALL_REDUCE, whole_bytes, num_replicas)] * 2)
    return MergeBytes(num_replicas, tuple(merges), synchronisation.every, synchronous)


def _by_rings(messages: Iterable[Message]) -> int:
    """Return the bytes that a rank sends for its messages."""
    found = 0.0
    for kind, num_bytes, num_ranks in messages:
        # a gathered array is as large as those of all ranks
        whole = num_bytes * num_ranks if kind == ALL_GATHER else num_bytes
        found += sent_bytes(kind, num_ranks, whole)
    return round(found)
