"""Optimizers and learning-rate schedules of optax by name, with what a model's dims tell them.

An optimizer is any `optax.GradientTransformation`; these are the usual ones, typed for a run file
and the command line. Next: `train_step/step.py`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from shardtrain import axes
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error
from shardtrain.functional.model import Tree
from shardtrain.optim.optimizer_state import parameter_average, stored
from shardtrain.optim.per_layer import per_layer


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A learning rate over the steps of a run.

    Args:
      name: constant; cosine (Loshchilov and Hutter 2017); wsd: warmup, stable, decay (Hu et al.
        2024, MiniCPM); inverse_sqrt: after the warmup falls as 1/sqrt(step) (Vaswani et al. 2017).
      peak: the highest learning rate.
      warmup: steps of linear rise from `start`.
      start: where the warmup begins, as a share of the peak; 1 / N is the gradual warmup of Goyal et
        al. 2017 (section 2.2) for a rate that was raised N times.
      final: what is left at the end, as a share of the peak (cosine, wsd).
      decay: wsd only: the share of the run's steps in which it falls.
      function: step -> learning rate, such as any schedule of optax; it takes the place of all fields above.

    Short forms: a number is a constant rate, a function is `function`.

    Raises:
      ValueError: lists every value of a wrong kind or out of range.
    """

    name: Literal["constant", "cosine", "wsd", "inverse_sqrt"] = "cosine"
    peak: float = 1e-3
    warmup: int = 0
    start: float = 0.0
    final: float = 0.1
    decay: float = 0.2
    function: Callable[[Any], Any] | None = None

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """The fields that a bare value stands for; None: it is no short form."""
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return {"name": "constant", "peak": value}
        return {"function": value} if callable(value) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.function is not None:
            problems += [
                f"{field.name} is {value!r}, but the rate is given as a function, which says everything;"
                f" leave {field.name} out, or function"
                for field in fields(self)
                if field.name != "function" and (value := getattr(self, field.name)) != field.default
            ]
        if not self.peak > 0:
            problems.append(f"peak is {self.peak}; it must be a number above 0")
        if self.warmup < 0:
            problems.append(f"warmup is {self.warmup} steps; it must be 0 or more")
        problems += [
            f"{name} is {value}; it must lie between 0 and 1"
            for name, value in (("start", self.start), ("final", self.final), ("decay", self.decay))
            if not 0 <= value <= 1
        ]
        if problems:
            raise problems_error("this schedule cannot be used", problems)


def _constant(schedule: Schedule, steps: int) -> optax.Schedule:
    return optax.constant_schedule(schedule.peak)


def _cosine(schedule: Schedule, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(schedule.peak, max(steps, 1), alpha=schedule.final)


def _wsd(schedule: Schedule, steps: int) -> optax.Schedule:
    falling = min(max(round(schedule.decay * (steps + schedule.warmup)), 1), max(steps, 1))
    decay = optax.linear_schedule(schedule.peak, schedule.peak * schedule.final, falling)
    return optax.join_schedules([optax.constant_schedule(schedule.peak), decay], [max(steps - falling, 0)])


def _inverse_sqrt(schedule: Schedule, steps: int) -> optax.Schedule:
    start = max(schedule.warmup, 1)
    # join_schedules asks for steps before its beginning too
    return lambda step: schedule.peak * (start / (jnp.maximum(step, 0) + start)) ** 0.5


SCHEDULES: dict[str, Callable[[Schedule, int], optax.Schedule]] = {
    "constant": _constant,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}


def make_schedule(schedule: Schedule, steps: int) -> optax.Schedule:
    """step -> learning rate, for a run of `steps` steps.

    >>> rate = make_schedule(Schedule(name="cosine", peak=1.0, warmup=10, final=0.0), 110)
    >>> [round(float(rate(step)), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if schedule.function is not None:
        return schedule.function
    after_warmup = SCHEDULES[schedule.name](schedule, max(steps - schedule.warmup, 0))
    if not schedule.warmup:
        return after_warmup
    rise = optax.linear_schedule(schedule.peak * schedule.start, schedule.peak, schedule.warmup)
    return optax.join_schedules([rise, after_warmup], [schedule.warmup])


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer by name.

    Args:
      name: adamw, sgd (with momentum), lion, adafactor, lamb, or muon (Jordan et al. 2024; matrices
        of the blocks by Muon, the rest by AdamW).
      learning_rate: its schedule; also a number, a constant rate, or a function step -> rate.
      weight_decay: decoupled; it falls on arrays of two and more dims, `layers` not counted.
      b1: decay of the first moment; the momentum of sgd and muon.
      b2: decay of the second moment (adamw, lamb, lion, muon's AdamW).
      eps: added to the denominator (adamw, lamb, muon's AdamW).
      clip: the greatest global norm of a gradient; None does not clip.
      ema: decay of an average of the parameters, see `optimizer_state.parameter_average`; None keeps none.
        `Run(evaluate_with="ema")` evaluates it.

    Short form: its name.

    Raises:
      ValueError: lists every value of a wrong kind or out of range.
    """

    name: Literal["adamw", "sgd", "lion", "adafactor", "lamb", "muon"] = "adamw"
    learning_rate: Schedule = Schedule()
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip: float | None = 1.0
    ema: float | None = None

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """The fields that a bare value stands for; None: it is no short form."""
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
        if self.clip is not None and not self.clip > 0:
            problems.append(f"clip is {self.clip}; it must be above 0, or None for no clipping")
        if problems:
            raise problems_error("this optimizer cannot be used", problems)


def _is_names(x: Any) -> bool:
    return x is None or isinstance(x, tuple)


def _features(names: tuple[str | None, ...]) -> list[int]:
    """The dims of an array that make it a matrix: not its stacks, and heads with head_dim as one."""
    has_heads = {axes.HEADS, axes.KV_HEADS} & set(names)
    skipped = {axes.LAYERS, axes.EXPERTS, *([axes.HEAD_DIM] if has_heads else [])}
    return [i for i, name in enumerate(names) if name not in skipped]


def decayed(dims: Tree, params: Any) -> Any:
    """Which parameters weight decay falls on: matrices and above, not biases, gains or scalars.

    Args:
      dims: the model's dims; an array without names is judged by how many dims it has.
      params: arrays or shapes.

    >>> import numpy as np
    >>> dims = {"up": ("layers", "embed", "mlp"), "gain": ("layers", "embed"), "other": None}
    >>> decayed(dims, {"up": np.ones((2, 4, 8)), "gain": np.ones((2, 4)), "other": np.ones((4, 4))})
    {'gain': False, 'other': True, 'up': True}
    """

    def is_decayed(names: tuple[str | None, ...] | None, param: Any) -> bool:
        return (param.ndim if names is None else len(_features(names))) >= 2

    return jax.tree.map(is_decayed, dims, params, is_leaf=_is_names)


def muon_dims(dims: Tree) -> Any:
    """Which parameters Muon takes, and which of their dims are the two sides of the matrix.

    Where `embed` comes first it is one side and all other dims together are the other, else the last
    dim is; `layers` and `experts` are batch dims. Embeddings and heads (`vocab`), tables of positions
    (`seq`) and vectors are left to AdamW.
    """

    def numbers(names: tuple[str | None, ...] | None) -> MuonDimensionNumbers | None:
        if names is None or len(_features(names)) < 2 or {axes.VOCAB, axes.SEQ} & set(names):
            return None
        kept = [i for i, name in enumerate(names) if name not in (axes.LAYERS, axes.EXPERTS)]
        split = 1 if names[kept[0]] == axes.EMBED else -1
        return MuonDimensionNumbers(tuple(kept[:split]), tuple(kept[split:]))

    return jax.tree.map(numbers, dims, is_leaf=_is_names)


Maker = Callable[[Optimizer, optax.Schedule, Tree], optax.GradientTransformation]


def _adamw(o: Optimizer, rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    return optax.adamw(rate, o.b1, o.b2, o.eps, weight_decay=o.weight_decay, mask=partial(decayed, dims))


def _sgd(o: Optimizer, rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(o.b1) if o.b1 else optax.identity(),
        optax.add_decayed_weights(o.weight_decay, mask=partial(decayed, dims)),
        optax.scale_by_learning_rate(rate),
    )


def _lion(o: Optimizer, rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    return optax.lion(rate, o.b1, o.b2, weight_decay=o.weight_decay, mask=partial(decayed, dims))


def _adafactor(o: Optimizer, rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    # without a rate optax's adafactor ends in scale(-1): the decay is negative too, the rate comes last
    return optax.chain(
        per_layer(optax.adafactor(None), dims),
        optax.add_decayed_weights(-o.weight_decay, mask=partial(decayed, dims)),
        optax.scale_by_schedule(rate),
    )


def _lamb(o: Optimizer, rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    # as optax.lamb, with the trust ratio of each layer
    return optax.chain(
        optax.scale_by_adam(o.b1, o.b2, o.eps),
        optax.add_decayed_weights(o.weight_decay, mask=partial(decayed, dims)),
        per_layer(optax.scale_by_trust_ratio(), dims),
        optax.scale_by_learning_rate(rate),
    )


def _muon(o: Optimizer, rate: optax.Schedule, dims: Tree) -> optax.GradientTransformation:
    update = muon(
        rate,
        beta=o.b1,
        eps=o.eps,
        adam_b1=o.b1,
        adam_b2=o.b2,
        muon_weight_dimension_numbers=lambda _: muon_dims(dims),
        consistent_rms=0.2,
    )
    # its own decay of what AdamW takes knows no mask
    decay = optax.add_decayed_weights(lambda step: -o.weight_decay * rate(step), partial(decayed, dims))
    return optax.chain(update, decay)


OPTIMIZERS: dict[str, Maker] = {
    "adamw": _adamw,
    "sgd": _sgd,
    "lion": _lion,
    "adafactor": _adafactor,
    "lamb": _lamb,
    "muon": _muon,
}


def make_optimizer(
    optimizer: Optimizer | optax.GradientTransformation, steps: int, dims: Tree
) -> tuple[optax.GradientTransformation, optax.Schedule | None]:
    """The optax transformation of a run, and its learning rate if that is known.

    Args:
      optimizer: by name, or an optax transformation, which is taken as it is.
      steps: the steps of the run, for the schedule.
      dims: the model's dims: they tell weight decay and Muon what is a matrix.
    """
    if not isinstance(optimizer, Optimizer):
        return optimizer, None
    rate = make_schedule(optimizer.learning_rate, steps)
    update = OPTIMIZERS[optimizer.name](optimizer, rate, dims)
    # without clipping too, so that the state has the same paths
    clip = optax.identity() if optimizer.clip is None else optax.clip_by_global_norm(optimizer.clip)
    average = () if optimizer.ema is None else (parameter_average(optimizer.ema),)
    return optax.chain(clip, update, *average), rate


def coupled(optimizer: optax.GradientTransformation, dims: Tree, params: Any) -> list[str]:
    """Whether an update of one array, or of one layer of a stacked array, depends on another's gradient.

    Where stages update apart from each other that would not be the update of the whole. It is tried out, on
    small random arrays of the same structure: what the optimizer does with shapes alone is not seen.

    Args:
      optimizer: any.
      dims: the model's dims.
      params: arrays or shapes, for their structure.

    Returns:
      What depends on what, in sentences; nothing where all is apart.

    >>> import numpy as np
    >>> params, dims = {"a": np.ones((2, 2)), "b": np.ones(2)}, {"a": ("embed", "mlp"), "b": ("mlp",)}
    >>> coupled(optax.adam(1e-3), dims, params)
    []
    >>> coupled(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)), dims, params)
    ['the update of one array depends on the gradients of others, as clipping by their norm does']
    """
    used = stored(optimizer)
    leaves, structure = jax.tree.flatten(params)
    names = jax.tree.leaves(dims, is_leaf=_is_names)
    stacked = [bool(n) and n[0] == axes.LAYERS for n in names]
    shapes = [
        (4, *[2] * (x.ndim - 1)) if is_stacked else (2,) * x.ndim
        for x, is_stacked in zip(leaves, stacked, strict=True)
    ]
    random = np.random.default_rng(0)

    def draw() -> list[np.ndarray]:
        return [random.normal(size=shape).astype(np.float32) for shape in shapes]

    weights, first, second = draw(), draw(), draw()

    def updates(change: Callable[[int, np.ndarray], np.ndarray]) -> list[np.ndarray]:
        """Of the second step, with the weights and gradients of some changed."""
        changed = [[change(i, x) for i, x in enumerate(tree)] for tree in (weights, second)]
        weights_, second_ = (jax.tree.unflatten(structure, tree) for tree in changed)
        # the loss is that of all stages, which every stage is told
        state = used.init(weights_)
        first_ = jax.tree.unflatten(structure, first)
        _, state = used.update(first_, state, weights_, value=jnp.float32(1), grad=first_)
        found, _ = used.update(second_, state, weights_, value=jnp.float32(1), grad=second_)
        return [np.asarray(x) for x in jax.tree.leaves(found)]

    every_other = updates(lambda i, x: x * np.float32(1e6) if i % 2 else x)
    one_layer = updates(lambda i, x: np.concatenate([x[:1] * np.float32(1e6), x[1:]]) if stacked[i] else x)
    before = updates(lambda i, x: x)
    same = [np.allclose(a, b, rtol=1e-4) for a, b in zip(before[::2], every_other[::2], strict=True)]
    alike = [
        np.allclose(a[1:], b[1:], rtol=1e-4)
        for a, b, is_stacked in zip(before, one_layer, stacked, strict=True)
        if is_stacked
    ]
    problems = []
    if not all(same):
        problems.append(
            "the update of one array depends on the gradients of others, as clipping by their norm does"
        )
    if not all(alike):
        problems.append(
            "the update of one layer depends on the gradients of other layers of its stack, as a trust ratio"
            " or a root mean square of the whole stack does"
        )
    return problems
