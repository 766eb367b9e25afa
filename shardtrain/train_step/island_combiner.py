"""The channel of an island to the others, and a combiner that runs over it, with a state for each bucket.

Next: `bucket_exchange.py`, the buckets and their program; `islands/transfer.py`, which sends buckets.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine import Combiner, MeshGroup, make_combiner
from shardtrain.functional.model import path_text
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.bucket_exchange import BucketExchange
from shardtrain.train_step.placement import Placement, attach_shardings

AllGather = Callable[[str, Any], list[Any]]
"""(name, value of this rank) -> the values of all ranks."""


def gather_alone(name: str, value: Any = None) -> list[Any]:
    """Return the values of all ranks of a run of one rank."""
    return [value]


class Channel(NamedTuple):
    """The channel of an island to the others.

    Args:
      transfer: sends buckets of arrays.
      all_gather: gathers a value of every rank, by name, before each collective over islands; it reports
        which rank is missing, which MPI in a compiled program cannot.
      dtype: the dtype of the gradients that are sent, see `islands.options.Across`.
      num_parts: the largest number of programs that compute the gradients of a mean: what one has computed is
        sent while the next ones compute, see `gradient_pieces.py`.
    """

    transfer: Transfer
    all_gather: AllGather = gather_alone
    dtype: str = "float32"
    num_parts: int = 1


class _Bucket(NamedTuple):
    number: int
    like: dict[str, jax.ShapeDtypeStruct]  # path -> shape of what is sent
    # of the combiner, with shardings, which all processes need, also for buckets that another one transfers
    state: Any
    metrics: dict[str, jax.ShapeDtypeStruct]


class CombinedTree(NamedTuple):
    """The trees of all islands after a combiner.

    Args:
      value: path -> array, with the shardings of what was sent.
      state: the combiner's state of each bucket, replicated over the devices.
      metrics: the combiner's metrics of each bucket.
      sums: the sums that were added up together with the tree.
    """

    value: dict[str, jax.Array]
    state: list[Any]
    metrics: list[dict[str, jax.Array]]
    sums: Any = ()


class IslandCombiner:
    """A combiner between islands that sends a tree in buckets and keeps a state for each.

    Args:
      combiner: any combiner.
      placement: the placement of this island.
      transfer: to the other islands.
      params, of_sums, dtype: see `BucketExchange`.

    Attributes:
      num_bytes: bytes of what is combined.
      packing: packs gradients before they are sent.
      labels: names of the entries of a metric (L,): the paths of parameters, or of layers of stacked ones.
    """

    def __init__(
        self,
        combiner: Combiner,
        placement: Placement,
        transfer: Transfer,
        params: dict[str, jax.ShapeDtypeStruct] | None = None,
        *,
        of_sums: bool = False,
        dtype: str = "float32",
    ) -> None:
        self._combiner, self._transfer = combiner, transfer
        self._whole = whole = NamedSharding(transfer.mesh, PartitionSpec())
        self._exchange = exchange = BucketExchange(
            combiner, placement.specs, transfer.buckets, params, of_sums=of_sums, dtype=dtype
        )
        first_number = transfer.bucket_times.add(exchange.sizes_bytes)
        self.num_bytes = sum(exchange.sizes_bytes)
        self.labels, self.packing = exchange.labels, exchange.packing
        self._buckets = []
        for number, like in enumerate(exchange.buckets, first_number):
            shapes = _find_state_and_metrics(combiner, exchange.layers(like))
            state, metrics = attach_shardings(shapes, whole)
            self._buckets.append(_Bucket(number, like, state, metrics))

    def init(self) -> list[Any]:
        """Create the combiner's state, bucket by bucket."""
        layers = [self._exchange.layers(bucket.like) for bucket in self._buckets]
        create = jax.jit(lambda: [self._combiner.init(each) for each in layers], out_shardings=self._whole)
        return create()

    def wanted(self) -> list[Any]:
        """Return the shapes, dtypes and shardings of the combiner's state."""
        return [bucket.state for bucket in self._buckets]

    def shapes(self) -> CombinedTree:
        """Return the shapes and dtypes of what `finish` returns, without sums."""
        value = {path: leaf for bucket in self._buckets for path, leaf in bucket.like.items()}
        return CombinedTree(value, self.wanted(), [bucket.metrics for bucket in self._buckets])

    @property
    def keeps_state(self) -> bool:
        """Whether the combiner has a state."""
        return any(jax.tree.leaves(bucket.state) for bucket in self._buckets)

    def start(
        self, tree: dict[str, jax.Array], count: jax.Array, state: Sequence[Any], sums: Any = ()
    ) -> list[Future[Any]]:
        """Start to send and combine every bucket, in the background.

        Args:
          tree: path -> array on the mesh, the mean over this island's examples; or their sums, packed.
          count: float32 scalar on the mesh, the number of examples.
          state: from `init`, or from the previous step.
          sums: float32 scalars on the mesh that are added up over islands, together with the last bucket, so
            that they need no program of their own.

        Returns:
          A future for each bucket, for `finish`.
        """
        program = self._exchange.program
        return [
            self._transfer.start(
                b.number, program, ({p: tree[p] for p in b.like}, count, own, beside), timed=True
            )
            for b, own, beside in zip(self._buckets, state, self._list_beside(sums), strict=True)
        ]

    def finish(self, tree: Mapping[str, Any], started: Sequence[Future[Any]], sums: Any = ()) -> CombinedTree:
        """Wait for all buckets, and put the result on the mesh.

        Args:
          tree: what was sent, or shapes and dtypes with the shardings of the result.
          started: from `start`.
          sums: the sums that were passed to `start`.
        """
        combined, total = CombinedTree({}, [], []), ()
        for bucket, future, beside in zip(self._buckets, started, self._list_beside(sums), strict=True):
            like = ({path: tree[path] for path in bucket.like}, bucket.state, bucket.metrics, beside)
            found = self._transfer.result(bucket.number, future)
            value, state, metrics, total = self._transfer.land(bucket.number, found, like)
            combined.value.update(value)
            combined.state.append(state)
            combined.metrics.append(metrics)
        return combined._replace(sums=total)

    def _list_beside(self, sums: Any) -> list[Any]:
        return [*[()] * (len(self._buckets) - 1), sums]


def _find_state_and_metrics(combiner: Combiner, layers: Any) -> Any:
    """Return the shapes of a combiner's state and of its metrics."""

    def run(tree: Any) -> Any:
        state = combiner.init(layers)
        return state, combiner.combine(tree, jnp.float32(1), state, MeshGroup("islands", 2)).metrics

    two = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), layers)
    found = jax.eval_shape(jax.vmap(run, axis_name="islands"), two)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found)


def join_metrics(by_bucket: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Join the metrics of all buckets: arrays (L,) are concatenated, scalars are averaged."""
    names = by_bucket[0] if by_bucket else {}
    found = {name: [metrics[name] for metrics in by_bucket] for name in names}
    return {
        name: jnp.concatenate(values) if values[0].ndim else jnp.stack(values).mean()
        for name, values in found.items()
    }


def _reduce(arrays: Any, group: Any) -> Any:
    """Add up the sums, and average the model state by count; take integers from island 0."""
    sums, model_state, count = arrays
    leaves, structure = jax.tree.flatten(sums)
    added = group.all_reduce(jnp.stack(leaves))
    floats = {
        path_text(path): x
        for path, x in jax.tree.leaves_with_path(model_state)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }
    merged = make_combiner("mean").combine(floats, count, (), group).value if floats else {}

    def merge(path: Any, x: jax.Array) -> jax.Array:
        # if no island has examples there is no mean: the state stays
        found = merged.get(path_text(path))
        return group.broadcast(x) if found is None else jnp.where(group.all_reduce(count) > 0, found, x)

    model_state = jax.tree.map_with_path(merge, model_state)
    return jax.tree.unflatten(structure, list(added)), model_state


def all_reduce_totals(transfer: Transfer, sums: Any, model_state: Any, count: jax.Array) -> tuple[Any, Any]:
    """Reduce sums and the model state over islands.

    Args:
      transfer: to the other islands.
      sums: tree of float32 scalars, which are added up.
      model_state: the model state, which is averaged by the number of examples.
      count: float32 scalar, this island's examples.

    Returns:
      (sums, model_state) of all islands.
    """
    started = transfer.start(0, _reduce, (sums, model_state, count))
    return transfer.land(0, transfer.result(0, started), (sums, model_state))


def average_model_state(transfer: Transfer, model_state: Any, count: jax.Array) -> Any:
    """Average the model states of all islands by count; take integers from island 0."""
    if not jax.tree.leaves(model_state):
        return model_state
    return all_reduce_totals(transfer, count, model_state, count)[1]
