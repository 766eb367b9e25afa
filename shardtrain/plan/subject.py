"""The subject of a plan: a model with its loss, optimizer and batch, traced once for each remat policy.

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
from shardtrain.functional.model import Model, group_by_path
from shardtrain.functional.rng import new_key
from shardtrain.pipeline.block_costs import model_costs
from shardtrain.pipeline.costs import ChainTrace
from shardtrain.pipeline.partition import counts
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.stage_costs import ModelCosts
from shardtrain.plan.machine import Rates
from shardtrain.plan.prediction import Choice, Cost, StateFigures
from shardtrain.plan.program import Program, Sharding
from shardtrain.plan.program_cost import Durations, compute_costs
from shardtrain.plan.trace import (
    ANY_TARGET,
    NO_EXCHANGE,
    Exchange,
    Target,
    count_flops_by_item_bytes,
    is_dims,
    trace_loss,
)
from shardtrain.plan.traced_attention import AttentionShapes, TracedAttention
from shardtrain.plan.traced_experts import TracedExperts
from shardtrain.plan.traffic import Weight, weights
from shardtrain.sharding.axis_sizes import axis_sizes, divisors
from shardtrain.sharding.layout import Layout
from shardtrain.train_step.placement import Specs, state_specs
from shardtrain.train_step.placement_checks import check_stages


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model with its loss, optimizer and batch.

    Args:
      model: remat policy -> the model with this policy; raises ValueError if it has no such policy.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      batch: name -> shape (B, ...) and dtype of each array of the global batch.
      rows: rows of the batch for an island, which it pads. None means the whole batch.
      resized: rows of a batch of another size, which is predicted by the programs traced for `batch`.
      unit: name of the unit that the loss counts.
      row_units: units in a row. None means that they are unknown before the model runs.
      target: the devices for which the model is traced.
    """

    model: Callable[[str | None], Model]
    loss: Loss
    optimizer: optax.GradientTransformation
    batch: Mapping[str, jax.ShapeDtypeStruct]
    rows: int | None = None
    resized: int | None = None
    unit: str = "examples"
    row_units: float | None = 1.0
    target: Target = ANY_TARGET
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def batch_rows(self) -> int:
        """Rows of the global batch."""
        return self.resized or self.traced_rows

    @property
    def traced_rows(self) -> int:
        """Rows for which the programs are traced."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def row_bytes(self) -> float:
        """Bytes of one row of a batch."""
        return sum(x.size * x.dtype.itemsize for x in self.batch.values()) / self.traced_rows

    @cached_property
    def row_flops(self) -> float:
        """Flops of one row, forward and backward, without recomputation."""
        remat = "none" if self.has_remat("none") else None
        (whole,) = self.costs(remat, [Sharding((), (), ())], Rates(flops_per_second=math.inf))
        return whole.flops / self.traced_rows

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
    def parameter_paths(self) -> Sequence[str]:
        """Paths of the parameters."""
        return list(group_by_path(self._shapes[0]))

    @property
    def model_state(self) -> Any:
        """Shapes of the model's state, such as the statistics of batch norm."""
        return self._shapes[1]

    @property
    def _shapes(self) -> tuple[Any, Any]:
        return self._once("shapes", lambda: jax.eval_shape(self.find_model(None).init, new_key(0)))

    @cached_property
    def num_experts(self) -> int:
        """Number of experts of a block; 0 if no parameter has the dim experts."""
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
        """The most positions for which the model asks the run for attention; 0 if it computes its own."""
        try:
            # the kind that allows relative positions
            found = self.attentions(Exchange(attention="all-to-all"))
        except (ValueError, UserCodeFailed):
            # the model needs more than attention over a mesh has
            return 0
        return max((q[1] for q, *_ in found), default=0)

    @cached_property
    def in_float32(self) -> bool:
        """Whether most of the flops of the model are in float32."""
        flops = count_flops_by_item_bytes(self.program(None))
        return not flops or flops.most_common(1)[0][0] >= 4

    def share(self, rows: int) -> "Subject":
        """Return the subject for an island with some rows of the batch; both share their traced programs."""
        return self._change(rows=rows)

    def resize(self, batch_rows: int) -> "Subject":
        """Return the subject with a batch of another size; both share their traced programs."""
        return self._change(resized=batch_rows)

    def _change(self, **rows: int) -> "Subject":
        found = replace(self, **rows)
        object.__setattr__(found, "_known", self._known)
        return found

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of a key, which is made once for all shares."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def rows_of(self, split: RowSplit) -> int:
        """Return the number of rows that are computed, with padding.

        Raises:
          ValueError: the batch cannot be split like this, or an island has fewer rows than microbatches.
        """
        if self.rows is None:
            split.check(self.batch_rows)
            return self.batch_rows
        # microbatches of nothing but padding have no use
        if split.microbatches > max(self.rows, 1):
            raise ValueError(f"{self.rows} rows are fewer than {split.microbatches} microbatches; use fewer")
        return split.pad_rows(self.rows)

    def find_model(self, remat: str | None) -> Model:
        """Return the model with a remat policy, which is made once."""
        return self._once(("model", remat), lambda: self.model(remat))

    def has_remat(self, remat: str | None) -> bool:
        """Return whether the model has a remat policy."""
        try:
            self.find_model(remat)
        except ValueError:
            return False
        return True

    def program(
        self, remat: str | None, *, gradient: bool = True, exchange: Exchange = NO_EXCHANGE
    ) -> Program:
        """Return the program of loss and gradient, or only of the loss, for the whole batch; traced once."""
        return self._traced(remat, gradient, exchange)[0]

    def attentions(self, exchange: Exchange) -> Sequence[AttentionShapes]:
        """Return the shapes for which the model asks the run for attention; () if it computes its own."""
        return self._traced(None, False, exchange)[1]

    def _traced(
        self, remat: str | None, gradient: bool, exchange: Exchange
    ) -> tuple[Program, Sequence[AttentionShapes]]:
        def make() -> tuple[Program, Sequence[AttentionShapes]]:
            attention = None if exchange.attention is None else TracedAttention(exchange.attention)
            experts = TracedExperts(exchange.experts, exchange.context)
            model = self.find_model(remat)
            found = trace_loss(model, self.loss, self.batch, gradient, attention, experts, self.target)
            return found, () if attention is None else tuple(dict.fromkeys(attention.found))

        return self._once((remat, gradient, exchange), make)

    def exchange(self, layout: Layout, sizes: Mapping[str, int]) -> Exchange:
        """Return the options of a layout that change the traced program."""
        context = sizes.get(axes.CONTEXT, 1)
        attention = layout.context_attention if context > 1 else None
        return Exchange(attention, sizes.get(axes.EXPERT, 1), context if self.num_experts else 1)

    def costs(
        self,
        remat: str | None,
        shardings: Sequence[Sharding],
        rates: Rates,
        *,
        gradient: bool = True,
        exchange: Exchange = NO_EXCHANGE,
    ) -> list[Cost]:
        """Return the costs of one run of a program, for each of several shardings; computed once."""
        keys = [(remat, each, rates, gradient, exchange) for each in shardings]
        missing = list(dict.fromkeys(key for key in keys if key not in self._known))
        if missing:
            durations = Durations(rates.seconds, rates.stacking_seconds, not rates.copies_stacked)
            program = self.program(remat, gradient=gradient, exchange=exchange)
            found = compute_costs(program, [each for _, each, *_ in missing], durations)
            self._known.update(zip(missing, found, strict=True))
        return [self._known[key] for key in keys]

    def state(self, choice: Choice, num_devices: int) -> "LayoutState":
        """Return the figures of a layout's state, and the layout completed for the model.

        Raises:
          ValueError: the layout does not fit the model, or its blocks cannot be cut like this.
        """
        layout, model = choice.layout, self.find_model(None)
        sizes = axis_sizes(layout.mesh, num_devices)
        # by default `data` shards no parameter, so its size does not change the specs
        rules = repr((layout.parameters, layout.activations))
        known = {**sizes, axes.DATA: min(sizes[axes.DATA], 2)} if axes.DATA not in rules else sizes
        key = (tuple(known.values()), rules, layout.unnamed, layout.zero, choice.virtual_stages)
        if key not in self._known:
            stages = self.stages(sizes[axes.PIPELINE], choice.virtual_stages)
            specs = state_specs(model, self.optimizer, layout, sizes, stages=stages)
            program, item_bytes = self.program(None), 4 if self.in_float32 else 2
            figures = compute_state_figures(specs, sizes, item_bytes, program.num_terms[-len(specs.arrays) :])
            # programs for GPUs count gathered weights themselves
            figures = replace(figures, gathered=0.0) if program.for_gpus else figures
            self._known[key] = LayoutState(specs.layout, figures)
        found = self._known[key]
        has_context = sizes.get(axes.CONTEXT, 1) > 1
        if sizes[axes.PIPELINE] > 1 and (has_context or layout.collective_matmul):
            check_stages(model, layout, sizes, Synchronisation(), self.stages(sizes[axes.PIPELINE], 1))
        if has_context:
            self._check_context(layout, found.layout.activation_rules, sizes)
        # these options change no parameter
        of_activations = {name: getattr(layout, name) for name in ("sequence_sharded", "collective_matmul")}
        return found._replace(layout=replace(found.layout, **of_activations))

    def _check_context(
        self, layout: Layout, rules: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
    ) -> None:
        """Refuse attention over context that a run would refuse."""
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
          ValueError: it does not define them.
        """
        chain = self.find_model(None).chain
        if chain is None:
            raise ValueError(
                "the model does not define its blocks; give it `blocks` (docs/pipeline.md), or let"
                " --across pipeline cut it by tracing"
            )
        return chain.num_blocks

    def traced_blocks(self, rows: int) -> ChainTrace:
        """Return the trace of the model's blocks, for a microbatch of `rows` rows."""
        microbatch = {
            name: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for name, x in self.batch.items()
        }
        return ChainTrace(self.find_model(None), self.loss, microbatch)

    def block_costs(self, rows: int) -> ModelCosts:
        """Return the costs of the blocks and ends, for a microbatch of `rows` rows; traced once."""
        init = self.optimizer.init
        return self._once(("blocks", rows), lambda: model_costs(self.traced_blocks(rows), init))

    def stages(self, num_stages: int, chunks: int) -> Partition | None:
        """Return the equal partition of the blocks into stages of a mesh; None for one stage.

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


class LayoutState(NamedTuple):
    """The figures of the state in a layout.

    Args:
      layout: the layout, completed for the model; the size of its axis data may differ.
      figures: the figures.
    """

    layout: Layout
    figures: StateFigures


def compute_state_figures(
    specs: Specs, sizes: Mapping[str, int], item_bytes: int = 4, num_gradients: Sequence[int] = ()
) -> StateFigures:
    """Compute the figures of a state from its specs.

    Args:
      specs: the specs.
      sizes: axis -> size.
      item_bytes: bytes of an element in computations.
      num_gradients: see `traffic.weights`.
    """
    blocks = [named.shape[0] for named in specs.arrays.values() if axes.LAYERS in (named.dims or ())[:1]]
    params = specs.abstract.params
    in_float32 = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), params)
    return StateFigures(
        parameters=count_tree_bytes(params, specs.params, sizes),
        optimizer=count_tree_bytes(specs.abstract.opt_state, specs.state.opt_state, sizes),
        gradients=count_tree_bytes(in_float32, specs.params, sizes),
        updated=count_tree_bytes(params, specs.sharded, sizes),
        updated_float32=count_tree_bytes(in_float32, specs.sharded, sizes),
        gathered=_count_gathered_bytes(specs, sizes, item_bytes),
        weights=_merge_weights(weights(specs.arrays, specs.layout.sharded_rules, num_gradients)),
        num_blocks=max(blocks, default=1),
        item_bytes=item_bytes,
    )


def _merge_weights(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Merge weights that are sharded alike, as their traffic adds up."""
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


def count_tree_bytes(tree: Any, specs: Any, sizes: Mapping[str, int]) -> float:
    """Return the bytes of a device's shards of a tree of arrays.

    Args:
      tree: shapes and dtypes.
      specs: the PartitionSpec of each.
      sizes: axis -> size.
    """
    leaves = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    return sum(
        math.prod(x.shape) * x.dtype.itemsize / _count_parts(spec, sizes)
        for x, spec in zip(jax.tree.leaves(tree), leaves, strict=True)
    )


def _count_parts(spec: PartitionSpec, sizes: Mapping[str, int]) -> int:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry]
    return math.prod(sizes[axis] for entry in entries for axis in entry)
