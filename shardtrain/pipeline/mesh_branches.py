"""Conditionals inside a pipeline's program: which task a stage has in a tick, and how large its part is.

XLA refuses branches whose results it has sharded differently, so all of them end in the same constraints.
Next: `mesh_pipeline.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from shardtrain.functional.sums import Sums
from shardtrain.pipeline.activations import Activations
from shardtrain.pipeline.stage_compute import StageCompute


class Branches:
    """Conditionals whose branches return arrays sharded alike.

    Args:
      compute: the forward computations of this stage.
      grad_specs: like params, the PartitionSpec of each gradient; {} without a backward pass.
    """

    def __init__(self, compute: StageCompute, grad_specs: Any) -> None:
        self._compute, self._grad_specs = compute, grad_specs

    def by_size(
        self,
        is_present: jax.Array,
        chunk: Any,
        run: Callable[..., Any],
        skip: Callable[..., Any],
        *operands: Any,
    ) -> Any:
        """Return `run(size, *operands)` where a task is present, else `skip(*operands)`.

        There is a branch for each number of blocks that any part has: XLA needs static sizes.

        Args:
          is_present: whether this stage has the task.
          chunk: the chunk of the task.
          run: (number of blocks of the part, *operands) -> results.
          skip: operands -> results of the same shapes.
          operands: arrays.
        """
        counts = self._compute.stages.counts
        sizes = sorted(set(counts))
        which = self._compute.of_part([sizes.index(count) for count in counts], chunk)
        branches = [skip, *(partial(run, size) for size in sizes)]
        return self._switch(jnp.where(is_present, 1 + which, 0), branches, *operands)

    def either(
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
    """Return a sum of gradients as it is; on GPUs it is stored in the order of its dims.

    XLA for GPUs otherwise stores the result of a branch with the blocks before the replicas, in the order in
    which the scan of a backward pass makes gradients, and copies all sums before each conditional. XLA for
    CPUs copies them where the order is given.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim)))) if _on_gpus() else x


def _on_gpus() -> bool:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform in ("gpu", "cuda", "rocm")
