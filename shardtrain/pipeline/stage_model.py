"""Select the part of a model that one stage across islands owns and computes.

Every parameter belongs to the first stage that uses it; a later stage that uses it too (a head tied to the
embedding) borrows it in each step. So the stages split a model, its optimizer state and its checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from shardtrain.functional.loss import Batch
from shardtrain.functional.model import BLOCKS, Model, Tree, group_by_path, path_text
from shardtrain.pipeline.costs import STATE, ChainTrace
from shardtrain.pipeline.cuts import Parts
from shardtrain.pipeline.flow import Flow
from shardtrain.pipeline.stacking import Partition


@dataclass(frozen=True, kw_only=True, eq=False)
class StageModel:
    """The parts of a model on one stage: their parameters, and functions that run them.

    Args:
      model: the whole model.
      stages: the partition of its blocks.
      traced: the traced model.
      stage: the number of this stage.
    """

    model: Model
    stages: Partition
    traced: Parts
    stage: int

    @property
    def parts(self) -> list[int]:
        """The parts of this stage, in order."""
        return list(self.stages.part_placement.parts(self.stage))

    @property
    def last_part(self) -> int:
        """The number of the model's last part."""
        return len(self.stages.counts) - 1

    @cached_property
    def users(self) -> dict[str, list[int]]:
        """Path of a parameter outside the blocks, or of a model state -> the stages that use it."""
        parts = range(len(self.stages.counts))
        found: dict[str, set[int]] = {}
        for part in parts:
            for path in self.traced.part_paths(self.stages, part):
                found.setdefault(path, set()).add(self.stages.part_placement.stage(part))
        # what no part reads belongs to the first stage
        users = {path: sorted(found.get(path, {0})) for path in self._paths()}
        for path, stages in users.items():
            if path.startswith(STATE) and len(stages) > 1:
                raise ValueError(
                    f"{path} is used before the blocks and after them, which are different stages; give"
                    " each a state of its own"
                )
        return users

    def is_block(self, path: str) -> bool:
        """Return whether a parameter or model state belongs to a block, which one stage has."""
        return self.traced.is_block(path)

    @property
    def stacked(self) -> bool:
        """Whether the parameters of all blocks are stacked, so that a stage has some rows of them."""
        return self.traced.stacked

    def _paths(self) -> list[str]:
        params, state = group_by_path(self.traced.params), group_by_path(self.traced.model_state)
        found = [path for path in params if not self.is_block(path)]
        return found + [f"{STATE}{path}" for path in state if not self.is_block(path)]

    @property
    def borrowed(self) -> dict[str, int]:
        """Path of a parameter that this stage borrows -> the stage that owns it."""
        return {
            path: users[0]
            for path, users in self.users.items()
            if self.stage in users[1:] and not path.startswith(STATE)
        }

    @property
    def lent(self) -> dict[str, list[int]]:
        """Path of a parameter that this stage owns -> the stages that borrow it."""
        return {
            path: users[1:]
            for path, users in self.users.items()
            if users[0] == self.stage and users[1:] and not path.startswith(STATE)
        }

    @property
    def block_numbers(self) -> list[int]:
        """The blocks of this stage, part after part."""
        starts, counts = self.stages.starts, self.stages.counts
        return [i for part in self.parts for i in range(starts[part], starts[part] + counts[part])]

    def own(self, tree: Tree, prefix: str = "") -> Tree:
        """Select the leaves that this stage owns, from params or (with prefix `STATE`) the model state."""
        found = {}
        for name, leaf in group_by_path(tree).items():
            # outside the blocks the first stage that uses a leaf owns it; of stacked blocks a stage has some
            # rows, of others those with its numbers
            if not self.is_block(name):
                if self.users[prefix + name][0] == self.stage:
                    found[name] = leaf
            elif self.stacked:
                found[name] = self._own_blocks(leaf)
            elif int(name.split("/")[1]) in self.block_numbers:
                found[name] = leaf
        return unflatten_dict(found, sep="/")

    def _own_blocks(self, leaf: Any) -> Any:
        if isinstance(leaf, _Names):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct((len(self.block_numbers), *leaf.shape[1:]), leaf.dtype)
        return jnp.concatenate([leaf[number : number + 1] for number in self.block_numbers])

    def make_stage_model(self) -> Model:
        """Return a model of the parameters that this stage owns; it can be initialised but not applied."""

        def init(key: jax.Array) -> tuple[Tree, Tree]:
            params, model_state = self.model.init(key)
            return self.own(params), self.own(model_state, STATE)

        def apply(*_: Any) -> Any:
            raise AssertionError("a stage is no whole model")

        named = jax.tree.map(lambda names: _Names(names), self.model.dims, is_leaf=_is_names)
        dims = jax.tree.map(lambda leaf: leaf.names, self.own(named))
        return Model(init=init, apply=apply, dims=dims, frozen=self.model.frozen)

    def part_params(self, params: Tree, part: int) -> Tree:
        """Select the parameters that a part uses, from the parameters of its stage and borrowed ones."""
        uses = self.traced.part_paths(self.stages, part)
        found = {path: leaf for path, leaf in group_by_path(params).items() if path in uses}
        found = unflatten_dict(found, sep="/")
        if not isinstance(self.traced, ChainTrace):
            return found
        offset = self.block_numbers.index(self.stages.starts[part])
        blocks = self.traced.select_blocks(params.get(BLOCKS, {}), self.stages, part, offset)
        return {**found, BLOCKS: blocks}

    def add_grads(self, grads: Tree, part: int, found: Tree) -> Tree:
        """Add the gradients of a part's parameters to the gradients of its stage, in float32."""
        by_path = group_by_path(found)
        offset = self.block_numbers.index(self.stages.starts[part])

        def add(path: Any, total: jax.Array) -> jax.Array:
            name = path_text(path)
            if name not in by_path:
                return total
            more = by_path[name].astype(jnp.float32)
            if self.stacked and self.is_block(name) and len(more) != len(total):
                return total.at[offset : offset + len(more)].add(more)
            return total + more

        return jax.tree.map_with_path(add, grads)

    def run(
        self,
        part: int,
        params: Tree,
        model_state: Tree,
        rng: Any,
        train: bool,
        batch: Batch,
        activations: Any,
    ) -> tuple[Any, Tree]:
        """Run a part: return (activations, model state), or ((loss sum, (count, metrics)), model state).

        Args:
          part: its number.
          params: its parameters.
          model_state: the model state of its stage.
          rng: the key of these rows.
          train: whether dropout is on.
          batch: these rows, for the first and the last part.
          activations: those that the part before returned.
        """
        return self.traced.run_part(self.stages, part, params, model_state, rng, train, batch, activations)

    def flow(self, microbatch: Mapping[str, Any]) -> Flow:
        """Return the values between all parts of the model.

        Args:
          microbatch: name -> array or shape (rows, ...).
        """
        return self.traced.flow(self.stages, microbatch)


@dataclass(frozen=True)
class _Names:
    """The dim names of an array, as one leaf of a tree."""

    names: tuple[str | None, ...] | None


def _is_names(x: Any) -> bool:
    return x is None or isinstance(x, tuple)
