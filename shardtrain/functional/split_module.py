"""An nnx module split into its graph and its variables, which are shapes only, and put together in a call.

Next: `nnx_model.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from shardtrain.functional.auxiliary import Outputs
from shardtrain.functional.batch_norm import REPLICAS, one_axis_name, with_axis_bound
from shardtrain.functional.model import Tree, same_structure
from shardtrain.functional.module_factory import construct
from shardtrain.functional.output_shardings import output_shardings
from shardtrain.functional.parameter_guard import guard_parameters


@dataclass(frozen=True, kw_only=True)
class SplitModule:
    """An nnx module split into its graph and its variables, which are shapes only.

    Args:
      graphs: whether it trains -> its graph definition; None -> as its constructor leaves it.
      params: the parameters.
      rngs: the rng streams.
      model_state: all other variables.
      axis_name: the axis name of its norms over replicas.
    """

    graphs: Mapping[bool | None, Any]
    params: Any
    rngs: Any
    model_state: Any
    axis_name: str | None

    def pure(self, method: Callable[..., Any]) -> Callable[..., tuple[Any, Tree]]:
        """Return a method of the module as a pure function.

        It maps (params, model_state, rng, train, *inputs) to (outputs, model_state)."""

        def call(
            params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any
        ) -> tuple[Any, Tree]:
            module = nnx.merge(
                self.graphs[train],
                fill_values(self.params, params),
                _seeded(self.rngs, rng),
                fill_values(self.model_state, model_state),
            )
            check = guard_parameters(module)
            with output_shardings():
                outputs = method(module, *inputs)
            check()
            if isinstance(outputs, Outputs):
                outputs = replace(outputs, train=train)
            nnx.pop(module, nnx.Intermediate)
            _, _, _, changed = split_variables(module)
            return outputs, same_structure(plain_values(changed), model_state)

        return with_axis_bound(call, self.axis_name)


def split_variables(module: Any) -> Any:
    """Return the graph, the parameters, the random streams and all other variables of a module."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def in_mode(module: Any, train: bool) -> Any:
    """Return a module in the mode of training or evaluation, of the same variables."""
    mode = {"deterministic": not train, "use_running_average": not train}
    found = nnx.view(module, raise_if_not_found=False, **mode)
    # a view has set those of Flax's own layers alone
    for _, each in nnx.iter_modules(found):
        for name in mode.keys() & vars(each).keys():
            if isinstance(getattr(each, name), bool):
                setattr(each, name, mode[name])
    return found


def split_module(factory: Callable[..., Any], sync_batch_norm: bool) -> tuple[Any, SplitModule]:
    """Trace a factory; return its module, with shapes in the place of arrays, and the same split.

    Raises:
      ValueError: a random key is an attribute of the module.
    """
    graphs: dict[bool | None, Any] = {}
    axis_names = []

    def trace() -> Any:
        module = construct(factory, nnx.Rngs(0))
        axis_names.append(_axis_name(module, sync_batch_norm))
        variables: Any = ()
        for train in (True, False):
            # in the trace, where arrays that are attributes are known as such
            graphs[train], *variables = split_variables(in_mode(module, train))
        graphs[None] = nnx.split(module)[0]
        return module, variables

    with nnx.use_eager_sharding(False):
        abstract, (params, rngs, model_state) = nnx.eval_shape(trace)
    keys = [
        "/".join(map(str, path))
        for path, leaf in nnx.to_flat_state(model_state)
        if jnp.issubdtype(_value(leaf).dtype, jax.dtypes.prng_key)
    ]
    if keys:
        raise ValueError(
            f"{type(abstract).__name__} keeps the random key {', '.join(keys)}, which would draw the same"
            " numbers in every step and for every part of a batch; keep the streams, self.rngs = rngs, and"
            " draw by keys of theirs, self.rngs.noise(), in the call"
        )
    return abstract, SplitModule(
        graphs=graphs,
        params=params,
        rngs=rngs,
        model_state=model_state,
        axis_name=axis_names[0],
    )


def _axis_name(abstract: nnx.Module, sync_batch_norm: bool) -> str | None:
    """Return the axis name of a module's norms, after setting that of all BatchNorms if asked to."""
    modules = [node for _, node in nnx.iter_graph(abstract) if isinstance(node, nnx.Module)]
    own_name = one_axis_name(modules)
    for module in modules:
        if sync_batch_norm and isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = own_name or REPLICAS
    return one_axis_name(modules)


def nested(items: Any) -> Tree:
    """Return (path, leaf) pairs as a nested dict with string keys, also for positions in an nnx.List."""
    tree: Tree = {}
    for path, leaf in items:
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def plain_values(state: Any) -> Tree:
    """Return the values of an nnx state as a nested dict, without variables that are shapes only.

    An array that is an attribute is no variable, and of floats its bits are kept, as whole numbers: replicas
    average floats, and each mean might round what never changes.
    """
    flat = ((path, _value(v)) for path, v in nnx.to_flat_state(state))
    return nested((path, value) for path, value in flat if not isinstance(value, jax.ShapeDtypeStruct))


def _value(leaf: Any) -> Any:
    """Return the value of a variable, or the bits of an array."""
    if isinstance(leaf, nnx.Variable):
        return leaf.get_value()
    if isinstance(leaf, jax.ShapeDtypeStruct) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))


def fill_values(state: Any, tree: Tree) -> Any:
    """Return the variables with values from a tree; variables that it lacks stay shapes."""

    def filled(path: Any, variable: Any) -> Any:
        node: Any = tree
        for key in map(str, path):
            if key not in node:
                return variable
            node = node[key]
        if isinstance(variable, nnx.Variable):
            return variable.replace(node)
        is_bits = jnp.issubdtype(variable.dtype, jnp.floating)
        return jax.lax.bitcast_convert_type(node, variable.dtype) if is_bits else node

    return nnx.from_flat_state([(path, filled(path, v)) for path, v in nnx.to_flat_state(state)])


def _seeded(state: Any, rng: jax.Array) -> Any:
    """Return the variables of the rng streams: a key for each stream, and counts of 0."""

    def value(i: int, variable: Any) -> jax.Array:
        if not isinstance(variable, nnx.RngKey):
            return jnp.zeros(variable.shape, variable.dtype)
        key = jax.random.fold_in(rng, i)
        return jax.random.split(key, variable.shape) if variable.shape else key

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, v.replace(value(i, v))) for i, (path, v) in enumerate(flat)])
