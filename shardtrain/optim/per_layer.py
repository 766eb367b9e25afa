"""Apply an optimizer to each layer of stacked parameters separately.

Trust ratios, root mean squares and factored moments are per layer, not over all layers stacked for a scan.
Next: `optimizer.py`.
"""

from typing import Any

import jax
import optax

from shardtrain import axes
from shardtrain.functional.model import Tree, path_text
from shardtrain.sharding.array_dims import is_dims


def per_layer(optimizer: optax.GradientTransformation, dims: Tree) -> optax.GradientTransformation:
    """Return an optimizer that treats each layer of a stacked array as a separate array.

    It is vmapped over the first dim of arrays whose dims begin with `layers`. The paths of its state do not
    change.

    Args:
      optimizer: an optimizer that updates each array separately, such as `optax.lars(0.1)`. What mixes
        arrays, such as clipping by the global norm, belongs before it in an `optax.chain`.
      dims: the dim names of the model, `from_nnx(...).dims`.

    >>> import numpy as np
    >>> stack, dims = {"w": np.array([[1.0, 1.0], [2.0, 2.0]])}, {"w": ("layers", "embed")}
    >>> lars = per_layer(optax.scale_by_trust_ratio(), dims)
    >>> updates, _ = lars.update({"w": np.ones((2, 2))}, lars.init(stack), stack)
    >>> updates["w"].tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """

    def find_mapped_axes(tree: Any, params: Any, size: int) -> Any:
        """Return in_axes for vmap: 0 for arrays stacked from this number of layers, None for others."""
        stacks = _count_layers(params, dims)

        def dim(path: Any, _: Any) -> int | None:
            keys = path_text(path).split("/")
            # the longest suffix that is a parameter: `head/w` is not the stacked `w`
            found = next((stacks[own] for i in range(len(keys)) if (own := "/".join(keys[i:])) in stacks), 0)
            return 0 if found == size > 0 else None

        return jax.tree.map_with_path(dim, tree)

    # one vmap for each number of layers among the stacks; its results for other arrays are discarded
    def init(params: Any) -> Any:
        results = []
        for size in sorted(set(_count_layers(params, dims).values()) - {0}) or [0]:
            in_dims = find_mapped_axes(params, params, size)
            alone = jax.tree.map(lambda x, d: x if d is None else x[0], params, in_dims)
            out_dims = find_mapped_axes(jax.eval_shape(optimizer.init, alone), params, size)
            made = jax.vmap(optimizer.init, (in_dims,), out_dims)(params) if size else optimizer.init(params)
            results.append((made, out_dims))
        return _merge(results)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        results = []
        for size in sorted(set(_count_layers(updates, dims).values()) - {0}):
            of_params, of_state = (
                find_mapped_axes(updates, updates, size),
                find_mapped_axes(state, updates, size),
            )
            run = jax.vmap(optimizer.update, (of_params, of_state, of_params), (of_params, of_state))
            results.append((run(updates, state, params), (of_params, of_state)))
        return _merge(results) if results else optimizer.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _merge(results: list[tuple[Any, Any]]) -> Any:
    """Select for each array the result of the vmap over its own number of layers."""
    first, _ = results[0]
    for other, other_dims in results[1:]:
        flat_dims = jax.tree.leaves(other_dims, is_leaf=lambda x: x is None)
        pairs = zip(jax.tree.leaves(first), jax.tree.leaves(other), flat_dims, strict=True)
        first = jax.tree.unflatten(jax.tree.structure(first), [a if d is None else b for a, b, d in pairs])
    return first


def _count_layers(params: Any, dims: Tree) -> dict[str, int]:
    """Return path -> number of stacked layers of each array, 0 if it is not stacked."""
    names = jax.tree.leaves(dims, is_leaf=is_dims)
    leaves = jax.tree.leaves_with_path(params)
    return {
        path_text(path): x.shape[0] if each and each[0] == axes.LAYERS else 0
        for (path, x), each in zip(leaves, names, strict=True)
    }
