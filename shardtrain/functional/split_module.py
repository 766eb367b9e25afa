"""Split an nnx module into its graph and the shapes of its variables, and merge them in a call.

Next: `nnx_model.py`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.axes import AXES, BATCH
from shardtrain.errors.user_code import find_raising_line
from shardtrain.functional.auxiliary import Outputs
from shardtrain.functional.batch_norm import REPLICAS, bind_axis, find_axis_name
from shardtrain.functional.model import Tree, dim_names, keep_structure
from shardtrain.functional.module_factory import construct
from shardtrain.functional.run_trace import give_ops
from shardtrain.sharding.array_dims import JOINT

NORMS = (nnx.SpectralNorm, nnx.WeightNorm)
"""Norms of Flax that set parameters; as in their papers, the new values hold within the call."""


def guard_parameters(module: nnx.Module) -> Callable[[], None]:
    """Make a module raise a ValueError when one of its parameters is set.

    Returns:
      A function that raises the error if a parameter was replaced meanwhile.
    """
    norms = tuple(path for path, node in nnx.iter_graph(module) if isinstance(node, NORMS))
    before = _parameters(module, norms)
    for path, parameter in before.items():
        own = parameter.get_metadata().get("on_set_value", ())
        hooks = own if isinstance(own, tuple) else (own,)
        parameter.set_metadata(on_set_value=(*hooks, partial(_refuse, path)))

    def check() -> None:
        for path, parameter in _parameters(module, norms).items():
            if before.get(path) is not parameter:
                _refuse(path)

    return check


def _parameters(module: nnx.Module, norms: tuple[Any, ...]) -> dict[Any, nnx.Param]:
    """Return path -> parameter, without those below some paths."""
    return {
        path: node
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Param)
        # a stage of a pipeline has no values of the parameters of others
        and not isinstance(node.get_raw_value(), jax.ShapeDtypeStruct)
        and not any(path[: len(norm)] == norm for norm in norms)
    }


def _refuse(path: Any, *_: Any) -> Any:
    raise ValueError(
        f"a call of the model sets its parameter {'/'.join(map(str, path))}, which only the optimizer"
        " changes, so what was set would be lost; make it a variable of the model's state, such as"
        " nnx.BatchStat(...), or compute the value in the call without setting it"
    )


ARGUMENT = "out_sharding"
"""The sharding argument of layers of Flax and of functions of jax."""

_CONSTRAINS_OUTPUTS: ContextVar[bool] = ContextVar("constrains_outputs", default=False)

_JAX_MESSAGES = (
    "not under a mesh context",
    "cannot contain axis names that are of type Auto",
    "out_sharding",
)
"""jax's messages about this argument on meshes that are not explicit."""


@contextmanager
def output_shardings() -> Iterator[None]:
    """Within this context, `out_sharding` of Flax's layers names dims for `nn.with_logical_constraint`.

    Raises:
      ValueError: a function of jax was given one.
    """
    token = _CONSTRAINS_OUTPUTS.set(True)
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as error:
        if not any(text in str(error) for text in _JAX_MESSAGES):
            raise
        raise ValueError(
            f"{find_raising_line(error)}: the model gives {ARGUMENT} to a function of jax, which takes it on"
            " explicit meshes alone; remove it and name the dims of what the function returns:"
            " nn.with_logical_constraint(x, ('batch', None, 'embed')), where names of mesh axes do too"
        ) from error
    finally:
        _CONSTRAINS_OUTPUTS.reset(token)


def _constrain_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of a layer: its argument `out_sharding` becomes a constraint on the outputs."""
    signature = inspect.signature(original)

    @wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        given = bound.arguments.pop(ARGUMENT, None) if _CONSTRAINS_OUTPUTS.get() else None
        if given is None:
            return original(*arguments, **options)
        outputs = original(*bound.args, **bound.kwargs)
        names = dim_names(given, outputs.shape, f"{ARGUMENT} of {type(arguments[0]).__name__}") or ()
        return with_logical_constraint(outputs, tuple(map(_dim, names)))

    return call


def _dim(name: str | None) -> str | None:
    """Return the batch dim for a joint name of several mesh axes; only rows are sharded over several."""
    return BATCH if name and JOINT in name and set(name.split(JOINT)) <= set(AXES) else name


_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv, nnx.Embed, nnx.LoRALinear)

for _layer, _method in (*((layer, "__call__") for layer in _LAYERS), (nnx.Embed, "attend")):
    setattr(_layer, _method, _constrain_outputs(getattr(_layer, _method)))


@dataclass(frozen=True, kw_only=True)
class SplitModule:
    """The graph of an nnx module and the shapes of its variables.

    Args:
      graphs: training mode (True or False) -> its graph definition; None -> the constructor's.
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
        """Return a method of the module as (params, model_state, rng, train, *inputs) -> (outputs, state)."""

        def call(
            params: Tree, model_state: Tree, rng: jax.Array, train: bool, *inputs: Any
        ) -> tuple[Any, Tree]:
            module = nnx.merge(
                self.graphs[train],
                fill_values(self.params, params),
                _seed(self.rngs, rng),
                fill_values(self.model_state, model_state),
            )
            check = guard_parameters(give_ops(module))
            with output_shardings():
                outputs = method(module, *inputs)
            check()
            if isinstance(outputs, Outputs):
                outputs = replace(outputs, train=train)
            nnx.pop(module, nnx.Intermediate)
            _, _, _, changed = split_variables(module)
            return outputs, keep_structure(plain_values(changed), model_state)

        return bind_axis(call, self.axis_name)


def split_variables(module: Any) -> Any:
    """Return the graph, the parameters, the random streams and all other variables of a module."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


def set_mode(module: Any, train: bool) -> Any:
    """Return a module in the mode of training or evaluation, with the same variables."""
    mode = {"deterministic": not train, "use_running_average": not train}
    found = nnx.view(module, raise_if_not_found=False, **mode)
    # a view has set those of Flax's own layers alone
    for _, each in nnx.iter_modules(found):
        for name in mode.keys() & vars(each).keys():
            if isinstance(getattr(each, name), bool):
                setattr(each, name, mode[name])
    return found


def split_module(factory: Callable[..., Any], sync_batch_norm: bool) -> tuple[Any, SplitModule]:
    """Trace a factory; return its module, with shapes in place of arrays, and its split.

    Raises:
      ValueError: the module has a random key as an attribute.
    """
    graphs: dict[bool | None, Any] = {}
    axis_names = []

    def trace() -> Any:
        module = construct(factory, nnx.Rngs(0))
        axis_names.append(_axis_name(module, sync_batch_norm))
        variables: Any = ()
        for train in (True, False):
            # in the trace, where arrays that are attributes are known as such
            graphs[train], *variables = split_variables(set_mode(module, train))
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
    """Return the axis name of a module's norms, after setting it for all BatchNorms if asked to."""
    modules = [node for _, node in nnx.iter_graph(abstract) if isinstance(node, nnx.Module)]
    own_name = find_axis_name(modules)
    for module in modules:
        if sync_batch_norm and isinstance(module, nnx.BatchNorm) and module.axis_name is None:
            module.axis_name = own_name or REPLICAS
    return find_axis_name(modules)


def nest(items: Any) -> Tree:
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
    """Return the values of an nnx state as a nested dict, without variables that are shapes.

    An array that is an attribute of a module never changes. Floats of such an array are kept as bits in
    integers, because replicas average floats, and each mean might round them.
    """
    flat = ((path, _value(v)) for path, v in nnx.to_flat_state(state))
    return nest((path, value) for path, value in flat if not isinstance(value, jax.ShapeDtypeStruct))


def _value(leaf: Any) -> Any:
    """Return the value of a variable, or the bits of an array."""
    if isinstance(leaf, nnx.Variable):
        return leaf.get_value()
    if isinstance(leaf, jax.ShapeDtypeStruct) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    return jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))


def fill_values(state: Any, tree: Tree) -> Any:
    """Return the variables with values from a tree; variables without a value stay shapes."""

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


def _seed(state: Any, rng: jax.Array) -> Any:
    """Return the variables of the rng streams: a key for each stream, and counts of 0."""

    def value(i: int, variable: Any) -> jax.Array:
        if not isinstance(variable, nnx.RngKey):
            return jnp.zeros(variable.shape, variable.dtype)
        key = jax.random.fold_in(rng, i)
        return jax.random.split(key, variable.shape) if variable.shape else key

    flat = nnx.to_flat_state(state)
    return nnx.from_flat_state([(path, v.replace(value(i, v))) for i, (path, v) in enumerate(flat)])
