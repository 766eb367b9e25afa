"""What is planned: a model with its loss, optimizer and batch, traced once for each way to recompute.

Next: `search.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import optax

from shardtrain import axes
from shardtrain.functional.loss import Loss, checked
from shardtrain.functional.model import Model
from shardtrain.functional.rng import row_key
from shardtrain.pipeline.partition import counts
from shardtrain.pipeline.stacking import Partition
from shardtrain.plan.predict import Choice
from shardtrain.plan.program import Program
from shardtrain.plan.trace import trace
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.train_step.placement import Specs, state_specs
from shardtrain.train_step.replica_sums import BoundModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model, its loss, optimizer and batch.

    Args:
      model: remat -> the model that recomputes like that; it raises ValueError where it cannot.
      loss: returns (sum, count), see `loss.Loss`.
      optimizer: any optax transformation.
      batch: name -> shape (B, ...) and dtype of each array of the global batch.
    """

    model: Callable[[str | None], Model]
    loss: Loss
    optimizer: optax.GradientTransformation
    batch: Mapping[str, jax.ShapeDtypeStruct]
    _programs: dict[str | None, Program] = field(default_factory=dict, init=False, repr=False)
    _models: dict[str | None, Model] = field(default_factory=dict, init=False, repr=False)
    _specs: dict[Any, Specs] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_rows(self) -> int:
        """Rows of the global batch."""
        return next(iter(self.batch.values())).shape[0]

    @property
    def batch_bytes(self) -> float:
        """Bytes of the global batch."""
        return float(sum(x.size * x.dtype.itemsize for x in self.batch.values()))

    def model_of(self, remat: str | None) -> Model:
        """Return the model that recomputes like this, made once."""
        if remat not in self._models:
            self._models[remat] = self.model(remat)
        return self._models[remat]

    def program(self, remat: str | None) -> Program:
        """Return the program of loss and gradient of the whole batch, traced once."""
        if remat not in self._programs:
            self._programs[remat] = _traced(self.model_of(remat), self.loss, self.batch)
        return self._programs[remat]

    def specs(self, choice: Choice, num_devices: int) -> Specs:
        """Return the specs of the state.

        Raises:
          ValueError: the layout does not fit the model, or its blocks cannot be cut like this.
        """
        layout, model = choice.layout, self.model_of(None)
        sizes = axis_sizes(layout.mesh, num_devices)
        stages = None
        if sizes[axes.PIPELINE] > 1:
            if model.chain is None or not model.chain.stacked:
                raise ValueError("a pipeline in a mesh needs a model with stacked blocks; use pipeline=1")
            parts = sizes[axes.PIPELINE] * choice.virtual_stages
            stages = Partition(
                num_stages=sizes[axes.PIPELINE],
                num_chunks=choice.virtual_stages,
                counts=tuple(counts("equal", model.chain.num_blocks, parts)),
            )
        # the size of `data` shards no parameter, so layouts that differ in it alone have the same specs
        key = (*(size for axis, size in sizes.items() if axis != axes.DATA), layout.zero, choice.virtual_stages)
        key = (*key, layout.sequence_sharded)
        if key not in self._specs:
            self._specs[key] = state_specs(model, self.optimizer, layout, sizes, stages=stages)
        found = self._specs[key]
        return found._replace(layout=_with_mesh(found.layout, layout.mesh))


def _with_mesh(layout: Any, mesh: Mapping[str, int]) -> Any:
    from dataclasses import replace

    return replace(layout, mesh=mesh)


def _traced(model: Model, loss: Loss, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Program:
    params, model_state = jax.eval_shape(model.init, jax.random.key(0))
    rows = next(iter(batch.values())).shape[0]

    def loss_sum(params: Any, model_state: Any, key: jax.Array, batch: Any) -> Any:
        bound = BoundModel(model, params, model_state, row_key(key, 0, rows))
        total, count, metrics = checked(loss(bound, batch))
        return total, (count, metrics, bound.model_state)

    gradient = jax.value_and_grad(loss_sum, has_aux=True)
    inputs = (params, model_state, jax.eval_shape(lambda: jax.random.key(0)), dict(batch))
    names = [
        *jax.tree.leaves(model.dims, is_leaf=_is_dims),
        *(None for _ in jax.tree.leaves((model_state, inputs[2]))),
        *((axes.BATCH, *(None for _ in x.shape[1:])) for x in jax.tree.leaves(inputs[3])),
    ]
    others = jax.tree.leaves(jax.eval_shape(gradient, *inputs)[0])
    results = [*(None for _ in others), *jax.tree.leaves(model.dims, is_leaf=_is_dims)]
    of_parameters = [False] * len(others) + [True] * len(jax.tree.leaves(params))
    return trace(gradient, inputs, names, results, of_parameters)


def _is_dims(leaf: object) -> bool:
    return leaf is None or isinstance(leaf, tuple)
