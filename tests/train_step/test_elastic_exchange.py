"""The exchanges of an elastic run: slots are the replicas of a mesh, whichever island computes them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardtrain as st
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.functional.rng import step_key
from shardtrain.models.gpt import GptConfig

SLOTS, STEPS = 4, 6
MODEL = st.from_nnx(GptConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=2, dropout=0.1))
TOKENS = np.random.default_rng(0).integers(0, 32, (64, 9), np.int32)
BATCHES = st.Batches(source=[{"tokens": row} for row in TOKENS], batch=8)
SGD, ADAM = optax.sgd(0.3), optax.adam(1e-2)
ADASUM = Synchronisation(by="adasum")
LOCAL = Synchronisation(on="deltas", every=3, outer=Outer(learning_rate=0.7, momentum=0.9, nesterov=True))


def make_parts(sizes, optimizer, synchronisation=Synchronisation()):
    layout = st.Layout(mesh=sizes)
    mesh = st.make_mesh(layout, jax.devices()[: np.prod(list(sizes.values()))])
    placement = st.make_placement(MODEL, optimizer, layout, mesh, synchronisation=synchronisation)
    return layout, mesh, placement, st.init_state(MODEL, optimizer, placement, seed=0)


def train_on_mesh(optimizer, synchronisation):
    """Return the common parameters after each merge of a mesh with a replica for each slot, and the norms."""
    layout, mesh, placement, state = make_parts({"data": SLOTS}, optimizer, synchronisation)
    step = st.make_step(MODEL, st.next_token_loss, optimizer, placement)
    found = []
    for number, (batch, _) in zip(range(STEPS), BATCHES.iterate(), strict=False):
        state, metrics = step(state, st.place(batch, mesh, layout.batch_axes))
        if (number + 1) % synchronisation.every == 0:
            found.append((jax.device_get(state.params), jax.device_get(metrics)))
    return found


def train_elastic(sizes, optimizer, synchronisation, shares):
    """Return the same of islands with some slots each, one after the other."""
    _, _, placement, state = make_parts(sizes, optimizer)
    training = st.Training(MODEL, st.next_token_loss, optimizer)
    program = st.ElasticProgram(training, placement, BATCHES, SLOTS, state, synchronisation)
    found = []
    for step in range(0, STEPS, synchronisation.every):
        sums = [jax.device_get(program.compute(step, slots)) for slots in shares]
        program.apply(step, jax.tree.map(lambda *x: sum(x[1:], x[0]), *sums))
        found.append((jax.device_get(program.state.params), jax.device_get(program.metrics)))
    assert program.recent[-1][0] == int(program.state.step) == STEPS
    return found


@pytest.mark.parametrize("sizes", [{"data": 1}, {"data": 2, "fsdp": 2}])
@pytest.mark.parametrize(
    ("optimizer", "synchronisation"),
    [(ADAM, ADASUM), (SGD, LOCAL), (SGD, Synchronisation(by="adasum", on="deltas", every=2))],
    ids=["adasum", "diloco", "adasum of deltas"],
)
def test_slots_are_the_replicas_of_a_mesh(sizes, optimizer, synchronisation):
    expected = train_on_mesh(optimizer, synchronisation)
    found = train_elastic(sizes, optimizer, synchronisation, [(0, 1, 2), (3,)])
    assert len(found) == len(expected) == STEPS // synchronisation.every
    for (params, metrics), (of_mesh, mesh_metrics) in zip(found, expected, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), params, of_mesh)
        for name in metrics.keys() & {"orthogonality"}:
            np.testing.assert_allclose(metrics[name], mesh_metrics[name], rtol=1e-4)
    assert ("orthogonality" in found[0][1]) == (synchronisation.by == "adasum")


def test_local_steps_average_the_states_of_optimizers():
    """The definition, in a loop over replicas: Adam's moments are averaged as the parameters are."""
    synchronisation = Synchronisation(on="deltas", every=3)
    found = train_elastic({"data": 1}, ADAM, synchronisation, [(3, 1), (0, 2)])
    _, _, placement, state = make_parts({"data": 1}, ADAM)
    gradients = jax.jit(st.make_gradients(MODEL, st.next_token_loss, placement))
    batches = [batch for _, (batch, _) in zip(range(STEPS), BATCHES.iterate(), strict=False)]
    params, opt_state, losses = state.params, state.opt_state, []
    for start in (0, 3):
        own, rows = [], BATCHES.batch // SLOTS
        for replica in range(SLOTS):
            mine, opt = params, opt_state
            for step in range(start, start + 3):
                part = {n: x[None, replica * rows : (replica + 1) * rows] for n, x in batches[step].items()}
                sums = gradients(mine, {}, step_key(jnp.uint32(0), jnp.int32(step)), part, replica * rows)
                losses.append(float(sums.mean_loss))
                updates, opt = ADAM.update(sums.grads, opt, mine)
                mine = optax.apply_updates(mine, updates)
            own.append((mine, opt))
        params, opt_state = jax.tree.map(
            lambda *x: (sum(map(jnp.float32, x)) / SLOTS).astype(x[0].dtype), *own
        )
        params_found, metrics = found[start // 3]
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), params_found, params
        )
        mean = metrics["loss_sum"] / metrics["count"]
        np.testing.assert_allclose(mean, np.mean(losses[-3 * SLOTS :]), rtol=1e-5)


@pytest.mark.parametrize(
    ("synchronisation", "word"),
    [
        (Synchronisation(by="int8+adasum"), "rounded off"),
        (Synchronisation(on="deltas", every=4, fragments=2), "--fragments"),
        (Synchronisation(on="deltas", every=4, overlap=1), "--overlap"),
        (Synchronisation(on="deltas", every=4, distance=1), "--clock-distance"),
    ],
)
def test_what_islands_that_go_cannot_keep_is_refused(synchronisation, word):
    _, _, placement, state = make_parts({"data": 1}, SGD)
    training = st.Training(MODEL, st.next_token_loss, SGD)
    with pytest.raises(ValueError, match=word):
        st.ElasticProgram(training, placement, BATCHES, SLOTS, state, synchronisation)
