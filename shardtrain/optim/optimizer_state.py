"""Make the state of optimizers storable, and find in it the parameters that a run evaluates.

Next: `train_step/state.py`, `train_step/step.py`.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from shardtrain.errors.user_code import UserCodeFailed, user_code
from shardtrain.functional.frozen import merge_trees, select_like

Choose = Callable[[Any, Any], Any]
"""(optimizer state, parameters) -> the parameters to evaluate."""


def to_float32(tree: Any) -> Any:
    """Convert narrower floats to float32; other arrays are unchanged."""

    def wide(x: Any) -> Any:
        is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if is_narrow else x

    return jax.tree.map(wide, tree)


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)


def make_storable(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer with a float32 state that can be saved.

    Parameters and gradients of narrower floats are passed as float32, so that moments and averages are
    float32; typed keys (of `optax.noisy_sgd`, `optax.add_noise`) are stored as raw data.

    Args:
      optimizer: any optax transformation; extra arguments such as `value` and `grad` are passed on.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        state = inner.init(to_float32(params))
        return jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)

    def with_keys(state: Any, params: Any) -> Any:
        # which leaves are typed keys is known from a trace of init
        kinds: list[Any] = []

        def look(params: Any) -> None:
            leaves = jax.tree.leaves(inner.init(params))
            kinds.extend(jax.random.key_impl(x) if _is_key(x) else None for x in leaves)

        jax.eval_shape(look, params)
        leaves, structure = jax.tree.flatten(state)
        found = [
            x if kind is None else jax.random.wrap_key_data(x, impl=kind)
            for x, kind in zip(leaves, kinds, strict=True)
        ]
        return jax.tree.unflatten(structure, found)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        # compute in float32, with typed keys; what is stored has raw keys, which can be saved
        params = to_float32(params)
        updates, state = inner.update(to_float32(updates), with_keys(state, params), params, **extra)
        return updates, jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, state)

    return optax.GradientTransformationExtraArgs(init, update)


def make_value_function(
    compute: Callable[[Any], tuple[jax.Array, Any]], like: Any
) -> Callable[[Any], jax.Array]:
    """Return the function that line searches call: parameters -> mean loss, with its gradient.

    Args:
      compute: parameters -> (mean loss, its gradient).
      like: parameters, for their dtypes.
    """

    @jax.custom_vjp
    def value(params: Any) -> jax.Array:
        return forward(params)[0]

    def forward(params: Any) -> tuple[jax.Array, Any]:
        return compute(jax.tree.map(lambda x, p: x.astype(p.dtype), params, like))

    def backward(grads: Any, cotangent: jax.Array) -> tuple[Any]:
        return (jax.tree.map(lambda g: cotangent * g, grads),)

    value.defvjp(forward, backward)
    return lambda params: value(params)


def find_missing_arguments(
    optimizer: optax.GradientTransformation, params: Any, *, line_search: bool
) -> list[str]:
    """Return the arguments that an optimizer's update requires and a step does not pass.

    Args:
      optimizer: any optax transformation.
      params: arrays or shapes.
      line_search: whether the step can compute the loss at other parameters.

    Raises:
      ValueError: its updates do not have the shapes of the parameters.
      UserCodeFailed: the optimizer raised an error.
    """
    extra: dict[str, Any] = {"value_fn": lambda params: jnp.float32(0)} if line_search else {}
    used = make_storable(optimizer)

    def update(params: Any) -> Any:
        return used.update(params, used.init(params), params, value=jnp.float32(0), grad=params, **extra)

    try:
        with user_code(lambda error: "the optimizer"):
            updates, _ = jax.eval_shape(update, params)
    except UserCodeFailed as failure:
        if "required keyword-only argument" not in str(failure.__cause__):
            raise
        return re.findall(r"'(\w+)'", str(failure.__cause__).partition("argument")[2])
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise ValueError(
            "the optimizer gives updates of another structure or of other shapes than the parameters; return"
            " one for each parameter, of its shape"
        )
    return []


class AverageState(NamedTuple):
    """State of `parameter_average`.

    Args:
      count: int32 scalar, number of updates.
      ema: the average, like params, float32.
    """

    count: Any
    ema: Any


def parameter_average(decay: float) -> optax.GradientTransformation:
    """Keep an exponential moving average of the parameters, for evaluation; use it last in a chain.

    At update n, ema = d * ema + (1 - d) * params with d = min(decay, (1 + n) / (10 + n)), so that the initial
    parameters soon lose their weight.

    Args:
      decay: from 0 to 1, such as 0.999.
    """

    def init(params: Any) -> AverageState:
        return AverageState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.array, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, AverageState]:
        count = state.count + 1
        used_decay = jnp.minimum(decay, (1 + count) / (10 + count))
        ema = jax.tree.map(
            lambda e, p, u: used_decay * e + (1 - used_decay) * (p + u), state.ema, params, updates
        )
        return updates, AverageState(count, ema)

    return optax.GradientTransformation(init, update)


EVALUATED_PARAMS: dict[str, tuple[type, Choose, str]] = {
    "ema": (
        AverageState,
        lambda state, params: state.ema,
        "Optimizer(ema=0.999), or shardtrain.optim.optimizer_state.parameter_average(0.999) as the last of an"
        " optax.chain",
    ),
    "schedule_free": (
        ScheduleFreeState,
        lambda state, params: schedule_free_eval_params(state, select_like(params, state.z)),
        "optax.contrib.schedule_free(...)",
    ),
}
"""Value of `Run.evaluate_with` -> (type of the state with the parameters, how to read them, their source)."""


def find_evaluated_params(how: str | Choose | None, opt_state: Any, params: Any) -> Any:
    """Return the parameters that a run evaluates, samples from and exports.

    Args:
      how: see `config.Run.evaluate_with`.
      opt_state: the state of the optimizer.
      params: the trained parameters.

    Raises:
      ValueError: the state of the optimizer does not contain them.
    """
    if how is None:
        return params
    choose = how
    if isinstance(how, str):
        kind, from_state, made_by = EVALUATED_PARAMS[how]
        states = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, kind))
        found = [x for x in states if isinstance(x, kind)]
        if len(found) != 1:
            raise ValueError(
                f"evaluate_with is {how!r}, and the optimizer keeps {len(found) or 'no'} such parameters;"
                f" make it {made_by}, once, or evaluate_with=None"
            )
        opt_state, choose = found[0], from_state
    assert callable(choose)
    with user_code(lambda error: "evaluate_with"):
        chosen = choose(opt_state, to_float32(params))
    # an optimizer only has trained parameters
    chosen = merge_trees(chosen, params)
    return jax.tree.map(lambda x, p: x.astype(p.dtype), chosen, params)
