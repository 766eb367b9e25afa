"""The exchanges of an elastic run: slots are the replicas of a mesh, whichever island computes them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.functional.rng import step_key
from shardtrain.train_step.elastic_exchange import _average_state, _weigh_state

SLOTS, STEPS = 4, 6
ADASUM = Synchronisation(by="adasum")
LOCAL = Synchronisation(on="deltas", every=3, outer=Outer(learning_rate=0.7, momentum=0.9, nesterov=True))
SGD, ADAM = optax.sgd(0.3), optax.adam(1e-2)


class Task(NamedTuple):
    model: Any
    loss: Any
    batches: Any

    def make_parts(self, sizes, optimizer, synchronisation=Synchronisation()):
        layout = st.Layout(mesh=sizes, unnamed="replicate")
        mesh = st.make_mesh(layout, jax.devices()[: np.prod(list(sizes.values()))])
        placement = st.make_placement(self.model, optimizer, layout, mesh, synchronisation=synchronisation)
        return layout, mesh, placement, st.init_state(self.model, optimizer, placement, seed=0)

    def make_program(self, sizes, optimizer, synchronisation, num_slots=SLOTS, **options):
        _, _, placement, state = self.make_parts(sizes, optimizer)
        training = st.Training(self.model, self.loss, optimizer)
        return st.ElasticProgram(
            training, placement, self.batches, num_slots, state, synchronisation, **options
        )

    def train_on_mesh(self, optimizer, synchronisation):
        """Return state and metrics after each merge of a mesh with a replica for each slot."""
        layout, mesh, placement, state = self.make_parts({"data": SLOTS}, optimizer, synchronisation)
        step = st.make_step(self.model, self.loss, optimizer, placement)
        found = []
        for number, (batch, _) in zip(range(STEPS), self.batches.iterate(), strict=False):
            state, metrics = step(state, st.place(batch, mesh, layout.batch_axes))
            if (number + 1) % synchronisation.every == 0:
                found.append(jax.device_get((state.params, state.model_state, metrics)))
        return found

    def train_elastic(self, sizes, optimizer, synchronisation, shares):
        """Return the same of islands with some slots each, one after the other."""
        program, found = self.make_program(sizes, optimizer, synchronisation), []
        for step in range(0, STEPS, synchronisation.every):
            sums = [jax.device_get(program.compute(step, slots)) for slots in shares]
            program.apply(step, jax.tree.map(lambda *x: sum(x[1:], x[0]), *sums))
            state = program.state
            found.append(jax.device_get((state.params, state.model_state, program.metrics)))
        assert program.recent[-1][0] == int(program.state.step) == STEPS
        return found


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(16, momentum=0.75, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x))


DRAWN = np.random.default_rng(0)
TOKENS = [{"tokens": row} for row in DRAWN.integers(0, 32, (64, 9), np.int32)]
IMAGES = [{"image": DRAWN.standard_normal(16, np.float32), "label": np.int32(i % 8)} for i in range(60)]
TINY_MODEL = st.from_nnx(TinyConfig(vocab=32, num_layers=2, dropout=0.1))
TINY = Task(TINY_MODEL, st.next_token_loss, st.Batches(source=TOKENS, batch=8))
NORMED = Task(st.from_nnx(Normed), st.classification_loss, st.Batches(source=IMAGES, batch=12))
UNEQUAL = NORMED._replace(batches=st.Batches(source=IMAGES, batch=10))
ONE, FOUR = {"data": 1}, {"data": 2, "fsdp": 2}


@pytest.mark.parametrize(
    ("task", "sizes", "optimizer", "synchronisation"),
    [
        (TINY, FOUR, ADAM, ADASUM),
        (TINY, FOUR, SGD, LOCAL),
        (NORMED, ONE, SGD, Synchronisation(by="adasum", on="deltas", every=2)),
        (NORMED, ONE, ADAM, Synchronisation()),
    ],
    ids=["adasum", "diloco", "adasum of deltas", "batch norm"],
)
def test_slots_are_the_replicas_of_a_mesh(task, sizes, optimizer, synchronisation):
    expected = task.train_on_mesh(optimizer, synchronisation)
    found = task.train_elastic(sizes, optimizer, synchronisation, [(0, 1, 2), (3,)])
    assert len(found) == len(expected) == STEPS // synchronisation.every
    for (*own, metrics), (*of_mesh, mesh_metrics) in zip(found, expected, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), own, of_mesh)
        assert ("orthogonality" in metrics) == (synchronisation.by == "adasum")
        for name in metrics.keys() & {"orthogonality"}:
            np.testing.assert_allclose(metrics[name], mesh_metrics[name], rtol=1e-4)


@pytest.mark.parametrize(
    ("task", "rate", "by", "num_slots"),
    [
        (TINY, "none", "mean", 3),
        (TINY, "sqrt", "mean", 3),
        (TINY, "linear", "mean", 1),
        (NORMED, "none", "mean", 4),
        (TINY, "none", "adasum", 1),
    ],
)
def test_steps_with_a_batch_for_each_member_are_those_of_a_larger_batch(task, rate, by, num_slots):
    """Of one device, or for Adasum of a mesh with a replica for each."""
    synchronisation = Synchronisation(by=by)
    program = task.make_program(ONE, ADAM, synchronisation, num_slots, members=3, rate=rate)
    state, first = jax.device_get(program.state), 0
    for number, size in enumerate((1, 3, 2, 2, 3, 1)):
        batches, slots = range(first, first + size), range(num_slots * size)
        shares = [each for each in (slots[1::2], slots[::2]) if each]
        sums = [jax.device_get(program.compute(number, each, batches)) for each in shares]
        program.apply(number, jax.tree.map(lambda *x: sum(x[1:], x[0]), *sums))
        sizes = {"data": size} if by == "adasum" else ONE
        scaled = optax.adam(1e-2 * {"none": 1, "linear": size, "sqrt": size**0.5}[rate])
        layout, mesh, placement, new = task.make_parts(sizes, scaled, synchronisation)
        state = state._replace(combine_state=new.combine_state)
        parts = [task.batches.load(program.find_position(each)) for each in batches]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        if task is NORMED:
            # its statistics are those of a slot
            whole = {name: x.reshape(num_slots * size, -1, *x.shape[1:]) for name, x in whole.items()}
            state, metrics = average_slots(placement, state, whole, scaled)
        else:
            step = st.make_step(task.model, task.loss, scaled, placement)
            state, metrics = step(state, st.place(whole, mesh, layout.batch_axes))
        state, first = jax.device_get(state), first + size
        np.testing.assert_allclose(program.metrics["loss_sum"], metrics["loss_sum"], rtol=1e-5)
        own = program.state
        for x, y in (own.params, state.params), (own.model_state, state.model_state):
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), x, y)


def average_slots(placement, state, slots, optimizer):
    """Return state and metrics of a step whose batch statistics are averaged over slots."""
    gradients = jax.jit(st.make_gradients(NORMED.model, NORMED.loss, placement))
    key = step_key(jnp.uint32(0), jnp.int32(state.step))
    parts = [{name: x[None, each] for name, x in slots.items()} for each in range(len(slots["label"]))]
    found = [gradients(state.params, state.model_state, key, part, 0) for part in parts]
    mean = jax.tree.map(lambda *x: sum(x) / len(x), *found)
    updates, opt_state = optimizer.update(mean.of_mean_loss.grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = state._replace(
        params=params, opt_state=opt_state, model_state=mean.model_state, step=state.step + 1
    )
    return new, {"loss_sum": sum(each.loss_sum for each in found)}


def test_a_step_of_more_batches_than_members_is_refused():
    program = TINY.make_program(ONE, SGD, Synchronisation(), members=2)
    with pytest.raises(ValueError, match="a step of 3 batches, and members is 2"):
        program.compute(0, range(12), range(3))
    with pytest.raises(ValueError, match="use one batch"):
        TINY.make_program(ONE, SGD, LOCAL, members=2)


def test_local_steps_average_the_states_of_optimizers():
    """The definition, in a loop over replicas: Adam's moments are averaged as the parameters are."""
    synchronisation = Synchronisation(on="deltas", every=3)
    found = TINY.train_elastic(ONE, ADAM, synchronisation, [(3, 1), (0, 2)])
    _, _, placement, state = TINY.make_parts(ONE, ADAM)
    gradients = jax.jit(st.make_gradients(TINY.model, TINY.loss, placement))
    batches = [batch for _, (batch, _) in zip(range(STEPS), TINY.batches.iterate(), strict=False)]
    params, opt_state, losses = state.params, state.opt_state, []
    for start in (0, 3):
        own, rows = [], TINY.batches.batch // SLOTS
        for replica in range(SLOTS):
            mine, opt = params, opt_state
            for step in range(start, start + 3):
                part = {n: x[None, replica * rows : (replica + 1) * rows] for n, x in batches[step].items()}
                sums = gradients(mine, {}, step_key(jnp.uint32(0), jnp.int32(step)), part, replica * rows)
                losses.append(float(sums.mean_loss))
                updates, opt = ADAM.update(sums.grads, opt, mine)
                mine = optax.apply_updates(mine, updates)
            own.append((mine, opt))
        params, opt_state = jax.tree.map(lambda *x: jnp.mean(jnp.stack(x), 0).astype(x[0].dtype), *own)
        params_found, _, metrics = found[start // 3]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), params_found, params
        )
        mean = metrics["loss_sum"] / metrics["count"]
        np.testing.assert_allclose(mean, np.mean(losses[-3 * SLOTS :]), rtol=1e-5)


def test_counters_and_keys_of_optimizers_are_exact():
    """They are not averaged: a mean of keys is no key, and float32 has no large counters."""
    noisy = optax.chain(optax.add_noise(eta=1e-3, gamma=0.5, key=7), SGD)
    program = NORMED.make_program(ONE, noisy, LOCAL)
    start = jax.device_get(program.state.opt_state)
    program.apply(0, program.compute(0, range(SLOTS)))
    alone, shapes = start, jax.tree.map(jnp.zeros_like, program.state.params)
    for _ in range(LOCAL.every):
        _, alone = noisy.update(shapes, alone, shapes)
    found = [x for x in jax.tree.leaves(program.state.opt_state) if not jnp.issubdtype(x.dtype, jnp.inexact)]
    expected = [x for x in jax.tree.leaves(alone) if not jnp.issubdtype(x.dtype, jnp.inexact)]
    assert len(found) == len(expected) >= 2
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    # a slot that skipped its steps is behind
    states = [{"steps": jnp.int32(n), "mean": jnp.float32(n)} for n in (0, 3)]
    parts = [_weigh_state(x, x["mean"], jnp.int32(slot), 2) for slot, x in enumerate(states)]
    common = _average_state(jax.tree.map(jnp.add, *parts), states[0])
    assert common == {"steps": 3, "mean": 3.0}


@pytest.mark.parametrize(
    ("task", "sizes", "synchronisation", "word"),
    [
        (TINY, ONE, Synchronisation(by="top_k:0.1+adasum"), "known to one island only"),
        (TINY, ONE, Synchronisation(on="deltas", every=4, fragments=2), "--fragments"),
        (TINY, ONE, Synchronisation(on="deltas", every=4, overlap=1), "--overlap"),
        (TINY, ONE, Synchronisation(on="deltas", every=4, distance=1), "--clock-distance"),
        (NORMED, {"data": 2}, Synchronisation(), "a mesh without data"),
        (UNEQUAL, ONE, Synchronisation(), "rows of padding"),
    ],
)
def test_what_would_depend_on_who_is_there_is_refused(task, sizes, synchronisation, word):
    with pytest.raises(ValueError, match=word):
        task.make_program(sizes, SGD, synchronisation)
