"""Options of an optimizer, the registry of optimizers, and the optax transformation of a run.

A new one is a function and a line in `OPTIMIZERS`. Next: `train_step/step.py`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, muon

from shardtrain import axes
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.functional.frozen import drop_paths, merge_trees
from shardtrain.functional.model import Tree
from shardtrain.optim.clip import TakesNorm, clip_by_norm
from shardtrain.optim.optimizer_state import parameter_average
from shardtrain.optim.per_layer import per_layer
from shardtrain.optim.schedules import Schedule, find_rate_problem, make_schedule, map_updates, multiply_rates
from shardtrain.sharding.array_dims import is_dims


def train_only(
    optimizer: optax.GradientTransformation, frozen: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Apply an optimizer only to trained parameters, in a tree with frozen ones.

    Args:
      optimizer: any optax transformation; it receives nested dicts without the frozen parameters.
      frozen: the paths of the frozen parameters.

    >>> params = {"kept": jnp.ones(2), "trained": jnp.ones(2)}
    >>> update = train_only(optax.sgd(0.5, momentum=0.9), {"kept"})
    >>> state = update.init(params)
    >>> [x.shape for x in jax.tree.leaves(state)]
    [(2,)]
    >>> updates, _ = update.update(params, state, params)
    >>> {name: float(x[0]) for name, x in updates.items()}
    {'kept': -0.0, 'trained': -0.5}
    """
    inner: Any = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        return inner.init(drop_paths(params, frozen))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if "grad" in extra:
            extra["grad"] = drop_paths(extra["grad"], frozen)
        if value := extra.get("value_fn"):
            extra["value_fn"] = lambda trained: value(merge_trees(trained, params))
        trained = None if params is None else drop_paths(params, frozen)
        found, state = inner.update(drop_paths(updates, frozen), state, trained, **extra)
        return merge_trees(found, jax.tree.map(_make_no_update, updates if params is None else params)), state

    made = optax.GradientTransformationExtraArgs(init, update)
    return TakesNorm(*made) if isinstance(optimizer, TakesNorm) else made


def _make_no_update(x: Any) -> jax.Array:
    """Return an update that changes no bit of an array: -0.0, as adding 0.0 changes -0.0."""
    return jnp.full_like(x, -0.0) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.zeros_like(x)


def _list_features(names: tuple[str | None, ...]) -> list[int]:
    """Return the dims that make an array a matrix: no stacked dims; heads and head_dim count as one."""
    has_heads = {axes.HEADS, axes.KV_HEADS} & set(names)
    skipped = {axes.LAYERS, axes.EXPERTS, *([axes.HEAD_DIM] if has_heads else [])}
    return [i for i, name in enumerate(names) if name not in skipped]


def select_decayed(dims: Tree, params: Any) -> Any:
    """Return which parameters are decayed: arrays of two or more dims, not biases, gains or scalars.

    Args:
      dims: the dim names of the model; an array without names counts all of its dims.
      params: arrays or shapes.

    >>> import numpy as np
    >>> dims = {"up": ("layers", "embed", "mlp"), "gain": ("layers", "embed"), "other": None}
    >>> select_decayed(dims, {"up": np.ones((2, 4, 8)), "gain": np.ones((2, 4)), "other": np.ones((4, 4))})
    {'gain': False, 'other': True, 'up': True}
    """

    def is_decayed(names: tuple[str | None, ...] | None, param: Any) -> bool:
        return (param.ndim if names is None else len(_list_features(names))) >= 2

    return jax.tree.map(is_decayed, dims, params, is_leaf=is_dims)


def find_muon_dims(dims: Tree) -> Any:
    """Return the dims of the rows and columns of each matrix for Muon; None for what AdamW updates.

    If the first dim is `embed`, it is the rows and all other dims are the columns; otherwise the last dim is
    the columns. `layers` and `experts` are batch dims. AdamW updates embeddings and output heads
    (`vocab`), position tables (`seq`) and vectors.
    """

    def numbers(names: tuple[str | None, ...] | None) -> MuonDimensionNumbers | None:
        if names is None or len(_list_features(names)) < 2 or {axes.VOCAB, axes.SEQ} & set(names):
            return None
        kept = [i for i, name in enumerate(names) if name not in (axes.LAYERS, axes.EXPERTS)]
        split = 1 if names[kept[0]] == axes.EMBED else -1
        return MuonDimensionNumbers(tuple(kept[:split]), tuple(kept[split:]))

    return jax.tree.map(numbers, dims, is_leaf=is_dims)


Maker = Callable[["Optimizer", optax.Schedule, Tree], optax.GradientTransformation]
"""(options, learning rate, dims of the model) -> the transformation, without clipping."""


def _adamw(o: "Optimizer", rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    mask = partial(select_decayed, dims)
    return optax.adamw(
        rate, o.b1, o.b2, o.eps, mu_dtype=o.momentum_dtype, weight_decay=o.weight_decay, mask=mask
    )


def _sgd(o: "Optimizer", rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(o.b1, accumulator_dtype=o.momentum_dtype) if o.b1 else optax.identity(),
        optax.add_decayed_weights(o.weight_decay, mask=partial(select_decayed, dims)),
        optax.scale_by_learning_rate(rate),
    )


def _lion(o: "Optimizer", rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    mask = partial(select_decayed, dims)
    return optax.lion(rate, o.b1, o.b2, mu_dtype=o.momentum_dtype, weight_decay=o.weight_decay, mask=mask)


def _adafactor(o: "Optimizer", rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    # optax's adafactor without a rate ends in scale(-1), so the decay is negative too, and the rate is
    # applied last
    return optax.chain(
        per_layer(optax.adafactor(None), dims),
        optax.add_decayed_weights(-o.weight_decay, mask=partial(select_decayed, dims)),
        optax.scale_by_schedule(rate),
    )


def _lamb(o: "Optimizer", rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    # as optax.lamb, but with a trust ratio for each layer of a stack
    return optax.chain(
        optax.scale_by_adam(o.b1, o.b2, o.eps, mu_dtype=o.momentum_dtype),
        optax.add_decayed_weights(o.weight_decay, mask=partial(select_decayed, dims)),
        per_layer(optax.scale_by_trust_ratio(), dims),
        optax.scale_by_learning_rate(rate),
    )


def _muon(o: "Optimizer", rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    update = muon(
        rate,
        beta=o.b1,
        eps=o.eps,
        mu_dtype=o.momentum_dtype,
        adam_b1=o.b1,
        adam_b2=o.b2,
        muon_weight_dimension_numbers=lambda _: find_muon_dims(dims),
        consistent_rms=0.2,
    )
    # a decay of our own: optax's has no mask for the parameters that AdamW updates
    decay = optax.add_decayed_weights(
        lambda step: -o.weight_decay * rate(step), partial(select_decayed, dims)
    )
    return optax.chain(update, decay)


OPTIMIZERS: dict[str, Maker] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "adafactor": _adafactor,
    "lamb": _lamb,
    "muon": _muon,
}
"""Name -> function that makes the optimizer. tests/optim/test_registry.py checks every entry."""

if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[tuple(OPTIMIZERS)]


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Options of an optimizer.

    Args:
      name: adamw, sgd (with momentum), lion, adafactor, lamb, or muon (Jordan et al. 2024;
        Muon for the matrices of the blocks, AdamW for all other parameters).
      learning_rate: the schedule; a number is a constant rate, a function maps the step to the rate.
      weight_decay: factor of decoupled weight decay; applies to arrays of two or more dims, not counting the
        dim `layers` of stacked blocks.
      decay_unused: whether to decay parameters that the loss does not depend on, whose gradient is always
        zero.
      b1: decay of the first moment; the momentum of sgd and muon.
      b2: decay of the second moment (adamw, lamb, lion, muon's AdamW).
      eps: added to the denominator (adamw, lamb, muon's AdamW).
      clip: largest global norm of a gradient; larger gradients are scaled down to it. None disables clipping.
      ema: decay of an exponential moving average of the parameters, which `evaluate_with` "ema" evaluates;
        None keeps no average.
      rates: factors of the learning rate by patterns of parameter paths, such as 'embedding=0.1' or
        'blocks/*=0.5' (* matches / too); the first matching pattern applies, other parameters have factor 1.
      momentum_dtype: dtype of the first moment (or momentum): float32, or bfloat16, which takes half the
        memory. The second moment stays float32. adafactor keeps no first moment.

    Short form: its name.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    name: OptimizerName = "adamw"
    learning_rate: Schedule = Schedule()
    weight_decay: float = 0.1
    decay_unused: bool = True
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip: float | None = 1.0
    ema: float | None = None
    rates: tuple[str, ...] = ()
    momentum_dtype: Literal["float32", "bfloat16"] = "float32"

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """Return the fields that a short form sets; None if the value is not a short form."""
        return {"name": value} if isinstance(value, str) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        problems += [
            f"{name} is {value}; it must lie in [0, 1)"
            for name, value in (("b1", self.b1), ("b2", self.b2), ("ema", self.ema))
            if value is not None and not 0 <= value < 1
        ]
        if not self.eps > 0:
            problems.append(f"eps is {self.eps}; it must be a number above 0, for it keeps 0 from dividing 0")
        if not self.weight_decay >= 0:
            problems.append(f"weight_decay is {self.weight_decay}; it must be a number, 0 or more")
        problems += [text for each in self.rates if (text := find_rate_problem(each))]
        if self.momentum_dtype != "float32" and self.name == "adafactor":
            problems.append(
                f"momentum_dtype is {self.momentum_dtype!r}, and adafactor keeps no first moment; use float32"
            )
        if self.clip is not None and not self.clip > 0:
            problems.append(f"clip is {self.clip}; it must be above 0, or None for no clipping")
        refuse("this optimizer cannot be used", problems)


def make_optimizer(
    optimizer: Optimizer | optax.GradientTransformation,
    steps: int,
    dims: Tree,
    unused: Collection[str] = (),
    frozen: Collection[str] = (),
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """Return the optax transformation of a run, and its learning-rate schedule if known.

    Args:
      optimizer: options, or an optax transformation, which is used unchanged.
      steps: number of steps of the run, for the schedule.
      dims: the dim names of the model, by which weight decay and Muon distinguish matrices from vectors.
      unused: paths of the parameters that the loss does not depend on, for `decay_unused`.
      frozen: paths of the parameters that are not trained, which have no state.

    Returns:
      (the transformation, the schedule); the schedule is None for an optax transformation.
    """
    if frozen:
        made, rate = make_optimizer(optimizer, steps, drop_paths(dims, frozen), unused)
        return train_only(made, frozen), rate
    if not isinstance(optimizer, Optimizer):
        return optimizer, None
    rate = make_schedule(optimizer.learning_rate, steps)
    update = OPTIMIZERS[optimizer.name](optimizer, rate, dims)
    if optimizer.rates:
        update = multiply_rates(update, optimizer.rates)
    if unused and not optimizer.decay_unused:
        # without a gradient only weight decay would change them
        update = map_updates(update, lambda path, x: jnp.zeros_like(x) if path in unused else x)
    average = () if optimizer.ema is None else (parameter_average(optimizer.ema),)
    if optimizer.clip is None:
        # an identity in its place: the paths of the state in a checkpoint stay the same
        return optax.chain(optax.identity(), update, *average), rate
    return TakesNorm(*optax.chain(clip_by_norm(optimizer.clip), update, *average)), rate
