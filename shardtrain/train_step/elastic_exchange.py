"""What the islands of an elastic run add up in an exchange, and the update that follows it.

A slot of the batch is a replica, whichever island computes it, so the numbers do not depend on who is there:
the sum of gradients; the mean gradient of each replica, for a combiner such as Adasum; or what each replica
changed in some local steps. Next: `elastic_program.py`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.group import MeshGroup
from shardtrain.combine.replicas import find_stacked_paths, list_combined_entries, split_layers, stack_layers
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.elastic.codecs import CODECS
from shardtrain.elastic.epoch import find_next
from shardtrain.functional.loss import Batch
from shardtrain.functional.rng import step_key
from shardtrain.functional.sums import Sums
from shardtrain.train_step.drift import make_round_merges
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_compute import Training, make_step_alone
from shardtrain.train_step.placement import Placement, attach_shardings, constrain, find_own_shardings
from shardtrain.train_step.state import Metrics, State, get_scale, init_local, init_outer, split_fragments
from shardtrain.train_step.update import (
    apply_gradients,
    compute_gradient_metrics,
    keep_unless_skipped,
    make_merge_metrics,
)

CODED = ("grads", "values")
"""What a codec sends of the sums of an exchange; losses, counts and states are sent as they are."""

SLOTS = "slots"
"""The name of the dim of slots inside a combiner."""


Call = Callable[..., Any]


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function."""
    return function(*arguments)


def find_exchange_problems(synchronisation: Synchronisation) -> list[str]:
    """Return why islands that come and go cannot be synchronised like this; [] if they can."""
    plain = Synchronisation()
    problems = [
        f"{option} is {getattr(synchronisation, name)!r}, and each exchange merges all that replicas have"
        f" changed, for all of them; use {getattr(plain, name)!r}"
        for name, option in {
            "inside": "inside",
            "fragments": "--fragments",
            "overlap": "--overlap",
            "when": "--sync-when",
            "distance": "--clock-distance",
            "synchronous_steps": "--synchronous-steps",
        }.items()
        if getattr(synchronisation, name) != getattr(plain, name)
    ]
    _, synchronisation = split_codec(synchronisation)
    if type(synchronisation).rounds is not Synchronisation.rounds:
        problems.append(f"{type(synchronisation).__name__} has rounds of its own; use Synchronisation")
    elif jax.tree.leaves(
        jax.eval_shape(synchronisation.combiner.init, {"": jax.ShapeDtypeStruct((8, 8), "float32")})
    ):
        problems.append(
            f"--combine is {synchronisation.by!r}, whose state is known to one island only, and lost with it;"
            f" use mean or adasum, alone or after one of the codecs {', '.join(CODECS)}"
        )
    elif not synchronisation.combiner.is_common:
        problems.append(
            f"--combine is {synchronisation.by!r}, whose result is not common; use mean or adasum"
        )
    return problems


def split_codec(synchronisation: Synchronisation) -> tuple[str, Synchronisation]:
    """Return the codec by which islands send, "" for none, and the synchronisation without it."""
    codec, _, by = synchronisation.by.partition("+") if isinstance(synchronisation.by, str) else ("", "", "")
    return (codec, replace(synchronisation, by=by)) if codec in CODECS else ("", synchronisation)


Rate = Callable[[jax.Array], jax.Array]
"""Number of slots of a step -> factor of its learning rate."""


def make_exchange(
    training: Training,
    placement: Placement,
    synchronisation: Synchronisation,
    num_slots: int,
    rate: Rate | None = None,
) -> "GradientExchange | LocalStepsExchange":
    """Make the exchange of a run.

    Its `contribute` returns a tree of arrays, which is added up over slots; `update` returns the state after
    the exchange and its metrics, given the sum over all slots, for use inside jit.

    Args:
      training: model, loss and optimizer.
      placement: the placement on this island's mesh, whose replicas take the mean.
      synchronisation: how slots are synchronised, without a codec, see `find_exchange_problems`.
      num_slots: largest number of slots of a step.
      rate: scales the learning rate of steps that exchange gradients; None leaves it.
    """
    if synchronisation.on_deltas:
        return LocalStepsExchange(training, placement, synchronisation, num_slots)
    return GradientExchange(training, placement, synchronisation, num_slots, rate)


class GradientExchange:
    """Every step is an exchange of gradients, see `make_exchange`."""

    def __init__(
        self,
        training: Training,
        placement: Placement,
        synchronisation: Synchronisation,
        num_slots: int,
        rate: Rate | None = None,
    ) -> None:
        self._training, self._placement, self._rate = training, placement, rate
        self._sums = synchronisation.is_mean
        self._reduction = reduction = _Reduction(placement, synchronisation, num_slots)
        gradients = make_gradients(training.model, training.loss, placement, mean=not self._sums)

        def compute(state: State, batch: Batch, first_row: jax.Array, slot: jax.Array) -> dict[str, Any]:
            key, scale = step_key(state.seed, state.step), get_scale(state.loss_scale)
            found = gradients(state.params, state.model_state, key, batch, first_row, scale)
            model_state = _weigh_state(found.model_state, found.count, slot, num_slots)
            common = {**found.of_loss, "model_state": model_state}
            if rate is not None:
                common["slots"] = jnp.float32(1)
            if self._sums:
                return {**common, "grads": found.grads}
            return {**common, **reduction.contribute(found.grads, found.count, slot)}

        whole = NamedSharding(placement.mesh, PartitionSpec())
        self._compute = jax.jit(
            compute,
            in_shardings=(placement.state, placement.batch, whole, whole),
            compiler_options=placement.compiler_options,
        )

    def contribute(
        self, state: State, batches: Iterable[Batch], first_row: Any, slot: Any, call: Call = call
    ) -> Any:
        """Return the sums of a slot.

        Args:
          state: the state after the exchange before.
          batches: the rows of the slot in each step until the exchange.
          first_row: uint32, the number of its first row in a batch.
          slot: uint32, its number.
          call: calls a compiled function; `jax.eval_shape` finds the shapes.
        """
        (batch,) = batches
        return call(self._compute, state, batch, first_row, slot)

    def update(self, state: State, total: dict[str, Any]) -> tuple[State, Metrics]:
        """Update by the combined gradient."""
        count, extra = total["count"], dict[str, Any]()
        model_state = _average_state(total["model_state"], state.model_state)
        found = Sums(total["loss_sum"], count, total["metrics"], total.get("grads"), model_state)
        if self._sums:
            found = found.of_mean_loss
        else:
            combined, extra = self._reduction.reduce(total)
            params = self._placement.specs.abstract.params
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
            found = found._replace(grads=self._reduction.fragment.put(zeros, combined))
        metrics = {**compute_gradient_metrics(found), **extra}
        optimizer, schedule = self._training.optimizer, self._training.learning_rate
        if self._rate is not None:
            optimizer, schedule = _scale_rate(optimizer, schedule, self._rate(total["slots"]))

        def apply(state: State) -> State:
            return apply_gradients(optimizer, self._placement, state, found, metrics["grad_norm"])

        return keep_unless_skipped(apply, self._placement, state, metrics, schedule)


def _scale_rate(
    optimizer: optax.GradientTransformation, schedule: optax.Schedule | None, factor: jax.Array
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """Return an optimizer that applies its learning rate last, and its schedule, with a scaled rate."""

    def update(grads: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        found, state = optimizer.update(grads, state, params, **extra)
        return jax.tree.map(lambda x: (factor * x).astype(x.dtype), found), state

    scaled = optimizer._replace(update=update)
    return scaled, None if schedule is None else lambda step: factor * schedule(step)


class LocalStepsExchange:
    """Slots take steps of their own, and what they changed is exchanged, see `make_exchange`.

    The states of their optimizers are averaged too: each exchange begins from a common state, and what a lost
    island did since the last one can be done again by others (Cheng and Glasgow 2025, Local Adam).
    """

    def __init__(
        self, training: Training, placement: Placement, synchronisation: Synchronisation, num_slots: int
    ) -> None:
        self._learning_rate, self._synchronisation = training.learning_rate, synchronisation
        (self._round,) = make_round_merges(synchronisation, placement.specs)
        self._reduction = reduction = _Reduction(placement, synchronisation, num_slots)
        self._step, self._find_sums = make_step_alone(training, placement, synchronisation)
        self._zeros: Any = None

        def begin(state: State, sums: Any) -> State:
            local = init_local(state.params, synchronisation, sums)._replace(model_state=state.model_state)
            new = jax.tree.map(jnp.copy, state._replace(local=local))
            shardings = find_own_shardings(synchronisation, placement, placement.state, sums)
            # copies, as a step donates its state
            return jax.lax.with_sharding_constraint(new, shardings._replace(combine_state=()))

        def finish(state: State, slot: jax.Array) -> dict[str, Any]:
            local, count = state.local, state.local.count[0]
            found = reduction.contribute(local.drift, count, slot)
            own = _weigh_state((state.opt_state, local.model_state), count, slot, num_slots)
            return {"sums": local.sums, "states": own, **found}

        self._begin, self._finish = jax.jit(begin), jax.jit(finish)

    def contribute(
        self, state: State, batches: Iterable[Batch], first_row: Any, slot: Any, call: Call = call
    ) -> Any:
        """Take the steps of a slot, and return what they changed."""
        own = None
        for batch in batches:
            own = own or call(self._begin, state, self._make_zeros(state, batch))
            own, _ = call(self._step, own, batch, first_row)
        return call(self._finish, own, slot)

    def _make_zeros(self, state: State, batch: Batch) -> Any:
        self._zeros = self._zeros or self._find_sums(state, batch)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._zeros)

    def update(self, state: State, total: dict[str, Any]) -> tuple[State, Metrics]:
        """Apply the combined changes of the slots."""
        sums = total["sums"]
        combined, extra = self._reduction.reduce(total)
        params, outer_state = self._round.apply(state.params, state.outer_state, combined)
        opt_state, model_state = _average_state(total["states"], (state.opt_state, state.model_state))
        new = state._replace(
            params=params, model_state=model_state, opt_state=opt_state, outer_state=outer_state
        )
        count = total["states"]["examples"].sum()
        # without a step that was not skipped nothing changes
        new = jax.tree.map(lambda n, old: jnp.where(count > 0, n.astype(old.dtype), old), new, state)
        step = find_next(state.step, self._synchronisation.every)
        metrics = {
            **make_merge_metrics(sums),
            "skipped": jnp.where(sums["steps"] > 0, 0.0, 1.0),
            **extra,
        }
        if self._learning_rate is not None:
            metrics["learning_rate"] = self._learning_rate(step - 1)
        return new._replace(step=step), metrics


def _weigh(tree: Any, count: jax.Array) -> Any:
    return jax.tree.map(lambda x: jnp.where(count > 0, x * count, 0), tree)


def _put(x: jax.Array, slot: jax.Array, num_slots: int) -> jax.Array:
    """Return an array in the row of its slot, the others 0."""
    return jnp.zeros((num_slots, *x.shape), x.dtype).at[slot].set(x)


def _weigh_state(tree: Any, count: jax.Array, slot: jax.Array, num_slots: int) -> dict[str, Any]:
    """Return what a slot adds to a common state: the mean, but for integers, such as counters and keys."""

    def weigh(x: jax.Array) -> jax.Array:
        return _weigh(x, count) if jnp.issubdtype(x.dtype, jnp.inexact) else _put(x, slot, num_slots)

    return {"state": jax.tree.map(weigh, tree), "examples": _put(count, slot, num_slots)}


def _average_state(total: dict[str, Any], like: Any) -> Any:
    """Return the common state; its integers are those of the slot with most examples.

    Args:
      total: the sum of `_weigh_state` over all slots.
      like: the old state, which stays without examples.
    """
    examples = total["examples"]
    count, slot = examples.sum(), jnp.argmax(examples)

    def average(x: jax.Array, old: jax.Array) -> jax.Array:
        is_mean = jnp.issubdtype(old.dtype, jnp.inexact)
        found = x / jnp.where(count > 0, count, 1) if is_mean else x[slot]
        return jnp.where(count > 0, found.astype(old.dtype), old)

    return jax.tree.map(average, total["state"], like)


def add_outer_state(state: State, synchronisation: Synchronisation, placement: Placement) -> State:
    """Return a state, arrays or shapes, with that of the outer optimizer, if it has none yet."""
    if not synchronisation.on_deltas or state.outer_state:
        return state

    def create(params: Any) -> Any:
        fragments = split_fragments(synchronisation, placement.specs)
        return init_outer(fragments, synchronisation.outer_optimizer, params)

    shardings = find_exchange_shardings(synchronisation, placement).outer_state
    if isinstance(state.step, jax.ShapeDtypeStruct):
        outer = attach_shardings(jax.eval_shape(create, state.params), shardings)
    else:
        outer = jax.jit(create, out_shardings=shardings)(state.params)
    return state._replace(outer_state=outer)


def find_exchange_shardings(synchronisation: Synchronisation, placement: Placement) -> State:
    """Return the shardings of the state of an elastic run."""
    if not synchronisation.on_deltas:
        return placement.state
    own = find_own_shardings(synchronisation, placement, placement.state)
    return placement.state._replace(outer_state=own.outer_state)


class _Reduction:
    """The reduction of one tree of each slot to a common one, for use inside jit.

    A mean is a weighted sum; any other combiner receives the trees of all slots, each in its own row.
    """

    def __init__(self, placement: Placement, synchronisation: Synchronisation, num_slots: int) -> None:
        self._placement, self._by, self._num_slots = placement, synchronisation.by, num_slots
        self._combiner = synchronisation.combiner
        (self.fragment,) = split_fragments(synchronisation, placement.specs)
        specs = placement.specs
        self._stacked = find_stacked_paths(specs.arrays, specs.sharded) & self.fragment.rows.keys()
        self._entries = list_combined_entries(specs)[1]

    def contribute(self, tree: Any, count: jax.Array, slot: jax.Array) -> dict[str, Any]:
        """Return what a slot adds to the sum of an exchange.

        Args:
          tree: like params, the mean over the examples of a slot.
          count: float32 scalar, the number of its examples.
          slot: its number.
        """
        own = self.fragment.take(tree)
        if self._by == "mean":
            return {"values": _weigh(own, count), "counts": count}
        rows = jax.tree.map(lambda x: _put(x, slot, self._num_slots), own)
        return {"values": rows, "counts": _put(count, slot, self._num_slots)}

    def reduce(self, total: dict[str, Any]) -> tuple[Any, Metrics]:
        """Return path -> common array, from the sum over all slots, and the metrics of the combiner."""
        found, extra = total["values"], {}
        if self._by == "mean":
            divisor = jnp.where(total["counts"] > 0, total["counts"], 1)
            found = jax.tree.map(lambda x: x / divisor, found)
        else:
            # every device combines whole arrays: the rows of a slot are sharded over no axis
            found = constrain(found, jax.tree.map(lambda _: PartitionSpec(), found), self._placement.mesh)
            group = MeshGroup(SLOTS, self._num_slots)

            def combine(tree: Any, count: jax.Array) -> tuple[Any, Metrics]:
                layers = split_layers(tree, self._stacked)
                own = self._combiner.combine(layers, count, self._combiner.init(layers), group)
                return stack_layers(own.value, tree, self._stacked), own.metrics

            by_slot = jax.vmap(combine, axis_name=SLOTS)(found, total["counts"])
            found, extra = jax.tree.map(lambda x: x[0], by_slot)
            if self._entries is not None:
                extra = {name: x[np.array(self._entries)] if x.ndim else x for name, x in extra.items()}
        return found, extra
