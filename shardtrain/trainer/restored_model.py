"""The model of a checkpoint on a mesh, sharded by the rules of training, without what only training needs.

Next: `trained_model.py`, the same model as a plain Flax module on one device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardtrain.checkpoints.differences import Allow, mismatches
from shardtrain.checkpoints.evaluated_params import exported_params
from shardtrain.checkpoints.manifest_entries import Leaf
from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.errors.messages import problems_error
from shardtrain.functional.activation_rules import activation_rules
from shardtrain.functional.auxiliary import plain
from shardtrain.functional.model import Model, path_text
from shardtrain.functional.rng import new_key
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import restorable_state
from shardtrain.train_step.placement import Placement, make_placement
from shardtrain.train_step.state import State
from shardtrain.trainer.restore_state import PARAMETERS

PARAMS = PARAMETERS[0]


class RestoredModel(NamedTuple):
    """A model with the parameters of a checkpoint.

    Args:
      model: the model.
      placement: its placement on the mesh.
      state: its parameters and model state; the optimizer's is empty.
    """

    model: Model
    placement: Placement
    state: State

    @property
    def apply(self) -> jax.tree_util.Partial:
        """The model in evaluation mode as a function of its inputs; its parameters are leaves of it."""
        return jax.tree_util.Partial(
            _Apply(self.model, self.placement), self.state.params, self.state.model_state
        )


def restore_model(
    reader: CheckpointReader, model: Model, layout: Layout, *, evaluated: bool = True
) -> RestoredModel:
    """Restore the parameters of a checkpoint, whatever layout saved it.

    Args:
      reader: the reader of a complete checkpoint.
      model: its model.
      layout: the layout on this machine, without stages of a pipeline.
      evaluated: restore what the run evaluates, with `evaluate_with="ema"` the average; False: what it
        trains.

    Raises:
      ValueError: the layout does not fit the devices or the model; the checkpoint is of another model, all
        arrays that differ; or its run evaluates with a function, which no checkpoint holds.
    """
    placement = make_placement(model, optax.identity(), layout, make_mesh(layout))
    state = restorable_state(placement)
    wanted = {path: x for path, x in _flat(state).items() if path.startswith(PARAMETERS)}
    saved = {path: leaf for path, leaf in reader.leaves.items() if path.startswith(PARAMETERS)}
    leaves = {path: Leaf(shape=tuple(x.shape), dtype=x.dtype.name) for path, x in wanted.items()}
    if wrong := mismatches(saved, leaves):
        raise problems_error(f"step {reader.step} is of another model than this one", wrong)
    how = (reader.extra.get("run") or {}).get("evaluate_with") if evaluated else None
    computed = [path for path in wanted if path.startswith(PARAMS)] if how else []
    stored = {path: x for path, x in wanted.items() if path not in computed}
    found: dict[str, Any] = restore_arrays(reader, stored, {}, Allow(unused=("*",)))
    value = exported_params(how, reader.leaves, reader.read)
    for path in computed:
        found[path] = jax.device_put(value(path.removeprefix(PARAMS)), wanted[path].sharding)
    zeros = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), state[:2])
    state = jax.tree.map_with_path(lambda path, x: found.get(path_text(path), x), state)
    return RestoredModel(model, placement, state._replace(step=zeros[0], seed=zeros[1]))


def _flat(tree: Any) -> dict[str, Any]:
    return {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


@dataclass(frozen=True, eq=False)
class _Apply:
    """A model under the rules of its layout as a function of its parameters; hashable by identity."""

    model: Model
    placement: Placement

    def __call__(self, params: Any, model_state: Any, *inputs: Any) -> Any:
        layout = self.placement.layout
        with activation_rules(layout.activation_rules, self.placement.mesh, *layout.tracing):
            return plain(self.model.apply(params, model_state, new_key(0), False, *inputs)[0])
