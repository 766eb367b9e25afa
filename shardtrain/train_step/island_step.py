"""The step of several islands: compiled halves, and the bridge between them.

An island's own gradient (or its delta, after local steps) crosses bucket by bucket, is combined, and
every island makes the same update of it. One island needs none of this: see `step.py`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine import Combiner, MeshGroup, make_combiner
from shardtrain.combine.options import Combine
from shardtrain.combine.replicas import split_layers, stack_layers, stacked_paths
from shardtrain.functional.loss import Batch, Loss
from shardtrain.functional.model import Model, path_text
from shardtrain.functional.rng import step_key
from shardtrain.islands.transfer import Transfer
from shardtrain.train_step.gradients import Gradients, make_gradients
from shardtrain.train_step.placement import Placement
from shardtrain.train_step.state import State
from shardtrain.train_step.step import Metrics, apply_gradients, compiled, unless_skipped


class _Bucket(NamedTuple):
    number: int
    like: dict[str, jax.ShapeDtypeStruct]  # path -> what crosses
    # of the combiner, with shardings: a process must know them of lanes that are not its own
    state: Any
    metrics: dict[str, jax.ShapeDtypeStruct]

    def pieces(self, stacked: frozenset[str]) -> dict[str, jax.ShapeDtypeStruct]:
        return split_layers(self.like, stacked)


class Crossed(NamedTuple):
    """What came back from the other islands.

    Args:
      value: path -> array, with the shardings of what was sent.
      state: the combiner's, bucket by bucket, whole on every device.
      metrics: the combiner's, bucket by bucket.
    """

    value: dict[str, jax.Array]
    state: list[Any]
    metrics: list[dict[str, jax.Array]]


class Combining:
    """A combiner at work across islands: which arrays cross together, and what it keeps of each bucket.

    Args:
      combiner: any.
      placement: of this island.
      crossing: to the others.
    """

    def __init__(self, combiner: Combiner, placement: Placement, crossing: Transfer) -> None:
        specs = placement.specs
        self._combiner, self._crossing = combiner, crossing
        self._stacked = stacked_paths(specs.arrays, specs.sharded)
        self._whole = whole = NamedSharding(crossing.mesh, PartitionSpec())
        leaves = [
            (path_text(path), jax.ShapeDtypeStruct(leaf.shape, jnp.float32))
            for path, leaf in jax.tree.leaves_with_path(specs.abstract.params)
        ]
        together = ["all"] * len(leaves) if combiner.across_leaves else None
        self._buckets = []
        for number, bucket in enumerate(crossing.buckets([leaf for _, leaf in leaves], together)):
            like = dict(leaves[i] for i in bucket)
            shapes = _state_and_metrics(combiner, split_layers(like, self._stacked))
            state, metrics = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes
            )
            self._buckets.append(_Bucket(number, like, state, metrics))

    @property
    def labels(self) -> list[str]:
        """What the entries of a metric (L,) are of: a parameter, or a layer of a stacked one."""
        return [label for bucket in self._buckets for label in sorted(bucket.pieces(self._stacked))]

    def init(self) -> list[Any]:
        """What the combiner keeps, bucket by bucket."""
        pieces = [bucket.pieces(self._stacked) for bucket in self._buckets]
        create = jax.jit(lambda: [self._combiner.init(each) for each in pieces], out_shardings=self._whole)
        return create()

    @property
    def keeps_state(self) -> bool:
        """Whether the combiner keeps anything."""
        return any(jax.tree.leaves(bucket.state) for bucket in self._buckets)

    def start(self, tree: dict[str, jax.Array], count: jax.Array, state: Sequence[Any]) -> list[Future[Any]]:
        """Send everything on its way; the caller goes on.

        Args:
          tree: path -> float32 array on the mesh, the mean over this island's examples.
          count: float32 scalar on the mesh, how many examples.
          state: from `init`, or of the step before.
        """
        return [
            self._crossing.start(b.number, self._combine, ({p: tree[p] for p in b.like}, count, kept))
            for b, kept in zip(self._buckets, state, strict=True)
        ]

    def finish(self, tree: dict[str, jax.Array], under_way: Sequence[Future[Any]]) -> Crossed:
        """Wait for what was started.

        Args:
          tree: what was sent.
          under_way: from `start`.
        """
        crossed = Crossed({}, [], [])
        for bucket, future in zip(self._buckets, under_way, strict=True):
            like = ({path: tree[path] for path in bucket.like}, bucket.state, bucket.metrics)
            value, kept, metrics = self._crossing.land(bucket.number, future.result(), like)
            crossed.value.update(value)
            crossed.state.append(kept)
            crossed.metrics.append(metrics)
        return crossed

    def _combine(self, arrays: Any, group: Any) -> Any:
        tree, count, kept = arrays
        found = self._combiner.combine(split_layers(tree, self._stacked), count, kept, group)
        return stack_layers(found.value, tree, self._stacked), found.state, found.metrics


def _state_and_metrics(combiner: Combiner, pieces: Any) -> Any:
    """The shapes of what a combiner keeps, and of its metrics."""

    def run(tree: Any) -> Any:
        kept = combiner.init(pieces)
        return kept, combiner.combine(tree, jnp.float32(1), kept, MeshGroup("islands", 2)).metrics

    two = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), pieces)
    found = jax.eval_shape(jax.vmap(run, axis_name="islands"), two)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found)


class _Totals(NamedTuple):
    """What every island adds to, beside gradients."""

    sums: dict[str, Any]
    model_state: Any


def _total_program(arrays: Any, group: Any) -> Any:
    """Sums are added; a model state is the mean by count, or island 0's where it is of integers."""
    totals, count = arrays
    leaves, structure = jax.tree.flatten(totals.sums)
    sums = group.all_reduce(jnp.stack(leaves))
    floats = {
        path_text(path): x
        for path, x in jax.tree.leaves_with_path(totals.model_state)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }
    merged = make_combiner("mean").combine(floats, count, (), group).value if floats else {}

    def merge(path: Any, x: jax.Array) -> jax.Array:
        # where nobody had an example, the mean is of nothing
        found = merged.get(path_text(path))
        return group.broadcast(x) if found is None else jnp.where(group.all_reduce(count) > 0, found, x)

    model_state = jax.tree.map_with_path(merge, totals.model_state)
    return _Totals(jax.tree.unflatten(structure, list(sums)), model_state)


def _total(crossing: Transfer, totals: _Totals, count: jax.Array) -> _Totals:
    return crossing.land(0, crossing.start(0, _total_program, (totals, count)).result(), totals)


def total_model_state(crossing: Transfer, model_state: Any, count: jax.Array) -> Any:
    """A model state that every island changed for itself: the mean by count, or island 0's of integers."""
    if not jax.tree.leaves(model_state):
        return model_state
    return _total(crossing, _Totals({"count": count}, model_state), count).model_state


def by_path(tree: Any) -> dict[str, jax.Array]:
    """Path -> leaf."""
    return {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def like_paths(tree: Any, found: dict[str, jax.Array]) -> Any:
    """A tree of what stands at its paths."""
    return jax.tree.map_with_path(lambda path, _: found[path_text(path)], tree)


def make_island_step(
    model: Model,
    loss: Loss,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    crossing: Transfer,
    combine: Combine = Combine(),
    learning_rate: optax.Schedule | None = None,
    start_row: int = 0,
    meet: Callable[[str], None] = lambda name: None,
) -> "IslandStep":
    """The training step of one island among several.

    Args:
      model: the model.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      placement: of this model and optimizer on this island, whose own replicas are averaged.
      crossing: to the other islands.
      combine: how islands become one.
      learning_rate: the optimizer's schedule, if it shall stand among the metrics.
      start_row: where this island's rows begin in the whole batch.
      meet: called with a name before islands meet in MPI, so that somebody can say who is missing.

    Returns:
      (state, batch) -> (state, metrics), as `step.make_step` has it; metrics are those of all islands. Where
      islands step alone, those of the loss come with the step that combines, and have count 0 until then;
      learning_rate, and grad_norm and skipped until then, are the island's own. It remembers what happened
      since islands last met: give it the states that it returns.
    """
    assert placement.combine.is_mean
    kind = _DeltaStep if combine.on_deltas else _GradientStep
    return kind(model, loss, optimizer, placement, crossing, combine, learning_rate, start_row, meet)


class IslandStep(ABC):
    """A step across islands; see `make_island_step`."""

    def __init__(
        self,
        model: Model,
        loss: Loss,
        optimizer: optax.GradientTransformation,
        placement: Placement,
        crossing: Transfer,
        combine: Combine,
        learning_rate: optax.Schedule | None,
        start_row: int,
        meet: Callable[[str], None],
    ) -> None:
        self._crossing, self._combine, self._placement = crossing, combine, placement
        self._meet = meet
        self._combining = Combining(combine.combiner, placement, crossing)
        self.labels = self._combining.labels
        self._make(model, loss, optimizer, learning_rate, start_row)

    def init_combine_state(self) -> list[Any]:
        """What the combiner keeps on this island, for `State.combine_state`."""
        return self._combining.init()

    @property
    def keeps_state(self) -> bool:
        """Whether the combiner keeps anything."""
        return self._combining.keeps_state

    def combines(self, step: int) -> bool:
        """Whether islands meet at the end of this step (counted from 1)."""
        return step % self._combine.local_steps == 0

    def forget(self) -> None:
        """The next state is not the one that was returned last."""
        return

    @abstractmethod
    def _make(self, model: Model, loss: Loss, optimizer: Any, learning_rate: Any, start_row: int) -> None: ...

    @abstractmethod
    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """One step."""


class _GradientStep(IslandStep):
    """Gradients cross in every step; microbatches before the last send nothing."""

    def _make(self, model: Model, loss: Loss, optimizer: Any, learning_rate: Any, start_row: int) -> None:
        placement, combine, mesh = self._placement, self._combine, self._placement.mesh
        gradients = make_gradients(model, loss, placement, start_row)
        sizes = [mesh.shape[axis] for axis in placement.layout.batch_axes]
        factor = math.prod(sizes) if combine.inside == "sum" else 1

        def local(state: State, batch: Batch) -> Gradients:
            found = gradients(state.params, state.model_state, step_key(state.seed, state.step), batch)
            return found._replace(grads=jax.tree.map(lambda g: g * factor, found.grads))

        def update(state: State, found: Gradients, kept: Any, extra: Any) -> tuple[State, Metrics]:
            new, metrics = apply_gradients(optimizer, placement, state, found)
            new = new._replace(combine_state=kept)
            return unless_skipped(state, new, {**metrics, **joined_metrics(extra)}, learning_rate)

        whole = NamedSharding(mesh, PartitionSpec())
        sharded = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            placement.specs.sharded,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        state = placement.state._replace(combine_state=whole)
        shardings = Gradients(whole, whole, sharded, whole, whole)  # type: ignore[arg-type]
        self._local = jax.jit(local, in_shardings=(state, placement.batch), out_shardings=shardings)
        self._update = jax.jit(
            update,
            in_shardings=(state, shardings, whole, whole),
            out_shardings=(state, whole),
            donate_argnums=0,
        )

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """One step."""
        # who comes late to the meeting computed longer
        found = jax.block_until_ready(self._local(state, batch))
        grads = by_path(found.grads)
        self._meet("combine gradients")
        under_way = self._combining.start(grads, found.count, state.combine_state)
        sums = {"loss_sum": found.loss_sum, "count": found.count, "metrics": found.metrics}
        totals = _total(self._crossing, _Totals(sums, found.model_state), found.count)
        crossed = self._combining.finish(grads, under_way)
        combined = like_paths(found.grads, crossed.value)
        found = Gradients(grads=combined, model_state=totals.model_state, **totals.sums)
        return self._update(state, found, crossed.state, crossed.metrics)


def joined_metrics(by_bucket: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The metrics of all buckets: one array (L,) of all buckets, or the mean of their scalars."""
    names = by_bucket[0] if by_bucket else {}
    found = {name: [metrics[name] for metrics in by_bucket] for name in names}
    return {
        name: jnp.concatenate(values) if values[0].ndim else jnp.stack(values).mean()
        for name, values in found.items()
    }


class _DeltaStep(IslandStep):
    """Each island steps with its own optimizer; every `local_steps` steps what it changed is combined."""

    def _make(self, model: Model, loss: Loss, optimizer: Any, learning_rate: Any, start_row: int) -> None:
        placement = self._placement
        gradients = make_gradients(model, loss, placement, start_row)
        # since islands last met: the parameters that all had then, steps done, and what was counted
        self._common: Any = None
        self._done = 0
        self._sums: Any = None

        def step(state: State, batch: Batch) -> tuple[State, Metrics]:
            key = step_key(state.seed, state.step)
            found = gradients(state.params, state.model_state, key, batch)
            new, metrics = apply_gradients(optimizer, placement, state, found)
            # an island without examples takes no step
            new = jax.tree.map(lambda n, o: jnp.where(found.count > 0, n.astype(o.dtype), o), new, state)
            return unless_skipped(state, new, metrics, learning_rate)

        def delta(params: Any, common: Any) -> Any:
            return jax.tree.map(lambda p, c: p.astype(jnp.float32) - c.astype(jnp.float32), params, common)

        def merged(common: Any, deltas: Any) -> Any:
            return jax.tree.map(lambda c, d: (c.astype(jnp.float32) + d).astype(c.dtype), common, deltas)

        params = placement.state.params
        self._step = compiled(step, placement)
        self._copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=params)
        self._delta = jax.jit(delta, out_shardings=params)
        self._merged = jax.jit(merged, out_shardings=params)

    def forget(self) -> None:
        """See `IslandStep.forget`."""
        self._common = self._sums = None
        self._done = 0

    def __call__(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """One step."""
        kept, state = state.combine_state, state._replace(combine_state=())
        if self._sums is None:
            self._common, self._done = self._copy(state.params), int(state.step)
        state, metrics = self._step(state, batch)
        self._done += 1
        sums = _counted(metrics)
        self._sums = sums if self._sums is None else jax.tree.map(jnp.add, self._sums, sums)
        if not self.combines(self._done):
            return state._replace(combine_state=kept), {
                **metrics,
                **_shown(jax.tree.map(jnp.zeros_like, sums)),
            }
        deltas = by_path(jax.block_until_ready(self._delta(state.params, self._common)))
        self._meet("combine deltas")
        under_way = self._combining.start(deltas, self._sums["count"], kept)
        totals = _total(self._crossing, _Totals(self._sums, state.model_state), self._sums["count"])
        crossed = self._combining.finish(deltas, under_way)
        params = self._merged(self._common, like_paths(state.params, crossed.value))
        self._common = self._sums = None
        state = state._replace(params=params, model_state=totals.model_state, combine_state=crossed.state)
        others = {
            "grad_norm": jnp.sqrt(totals.sums["squares"] / jnp.maximum(totals.sums["steps"], 1)),
            "skipped_by_islands": totals.sums["skipped"],
        }
        return state, {**metrics, **_shown(totals.sums), **others, **joined_metrics(crossed.metrics)}


def _counted(metrics: Metrics) -> dict[str, Any]:
    """The sums of a step; nothing but that it was skipped where it was."""
    skipped = metrics["skipped"]
    sums = {
        "loss_sum": metrics["loss_sum"],
        "count": metrics["count"],
        "metrics": {name: value for name, value in metrics.items() if isinstance(value, tuple)},
        "squares": metrics["grad_norm"] ** 2,
        "steps": jnp.where(metrics["count"] > 0, 1.0, 0.0),
    }
    return {**jax.tree.map(lambda x: jnp.where(skipped > 0, 0, x), sums), "skipped": skipped}


def _shown(sums: dict[str, Any]) -> Metrics:
    return {"loss_sum": sums["loss_sum"], "count": sums["count"], **sums["metrics"]}
