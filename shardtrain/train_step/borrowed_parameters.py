"""Exchange parameters that several pipeline stages use, and their gradients, between islands.

One stage owns each parameter (see `pipeline/stage_model.py`); other stages receive its value in every step
and return their gradient. Next: `stage_compute.py`.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain.combine.fragments import group_by_path
from shardtrain.functional.model import Tree, path_text
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.sharding.array_dims import NamedArray, is_dims
from shardtrain.sharding.resolve import complete_layout
from shardtrain.sharding.specs import partition_specs
from shardtrain.train_step.placement import Placement

if TYPE_CHECKING:
    from shardtrain.islands.mailbox import Mailbox  # importing it starts MPI


class BorrowedParameters:
    """The parameters that a stage borrows from other stages, and the parameters that it lends.

    Args:
      stage_model: the parts of the model on this stage.
      placement: the placement of the stage's own parameters on this island.
      mailbox: to the other stages of this pipeline.
      first_tag: MPI tags from here on are free.
    """

    def __init__(
        self, stage_model: StageModel, placement: Placement, mailbox: "Mailbox", first_tag: int
    ) -> None:
        self._stage_model, self._mailbox, self._first_tag = stage_model, mailbox, first_tag
        self._mesh = placement.mesh
        self.specs = _find_borrowed_specs(stage_model, placement)
        self._shapes = group_by_path(stage_model.traced.params)

    def exchange(self, params: Tree) -> Tree:
        """Send lent parameters, and return the stage's own and borrowed parameters."""
        found = group_by_path(params)
        for path, stages in self._stage_model.lent.items():
            for stage in stages:
                self._mailbox.send(found[path], stage, self._tag(path))
        for path, owner in self._stage_model.borrowed.items():
            shape = self._shapes[path]
            what = f"parameter {path} from stage {owner}"
            array = self._mailbox.receive(shape.shape, shape.dtype, owner, self._tag(path), what)
            found[path] = jax.device_put(array, NamedSharding(self._mesh, self.specs[path]))
        return unflatten_dict(found, sep="/")

    def return_gradients(self, grads: Mapping[str, jax.Array]) -> None:
        """Send the gradients of borrowed parameters, by path, to their owners."""
        for path, owner in self._stage_model.borrowed.items():
            self._mailbox.send(grads[path], owner, self._tag(path))

    def receive_gradients(self) -> list[dict[str, np.ndarray]]:
        """Receive the gradients of lent parameters: path -> gradient, one dict for each borrower."""
        found = []
        for path, stages in self._stage_model.lent.items():
            for stage in stages:
                what = f"gradient of {path} from stage {stage}"
                shape = self._shapes[path].shape
                grad = self._mailbox.receive(shape, np.float32, stage, self._tag(path), what)
                found.append({path: grad})
        return found

    def _tag(self, path: str) -> int:
        return self._first_tag + sorted(self._stage_model.users).index(path)


def _find_borrowed_specs(stage_model: StageModel, placement: Placement) -> dict[str, PartitionSpec]:
    """Return the specs that borrowed parameters would have if this stage owned them."""
    whole, dims = group_by_path(stage_model.traced.params), stage_model.model.dims
    names = {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(dims, is_leaf=is_dims)}
    arrays = {path: NamedArray(dims=names[path], shape=whole[path].shape) for path in stage_model.borrowed}
    sizes = dict(placement.mesh.shape)
    layout = complete_layout(placement.layout, arrays, sizes)
    like = {path: whole[path] for path in arrays}
    return partition_specs(dict(sorted(arrays.items())), like, layout.parameter_rules, sizes, layout.unnamed)
