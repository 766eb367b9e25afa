"""Run one case in this process and compare it with one device.

What is run is what a user's run does before and in its first step: all its checks, its program, its batch.
Next: `forked.py`, which does this in a child.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from case import Case
from operator_drawing import with_operators
from rich.console import Console
from share_sums import sum_shares
from subjects import Subject, dim_names, make_subject

import shardtrain as st
from shardtrain.checkpoints.origins import restore_block_order
from shardtrain.errors.compiler_errors import compiler_text
from shardtrain.errors.user_code import OWN_MISTAKES, PACKAGE
from shardtrain.functional.auxiliary import sum_loss
from shardtrain.functional.model import path_text
from shardtrain.functional.rng import step_key
from shardtrain.trainer.config import Run, make_model
from shardtrain.trainer.console import RunConsole
from shardtrain.trainer.evaluation import make_evaluation
from shardtrain.trainer.prepared_run import PreparedRun
from shardtrain.trainer.setup import FIRST_POSITION

RTOL, FLOOR = 1e-5, 1e-6
"""How far an array may be off: parts of its own largest entry, and of the largest of all arrays."""


Arrays = dict[str, np.ndarray]
"""Name -> array."""


@dataclass(frozen=True)
class Data:
    """Samples to train on, and held-out ones."""

    samples: list[dict[str, np.ndarray]]
    held: list[dict[str, np.ndarray]]

    def train(self, folder: Path) -> list[dict[str, np.ndarray]]:
        """Return the samples to train on."""
        return self.samples

    def heldout(self, folder: Path) -> list[dict[str, np.ndarray]]:
        """Return the held-out samples."""
        return self.held


def make_optimizer() -> optax.GradientTransformation:
    """Make an optimizer whose state keeps the gradient, and whose update is smooth in it."""
    return optax.chain(optax.trace(0.0), optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=0.1))


def make_run(case: Case, subject: Subject) -> Run:
    """Make the run of a case."""
    count = case.num_samples
    model = subject.model
    shapes = {}
    if case.names != "none":
        pure = model if isinstance(model, st.Model) else st.from_nnx(model)
        params, _ = jax.eval_shape(pure.init, jax.random.key(0))
        leaves = jax.tree.leaves_with_path(params)
        shapes = {path_text(path): x.shape for path, x in leaves}
    run = Run(
        model=model,
        names=dim_names(case, shapes),
        data=Data(subject.samples[:count], subject.samples[count:]),
        loss=subject.loss,
        optimizer=make_optimizer(),
        strategy=st.Strategy(
            layout=st.Layout(mesh=dict(case.mesh) or {"data": 1}, **case.layout),
            accumulate=case.accumulate,
            pipeline=st.Pipeline(schedule=case.schedule, virtual_stages=case.virtual),
            remat=case.remat,  # pyright: ignore[reportArgumentType]
        ),
        batch=case.rows,
        steps=1,
        seed=case.seed,
        evaluate_batches=None,
        check_layout="off",  # what it would find shall be found here
    )
    return with_operators(case, run, subject.samples) if case.operators else run


def check_case(case: Case) -> dict[str, Any]:
    """Run a case and return its end: right, wrong, refused or error, and what says so."""
    subject = make_subject(case)
    with ExitStack() as stack:
        try:
            run = make_run(case, subject)
            output = stack.enter_context(RunConsole(Console(file=StringIO()), None))
            prepared = PreparedRun(run, Path("fuzz"), None, output, stack)
            got, start, batch, params = compute(case, prepared)
        except Exception as mistake:
            if is_of_package(mistake):
                return {"end": "refused", "text": str(mistake)}
            # as the command line does with what XLA refuses
            if text := compiler_text(mistake):
                return {"end": "refused", "text": text}
            raise
    got = {group: flatten(tree) for group, tree in got.items()}

    def on_one_device(start: Any, after: Any) -> dict[str, Arrays]:
        return compute_on_one_device(case, prepared, subject, start, batch, after, set(got["gradient"]))

    expected = on_one_device(start, params)
    worst = differences(got, expected)
    if any(not each <= 1 for each in worst.values()):
        # some gradients cancel, and some activations are almost where their derivative jumps
        near = [on_one_device(nudged(start, ulps), nudged(params, ulps)) for ulps in (1, 4, 16, 32, 48, 64)]
        worst = differences(got, expected, near)
    name = max(worst, key=lambda each: np.nan_to_num(worst[each], nan=np.inf))
    end = "right" if worst[name] <= 1 else "wrong"
    return {"end": end, "worst": float(worst[name]), "text": "" if end == "right" else differing(worst)}


def is_of_package(error: BaseException) -> bool:
    """Whether this library raised an error itself, which says what to change: no error of jax or Flax."""
    if not isinstance(error, OWN_MISTAKES):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__", "")).split(".")[0] == PACKAGE


def differing(worst: Mapping[str, float]) -> str:
    """Name the arrays that differ most, each with how many times more than it may."""
    found = sorted((name for name in worst if not worst[name] <= 1), key=lambda name: -worst[name])
    return "; ".join(f"{name} {worst[name]:.3g}" for name in found[:6])


def compute(case: Case, prepared: PreparedRun) -> tuple[dict[str, Any], Any, Any, Any]:
    """Do the first step and the evaluation of a run.

    Returns:
      (groups of arrays by name, the state before the step, its batch, the parameters after it), on the host.
    """
    run, setup = prepared.run, prepared.setup

    def ordered(params: Any) -> Any:
        return jax.tree.map(np.array, restore_block_order(setup.placement, params))

    def ordered_part(some: Any, params: Any) -> Any:
        # of the parameters that are trained
        part = {path_text(path): x for path, x in jax.tree.leaves_with_path(some)}
        whole = jax.tree.map_with_path(lambda path, x: part.get(path_text(path), x), params)
        return {name: x for name, x in flatten(ordered(whole)).items() if name in part}

    evaluate = make_evaluation(run, setup, prepared.coordination, prepared.heldout, None)
    host = prepared.feed.loader.batches.load(FIRST_POSITION)
    state = prepared.init()
    start = {
        "params": ordered(state.params),
        "model_state": jax.tree.map(np.array, state.model_state),
        "seed": np.array(state.seed),
    }
    shares = ordered_part(sum_shares(case, prepared, state, host), state.params) if case.shares else {}
    state, metrics = prepared.step(state, prepared.feed.loader.place(host))
    jax.block_until_ready(state)
    params = ordered(state.params)
    after = {"params": params, "model_state": jax.tree.map(np.array, state.model_state)}
    gradient = ordered_part(state.opt_state[0].trace, state.params)
    got = {
        "value": {name: np.asarray(metrics[name]) for name in ("loss_sum", "count")},
        "gradient": gradient,
        # not of what is frozen
        "shares": {name: x for name, x in shares.items() if name in gradient},
        "step": params,
        "model_state": after["model_state"],
        "evaluation": {"loss": np.asarray(evaluate(state)["heldout/loss"])},
    }
    return got, start, host, after


def compute_on_one_device(
    case: Case,
    prepared: PreparedRun,
    subject: Subject,
    start: Any,
    host: Any,
    after: Any,
    trained: Collection[str],
) -> dict[str, Arrays]:
    """Return the groups of arrays that `compute` returns, of one device without a layout.

    Args:
      case: the case.
      prepared: its run.
      subject: its model and data.
      start: the state before the step.
      host: the batch.
      after: the state after the step, which is evaluated.
      trained: names of the parameters that the run trains.
    """
    model = make_model(prepared.run)
    value_and_grad = (
        plain_gradients(case, model, subject) if subject.apply else library_gradients(model, subject)
    )
    loss_sum, count, grads, model_state = value_and_grad(start, jax.tree.map(jnp.asarray, host))
    before = flatten(start["params"])
    grads = {name: x for name, x in flatten(grads).items() if name in trained}
    optimizer = make_optimizer()

    def update(params: Any, grads: Any) -> Any:
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    held = stack_samples(prepared.heldout[""])
    total, num = jax.jit(evaluate_plainly(model, subject))(after["params"], after["model_state"], held)
    found = {
        "value": {"loss_sum": loss_sum, "count": count},
        "gradient": grads,
        "shares": grads if case.shares else {},
        "step": {**before, **jax.jit(update)({name: before[name] for name in grads}, grads)},
        "model_state": model_state if start["model_state"] else {},
        "evaluation": {"loss": total / num},
    }
    return {group: flatten(tree) for group, tree in found.items()}


def flatten(tree: Any) -> Arrays:
    """Return the arrays of a tree by their paths."""
    return {path_text(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(tree)}


def stack_samples(samples: Any) -> dict[str, np.ndarray]:
    """Return all samples as one batch, each of weight 1 if it says none."""
    batch = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {"weights": np.ones(len(samples), np.float32), **batch}


def plain_gradients(case: Case, model: Any, subject: Subject) -> Callable[..., Any]:
    """Return the gradients by Flax and jax alone."""
    apply = subject.apply
    assert apply is not None

    def compute(start: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            after: list[Any] = [{}]

            def call(*inputs: Any) -> Any:
                outputs, after[0] = apply(params, start["model_state"], True, *inputs)
                return outputs

            total, count, *_ = subject.loss(call, batch)
            return total / jnp.where(count > 0, count, 1), (total, count, after[0])

        grads, (total, count, model_state) = jax.grad(loss, has_aux=True)(start["params"])
        return total, count, grads, model_state

    return jax.jit(compute)


def library_gradients(model: Any, subject: Subject) -> Callable[..., Any]:
    """Return the gradients by this library on one device, whose dropout and losses of models are its own."""
    layout = st.Layout(mesh={"data": 1}, unnamed="replicate")
    mesh = st.make_mesh(layout, jax.devices()[:1])
    placement = st.make_placement(model, optax.identity(), layout, mesh)
    gradients = jax.jit(st.make_gradients(model, subject.loss, placement))

    def compute(start: Any, batch: Any) -> Any:
        placed = st.place(jax.tree.map(np.asarray, batch), mesh, layout.batch_axes)
        key = step_key(jnp.asarray(start["seed"]), jnp.int32(0))
        found = gradients(start["params"], start["model_state"], key, placed)
        return found.loss_sum, found.count, found.grads, found.model_state

    return compute


def evaluate_plainly(model: Any, subject: Subject) -> Callable[..., Any]:
    """Return (params, model state, batch) -> sum and count of the loss in evaluation."""

    def evaluate(params: Any, model_state: Any, batch: Any) -> Any:
        def call(*inputs: Any) -> Any:
            if subject.apply is not None:
                return subject.apply(params, model_state, False, *inputs)[0]
            return model.apply(params, model_state, jax.random.key(0), False, *inputs)[0]

        return sum_loss(subject.loss, call, batch, train=False)[:2]

    return evaluate


def nudged(tree: Any, ulps: int) -> Any:
    """Return the same with each float up or down by about so many of the last bits of 1, or of its own."""
    signs = np.random.default_rng(ulps)

    def moved(x: np.ndarray) -> np.ndarray:
        if not np.issubdtype(x.dtype, np.floating):
            return x
        change = signs.choice([-1, 1], x.shape) * ulps * np.finfo(x.dtype).eps
        return (x + change * np.maximum(np.abs(x), 1)).astype(x.dtype)

    return jax.tree.map(moved, tree)


def differences(
    got: Mapping[str, Arrays], expected: Mapping[str, Arrays], near: Sequence[Mapping[str, Arrays]] = ()
) -> dict[str, float]:
    """Return how far each array is off, in units of what it may be; NaN and infinity are not right.

    Args:
      got: groups of arrays.
      expected: the same of one device.
      near: the same of one device from numbers that are off by their last bits; an array may be four times
        as far off as one of these is.
    """
    found = {}
    for group, ours in got.items():
        theirs = expected[group]
        assert ours.keys() == theirs.keys(), (group, sorted(ours.keys() ^ theirs.keys()))
        largest = max((np.abs(x).max(initial=0) for x in theirs.values()), default=0)
        for name, x in theirs.items():
            assert ours[name].shape == x.shape, (group, name, ours[name].shape, x.shape)
            allowed = RTOL * np.abs(x).max(initial=0) + FLOOR * largest + 1e-12
            allowed += 4 * max((np.abs(each[group][name] - x).max(initial=0) for each in near), default=0)
            found[f"{group}/{name}"] = float(np.abs(ours[name] - x).max(initial=0) / allowed)
    return found
