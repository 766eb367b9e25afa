"""What is planned: a model with its loss, optimizer and batch, traced once for each way to recompute.

Next: `predict.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec

from shardtrain import axes
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data.row_split import RowSplit
from shardtrain.errors.user_code import UserCodeFailed
from shardtrain.functional.frozen import drop_paths
from shardtrain.functional.key_heads import check_layout
from shardtrain.functional.loss import Loss
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key
from shardtrain.pipeline.costs import Traced
from shardtrain.pipeline.partition import counts
from shardtrain.pipeline.stacking import Partition
from shardtrain.plan.machine import Rates
from shardtrain.plan.prediction import Choice, Cost, StateFigures
from shardtrain.plan.program import Program, Sharding
from shardtrain.plan.program_cost import Durations, costs
from shardtrain.plan.trace import (
    ANY_TARGET,
    NO_EXCHANGE,
    Exchange,
    Target,
    exchange_of,
    flops_by_item_bytes,
    is_dims,
    loss_program,
)
from shardtrain.plan.traced_attention import Attended, TracedAttention
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.plan.traffic import Weight, weights
from shardtrain.sharding.axis_sizes import axis_sizes, divisors
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.placement import Specs, state_specs
from shardtrain.train_step.placement_checks import check_stages


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model, its loss, optimizer and batch.

    Args:
      model: remat -> the model that recomputes like that; it raises ValueError where it cannot.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      batch: name -> shape (B, ...) and dtype of each array of the global batch.
      rows: of an island, its share of the batch, which it fills up with padding; None: the whole batch.
      unit: the name of what the loss counts.
      row_units: what the loss counts in a row; None: not known before the model has run.
      target: the devices in whose form the model is traced.
    """

    model: Callable[[str | None], Model]
    loss: Loss
    optimizer: optax.GradientTransformation
    batch: Mapping[str, jax.ShapeDtypeStruct]
    rows: int | None = None
    unit: str = "examples"
    row_units: float | None = 1.0
    target: Target = ANY_TARGET
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def batch_rows(self) -> int:
        """Rows of the global batch."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def row_bytes(self) -> float:
        """Bytes of one row of a batch."""
        return sum(x.size * x.dtype.itemsize for x in self.batch.values()) / self.batch_rows

    @cached_property
    def row_flops(self) -> float:
        """Flops of one row, forward and backward, without recomputation."""
        try:
            self.find_model("none")
        except ValueError:
            remat = None
        else:
            remat = "none"
        (whole,) = self.costs(remat, [Sharding((), (), ())], Rates(flops_per_second=math.inf))
        return whole.flops / self.batch_rows

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(x.shape) for x in jax.tree.leaves(self._shapes[0]))

    @property
    def num_trained(self) -> int:
        """Elements of the parameters that are trained."""
        trained = drop_paths(self._shapes[0], self.find_model(None).frozen)
        return sum(math.prod(x.shape) for x in jax.tree.leaves(trained))

    @property
    def num_parameter_arrays(self) -> int:
        """Number of arrays of parameters."""
        return len(jax.tree.leaves(self._shapes[0]))

    @property
    def model_state(self) -> Any:
        """Shapes of the model's state, such as the statistics of batch norm."""
        return self._shapes[1]

    @cached_property
    def _shapes(self) -> tuple[Any, Any]:
        return jax.eval_shape(self.find_model(None).init, new_key(0))

    @cached_property
    def num_experts(self) -> int:
        """Experts of a block; 0: the model has no parameters with the dim experts."""
        dims = jax.tree.leaves(self.find_model(None).dims, is_leaf=is_dims)
        return max(
            (
                x.shape[named.index(axes.EXPERTS)]
                for x, named in zip(jax.tree.leaves(self._shapes[0]), dims, strict=True)
                if axes.EXPERTS in (named or ())
            ),
            default=0,
        )

    @cached_property
    def sequence(self) -> int:
        """The most positions that the model asks the run's attention for; 0: it computes its own."""
        try:
            # the kind that has relative positions too
            found = self.attentions(Exchange(attention="all-to-all"))
        except (ValueError, UserCodeFailed):
            # what attention over a mesh does not have
            return 0
        return max((q[1] for q, *_ in found), default=0)

    @cached_property
    def in_float32(self) -> bool:
        """Whether most of the flops of the model are in float32."""
        flops = flops_by_item_bytes(self.program(None))
        return not flops or flops.most_common(1)[0][0] >= 4

    def share(self, rows: int) -> "Subject":
        """Return the same for an island with so many rows of the batch; traced programs are shared."""
        found = replace(self, rows=rows)
        object.__setattr__(found, "_known", self._known)
        return found

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what was made for a key, made once for all shares."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def rows_of(self, split: RowSplit) -> int:
        """Return how many rows are computed, with padding.

        Raises:
          ValueError: the batch cannot be split like this, or an island has fewer rows than microbatches.
        """
        if self.rows is None:
            split.check(self.batch_rows)
            return self.batch_rows
        # padding fills up an island's rows, but microbatches of padding alone have no use
        if split.microbatches > max(self.rows, 1):
            raise ValueError(f"{self.rows} rows are fewer than {split.microbatches} microbatches; use fewer")
        return split.pad_rows(self.rows)

    def find_model(self, remat: str | None) -> Model:
        """Return the model that recomputes like this, made once."""
        return self._once(("model", remat), lambda: self.model(remat))

    def program(
        self, remat: str | None, *, gradient: bool = True, exchange: Exchange = NO_EXCHANGE
    ) -> Program:
        """Return the program of loss and gradient, or of the loss alone, of the whole batch, traced once."""
        return self._traced(remat, gradient, exchange)[0]

    def attentions(self, exchange: Exchange) -> Sequence[Attended]:
        """Return what the model asks the run's attention for; () if it computes its own."""
        return self._traced(None, False, exchange)[1]

    def _traced(
        self, remat: str | None, gradient: bool, exchange: Exchange
    ) -> tuple[Program, Sequence[Attended]]:
        def make() -> tuple[Program, Sequence[Attended]]:
            attention = None if exchange.attention is None else TracedAttention(exchange.attention)
            experts = TracedExperts(exchange.experts, exchange.context)
            model = self.find_model(remat)
            found = loss_program(model, self.loss, self.batch, gradient, attention, experts, self.target)
            return found, () if attention is None else tuple(dict.fromkeys(attention.found))

        return self._once((remat, gradient, exchange), make)

    def exchange(self, layout: Layout, sizes: Mapping[str, int]) -> Exchange:
        """Return what devices compute by hand in a layout; what differs is another program."""
        found = exchange_of(layout, sizes)
        return found if self.num_experts else found._replace(context=1)

    def costs(
        self,
        remat: str | None,
        shardings: Sequence[Sharding],
        rates: Rates,
        *,
        gradient: bool = True,
        exchange: Exchange = NO_EXCHANGE,
    ) -> list[Cost]:
        """Return what one run of a program costs a device, for each of several shardings, found once."""
        keys = [(remat, each, rates, gradient, exchange) for each in shardings]
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        if missing:
            durations = Durations(rates.seconds, rates.stacking_seconds, not rates.copies_stacked)
            program = self.program(remat, gradient=gradient, exchange=exchange)
            found = costs(program, [each for _, each, *_ in missing], durations)
            self._known.update(zip(missing, found, strict=True))
        return [self._known[key] for key in keys]

    def state(self, choice: Choice, num_devices: int) -> "StateOf":
        """Return what follows from the specs of the state, and the layout completed for the model.

        Raises:
          ValueError: the layout does not fit the model, or its blocks cannot be cut like this.
        """
        layout, model = choice.layout, self.find_model(None)
        sizes = axis_sizes(layout.mesh, num_devices)
        # by default `data` shards no parameter, so layouts that differ in its size alone have the same specs
        rules = repr((layout.parameters, layout.activations))
        known = {**sizes, axes.DATA: min(sizes[axes.DATA], 2)} if axes.DATA not in rules else sizes
        key = (tuple(known.values()), rules, layout.unnamed, layout.zero, choice.virtual_stages)
        if key not in self._known:
            stages = self.stages(sizes[axes.PIPELINE], choice.virtual_stages)
            specs = state_specs(model, self.optimizer, layout, sizes, stages=stages)
            program, item_bytes = self.program(None), 4 if self.in_float32 else 2
            figures = state_figures(specs, sizes, item_bytes, program.num_terms[-len(specs.arrays) :])
            # for GPUs gathered weights are counted where they are read
            figures = replace(figures, gathered=0.0) if program.for_gpus else figures
            self._known[key] = StateOf(specs.layout, figures)
        found = self._known[key]
        has_context = sizes.get(axes.CONTEXT, 1) > 1
        if sizes[axes.PIPELINE] > 1 and (has_context or layout.collective_matmul):
            check_stages(model, layout, sizes, Synchronisation(), self.stages(sizes[axes.PIPELINE], 1))
        if has_context:
            self._check_context(layout, found.layout.activation_rules, sizes)
        # how activations are sharded changes no parameter
        of_activations = {name: getattr(layout, name) for name in ("sequence_sharded", "collective_matmul")}
        return found._replace(layout=replace(found.layout, **of_activations))

    def _check_context(
        self, layout: Layout, rules: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
    ) -> None:
        """Refuse what a run refuses of attention over context."""
        found = self.attentions(self.exchange(layout, sizes))
        if not found:
            raise ValueError(
                f"context={sizes[axes.CONTEXT]} is planned for models that let the run compute attention"
                " (docs/context.md), and this one does not; use context=1"
            )
        for q, k, causal in found:
            check_layout(layout.context_attention, q, k, causal, rules, sizes)

    @property
    def num_blocks(self) -> int:
        """The number of the model's blocks.

        Raises:
          ValueError: it does not say what they are.
        """
        chain = self.find_model(None).chain
        if chain is None:
            raise ValueError(
                "the model does not say what its blocks are; give it `blocks` (docs/pipeline.md), or let"
                " --across pipeline cut it by tracing"
            )
        return chain.num_blocks

    def traced_blocks(self, rows: int) -> Traced:
        """Return the trace of the model's blocks, for a microbatch of so many rows."""
        microbatch = {
            name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in self.batch.items()
        }
        return Traced(self.find_model(None), self.loss, microbatch)

    def stages(self, num_stages: int, chunks: int) -> Partition | None:
        """Return the equal cut of the blocks into stages of a mesh; None for one stage.

        Raises:
          ValueError: the model has no stacked blocks, or too few.
        """
        if num_stages == 1:
            return None
        chain = self.find_model(None).chain
        if chain is None or not chain.stacked:
            raise ValueError("a pipeline in a mesh needs a model with stacked blocks; use pipeline=1")
        loops = [kernel for kernel in self.program(None).kernels if kernel.over == axes.LAYERS]
        if len(loops) != 2:
            raise ValueError(
                "a pipeline is planned for a model whose blocks are one loop, forward and backward; this one"
                f" has {len(loops)} loops over blocks; use pipeline=1"
            )
        if chain.num_blocks % (num_stages * chunks):
            raise ValueError(
                f"{chain.num_blocks} blocks cannot be cut into {num_stages * chunks} equal parts, as a plan"
                f" for a mesh needs; use one of {', '.join(map(str, divisors(chain.num_blocks)))}"
            )
        return Partition(
            num_stages=num_stages,
            num_chunks=chunks,
            counts=tuple(counts("equal", chain.num_blocks, num_stages * chunks)),
        )


class StateOf(NamedTuple):
    """The state of a layout.

    Args:
      layout: completed for the model; its sizes are those of another layout that shards parameters alike.
      figures: what follows from the specs.
    """

    layout: Layout
    figures: StateFigures


def state_figures(
    specs: Specs, sizes: Mapping[str, int], item_bytes: int = 4, num_gradients: Sequence[int] = ()
) -> StateFigures:
    """Return what follows from the specs of a state.

    Args:
      specs: the specs.
      sizes: axis -> size.
      item_bytes: of an element in computations.
      num_gradients: see `traffic.weights`.
    """
    blocks = [named.shape[0] for named in specs.arrays.values() if axes.LAYERS in (named.dims or ())[:1]]
    params = specs.abstract.params
    in_float32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), params)
    return StateFigures(
        parameters=tree_bytes(params, specs.params, sizes),
        optimizer=tree_bytes(specs.abstract.opt_state, specs.state.opt_state, sizes),
        gradients=tree_bytes(in_float32, specs.params, sizes),
        updated=tree_bytes(params, specs.sharded, sizes),
        updated_float32=tree_bytes(in_float32, specs.sharded, sizes),
        gathered=_count_gathered_bytes(specs, sizes, item_bytes),
        weights=_joined(weights(specs.arrays, specs.layout.sharded_rules, num_gradients)),
        num_blocks=max(blocks, default=1),
        item_bytes=item_bytes,
    )


def _joined(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Return one weight for all that are sharded alike: their traffic is that of one as large as all."""
    elements: dict[tuple[frozenset[str], bool, int], int] = {}
    for each in weights:
        key = each.axes, each.in_blocks, each.num_gradients
        elements[key] = elements.get(key, 0) + each.num_elements
    return tuple(
        Weight(num_elements=number, axes=over, in_blocks=in_blocks, num_gradients=num_gradients)
        for (over, in_blocks, num_gradients), number in elements.items()
    )


def _count_gathered_bytes(specs: Specs, sizes: Mapping[str, int], item_bytes: int) -> float:
    if specs.layout.zero != 3 or sizes[axes.FSDP] == 1:
        return 0.0
    found = 0.0
    for named in specs.arrays.values():
        dims = named.dims or ()
        stored = {axis for dim in dims for axis in specs.layout.parameter_rules.get(dim or "", ())}
        if axes.FSDP in stored:
            kept = math.prod(sizes[axis] for axis in stored - {axes.FSDP, axes.PIPELINE})
            blocks = named.shape[0] if axes.LAYERS in dims else 1
            found += item_bytes * math.prod(named.shape) / blocks / kept
    return found


def tree_bytes(tree: Any, specs: Any, sizes: Mapping[str, int]) -> float:
    """Return the bytes of a device's part of some arrays.

    Args:
      tree: shapes and dtypes.
      specs: like tree, a PartitionSpec each.
      sizes: axis -> size.
    """
    leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return sum(
        math.prod(x.shape) * x.dtype.itemsize / _parts(spec, sizes)
        for x, spec in zip(jax.tree.leaves(tree), leaves, strict=True)
    )


def _parts(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
    return math.prod(sizes[axis] for entry in entries for axis in entry)
