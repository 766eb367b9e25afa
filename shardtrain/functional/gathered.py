"""Parameters without names of dims are gathered where a model uses them, as a model with names does itself.

Next: `sharding/resolve.py`, which shards them between steps.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardtrain.functional.model import Model, Tree, path_text
from shardtrain.sharding.array_dims import is_dims


def gather_unnamed(model: Model) -> Model:
    """Return the model with constraints that gather its parameters without names before a call.

    Without them XLA may reduce activations over the devices instead of gathering a weight.
    """
    leaves = jax.tree.leaves_with_path(model.dims, is_leaf=is_dims)
    unnamed = {path_text(path) for path, dims in leaves if dims is None}

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: Tree, *rest: Any) -> Any:
            def gather(path: Any, x: Any) -> Any:
                if path_text(path) not in unnamed or jax.sharding.get_abstract_mesh().empty:
                    return x
                return jax.lax.with_sharding_constraint(x, PartitionSpec())

            return function(jax.tree.map_with_path(gather, params), *rest)

        return call

    chain = model.chain
    if chain is not None:
        chain = replace(chain, first=wrap(chain.first), run=wrap(chain.run), last=wrap(chain.last))
    return replace(model, apply=wrap(model.apply), chain=chain)
