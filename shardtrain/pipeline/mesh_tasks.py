"""Run the forward, backward and weight task of one stage in one tick of a pipeline inside a mesh.

The backward is written by hand: it recomputes the forward of a part from its kept input. Next:
`mesh_pipeline.py`, which scans over the ticks and exchanges results between them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from shardtrain.functional.float_gradients import vjp
from shardtrain.functional.sums import Sums, add_block_grads, add_grads, add_loss
from shardtrain.pipeline.activations import Activations, get, put
from shardtrain.pipeline.mesh_stage import MeshStage
from shardtrain.pipeline.tick_arrays import NONE


class Branches:
    """Conditionals whose branches return equally sharded arrays.

    Args:
      compute: the forward computations of this stage.
      grad_specs: like params, the PartitionSpec of each gradient; {} without a backward pass.
    """

    def __init__(self, compute: MeshStage, grad_specs: Any) -> None:
        self._compute, self._grad_specs = compute, grad_specs

    def branch_by_size(
        self,
        is_present: jax.Array,
        chunk: Any,
        run: Callable[..., Any],
        skip: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        """Return `run(size, *operands)` where a task is present, else `skip(*operands)`.

        There is a branch for each number of blocks of a part, as XLA needs static sizes.

        Args:
          is_present: whether this stage has the task.
          chunk: the chunk of the task.
          run: (number of blocks of the part, *operands) -> results.
          skip: operands -> results of the same shapes.
          operands: arrays that are passed to the branches.
        """
        counts = self._compute.stages.counts
        sizes = sorted(set(counts))
        which = self._compute.select_part([sizes.index(count) for count in counts], chunk)
        branches = [skip, *(partial(run, size) for size in sizes)]
        return self._switch(jnp.where(is_present, 1 + which, 0), branches, *operands)

    def branch(
        self, condition: jax.Array, yes: Callable[..., Any], no: Callable[..., Any], *operands: Any
    ) -> Any:
        """Return `yes(*operands)` where a condition holds, else `no(*operands)`."""
        return self._switch(condition.astype(jnp.int32), [no, yes], *operands)

    def constrain(self, result: Any) -> Any:
        """Shard gradients as their parameters, and activations and lists of cotangents as blocks do."""
        tree = self._compute.tree

        def constrain(x: Any) -> Any:
            if isinstance(x, Activations):
                return tree.constrain(x)
            if isinstance(x, list):
                return tree.constrain_floats(x)
            grads = jax.tree.map(lax.with_sharding_constraint, x.grads, self._grad_specs)
            return x._replace(grads=jax.tree.map(_replicas_first, grads))

        return jax.tree.map(constrain, result, is_leaf=lambda x: isinstance(x, Sums | Activations | list))

    def _switch(self, which: jax.Array, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        def constrained(branch: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *operands: self.constrain(branch(*operands))

        return lax.switch(which, [constrained(branch) for branch in branches], *operands)


def _replicas_first(x: jax.Array) -> jax.Array:
    """Make XLA for GPUs store a sum of gradients in the order of its dims.

    Otherwise it stores the result of a branch with the blocks before the replicas, the order in which the
    scan of a backward pass makes gradients, and copies all sums before each conditional. XLA for CPUs copies
    them if the order is given.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if _is_on_gpus() else x


def _is_on_gpus() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform in ("gpu", "cuda", "rocm")


class Carry(NamedTuple):
    """The state of a stage between ticks.

    Args:
      sent: activations that the last forward computed, for the next part.
      sent_back: cotangents that the last backward computed, for the previous part, like the floats of `sent`.
      inputs: slots with the inputs of parts.
      cotangents: slots with the cotangents of the outputs of parts.
      sums: the sums so far.
    """

    sent: Activations
    sent_back: list[Any]
    inputs: Activations
    cotangents: list[Any]
    sums: Sums


class TickTask(NamedTuple):
    """A task of this tick on this stage; if there is none, its numbers are 0 and not used.

    Args:
      never: False, but unknown to XLA, see `order_after`.
      is_present: whether this stage has such a task.
      is_first: whether it is the task of the first part.
      is_last: whether it is the task of the last part.
      microbatch: the number of the microbatch.
      chunk: the number of the chunk.
      input: slot of the part's input.
      cotangent: slot of the cotangent of the part's output.
    """

    never: jax.Array
    is_present: jax.Array
    is_first: jax.Array
    is_last: jax.Array
    microbatch: jax.Array
    chunk: Any
    input: jax.Array
    cotangent: jax.Array


class StageTasks:
    """The tasks of one stage, each (task, carry) -> carry; a task that is not present changes nothing.

    Args:
      compute: the computations of this stage.
      branches: the conditionals that decide what runs.
      has_weight: whether gradients of weights are separate tasks.
      whole_specs: like params, PartitionSpecs without the axes of rows, for the layers before the blocks.
    """

    def __init__(self, compute: MeshStage, branches: Branches, has_weight: bool, whole_specs: Any) -> None:
        self._compute, self._branches = compute, branches
        self._has_weight, self._whole_specs = has_weight, whole_specs

    def forward(self, task: TickTask, carry: Carry) -> Carry:
        """Run a part on its input; in evaluation the last part also adds its loss."""
        compute = self._compute
        # the first part reads the batch, any other part what arrived in its slot
        entering = self._branches.branch(
            task.is_first,
            lambda: self._first(task, compute.rest),
            lambda: get(carry.inputs, task.input),
        )

        def run(size: int) -> Activations:
            params = compute.block_params(size, task.chunk)
            return compute.run(size, params, task.chunk, task.microbatch, entering)

        # While training the output of the last part is needed only by its own backward, which recomputes it.
        # Without a task the input is sent on, and no stage keeps it.
        is_needed = task.is_present & ~task.is_last if compute.train else task.is_present
        leaving = self._branches.branch_by_size(is_needed, task.chunk, run, lambda: entering)
        if not compute.train:
            return carry._replace(sent=leaving, sums=self._add_loss(task, leaving, carry.sums))
        # the first part keeps its own input for the backward, which must wait for this forward
        kept = entering._replace(floats=order_after(entering.floats, leaving.floats, task.never))
        inputs = put(carry.inputs, kept, jnp.where(task.is_first, task.input, NONE))
        return carry._replace(inputs=inputs, sent=leaving)

    def _first(self, task: TickTask, rest: Any) -> Activations:
        """Return the activations of the batch that enter the blocks."""
        # A lookup, and the scatter of its gradient, need a table that is not sharded over the axes of rows:
        # otherwise a check of XLA's partitioner fails here and ends the process.
        whole = {
            name: jax.tree.map(lax.with_sharding_constraint, rest[name], self._whole_specs[name])
            for name in rest
        }
        return self._compute.first(whole, task.microbatch)

    def _add_loss(self, task: TickTask, leaving: Activations, sums: Sums) -> Sums:
        def add(sums: Sums) -> Sums:
            loss_sum, (count, metrics) = self._compute.compute_loss(
                self._compute.rest, leaving, task.microbatch
            )
            return add_loss(sums, loss_sum, count, metrics)

        return self._branches.branch(task.is_last, add, lambda sums: sums, sums)

    def backward(self, task: TickTask, carry: Carry) -> Carry:
        """Compute the cotangent of a part's input, and without weight tasks the gradients of its blocks."""
        has_weight = self._has_weight
        wanted = ("entering",) if has_weight else ("entering", "params")

        def run(size: int, sums: Sums) -> tuple[Any, Any, Sums]:
            # recompute the forward from the kept input, then pull the cotangent of its output back
            leaving, pull = self._vjp(size, task, carry, wanted)
            cotangent, sums = self._output_cotangent(size, task, leaving, carry, sums)
            found = pull(cotangent)
            if has_weight:
                return cotangent, found["entering"], self._add_first(task, found["entering"], sums)
            sums = add_block_grads(sums, found["params"], self._compute.first_block(task.chunk))
            return cotangent, found["entering"], sums

        def skip(sums: Sums) -> tuple[Any, Any, Sums]:
            return carry.sent_back, carry.sent_back, sums

        cotangent, sent_back, sums = self._branches.branch_by_size(
            task.is_present, task.chunk, run, skip, carry.sums
        )
        if not has_weight:
            sums = self._add_first(task, sent_back, sums)
        # the weight task of the last part needs the cotangent that was computed here
        cotangents = put(carry.cotangents, cotangent, task.cotangent) if has_weight else carry.cotangents
        return carry._replace(sent_back=sent_back, cotangents=cotangents, sums=sums)

    def weight(self, task: TickTask, carry: Carry) -> Carry:
        """Compute the gradients of a part's blocks."""

        def run(size: int, sums: Sums) -> Sums:
            _, pull = self._vjp(size, task, carry, ("params",))
            found = pull(get(carry.cotangents, task.cotangent))
            return add_block_grads(sums, found["params"], self._compute.first_block(task.chunk))

        sums = self._branches.branch_by_size(task.is_present, task.chunk, run, lambda sums: sums, carry.sums)
        return carry._replace(sums=sums)

    def _vjp(
        self, size: int, task: TickTask, carry: Carry, wanted: Sequence[str]
    ) -> tuple[Activations, Callable[[list[Any]], dict[str, Any]]]:
        """Return a part's output, and the function from its cotangent to the cotangents of the wanted inputs.

        Args:
          size: blocks of the part.
          task: the task of this tick.
          carry: the carry, with the part's input.
          wanted: "entering" (the floats of the input), "params" (the parameters of the blocks).
        """
        compute, entering = self._compute, get(carry.inputs, task.input)
        # differentiate only with respect to the wanted inputs; the other values are constants
        values = {"params": compute.block_params(size, task.chunk), "entering": entering.floats}

        def run(varied: dict[str, Any]) -> Activations:
            params, floats = ({**values, **varied}[name] for name in ("params", "entering"))
            inputs = Activations(floats, entering.others)
            return compute.run(size, params, task.chunk, task.microbatch, inputs)

        floats, pull, others = vjp(run, {name: values[name] for name in wanted})
        return Activations(floats, others), lambda cotangent: pull(cotangent)[0]

    def _output_cotangent(
        self, size: int, task: TickTask, leaving: Activations, carry: Carry, sums: Sums
    ) -> tuple[list[Any], Sums]:
        """Return the cotangent of a part's output, and the sums with the loss and its gradients added."""
        compute = self._compute

        def of_loss(sums: Sums) -> tuple[list[Any], Sums]:
            def compute_loss(rest: Any, floats: Any) -> Any:
                return compute.compute_loss(rest, Activations(floats, leaving.others), task.microbatch)

            loss_sum, pull, (count, metrics) = vjp(compute_loss, compute.rest, leaving.floats)
            grads, cotangent = pull(jnp.ones_like(loss_sum))
            return cotangent, add_grads(add_loss(sums, loss_sum, count, metrics), grads)

        def arrived(sums: Sums) -> tuple[list[Any], Sums]:
            return get(carry.cotangents, task.cotangent), sums

        # a part of another size than the last cannot be the last: its branch needs no loss
        if size != compute.stages.counts[-1]:
            return arrived(sums)
        return self._branches.branch(task.is_last, of_loss, arrived, sums)

    def _add_first(self, task: TickTask, cotangent: list[Any], sums: Sums) -> Sums:
        """Add the gradients of the layers before the blocks, on the first part."""

        def add(sums: Sums) -> Sums:
            _, pull, _ = vjp(partial(self._first, task), self._compute.rest)
            return add_grads(sums, *pull(cotangent))

        return self._branches.branch(task.is_first, add, lambda sums: sums, sums)


def order_after(values: list[jax.Array], others: list[jax.Array], never: jax.Array) -> list[jax.Array]:
    """Make values depend on other arrays of the same shapes, so that their reader waits for both.

    Args:
      values: inputs of a conditional that must wait.
      others: the arrays that it must wait for.
      never: False, but unknown to XLA.
    """
    zero = jnp.zeros((), jnp.float32)
    return [jnp.where(never & (y != 0), zero.astype(x.dtype), x) for x, y in zip(values, others, strict=True)]
