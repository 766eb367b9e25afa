"""Every way to synchronise the replicas of a mesh gives the arithmetic of its replicas, in float64."""

import itertools
import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_sgd import local_sgd
from tiny_language_model import TinyConfig

from shardtrain.combine.fragments import by_path, make_fragments
from shardtrain.combine.replicas import stacked_paths
from shardtrain.combine.synchronisation import PRESETS, Outer, Synchronisation, preset
from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.step import make_step

MODEL = from_nnx(TinyConfig(vocab=16, embed=8, mlp=8, num_layers=3))
ROWS, SEQ, RATE, STEPS = 16, 4, 0.5, 5
NESTEROV = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)
OUTERS = {"none": Outer(), "momentum": Outer(learning_rate=0.5, momentum=0.5), "nesterov": NESTEROV}
MESHES = {"data": {"data": 4}, "data+fsdp": {"data": 4, "fsdp": 2}, "data+tensor": {"data": 2, "tensor": 2}}


@cache
def batches():
    random = np.random.default_rng(1)
    weights = np.ones(ROWS, np.float32)
    weights[-3:] = 0  # of four replicas the last one has a single example
    tokens = random.integers(0, 16, (STEPS, ROWS, SEQ + 1), np.int32)
    return [{"tokens": each, "weights": weights} for each in tokens]


def part(batch, replica, num_replicas):
    rows = ROWS // num_replicas
    return {name: x[replica * rows : (replica + 1) * rows] for name, x in batch.items()}


@jax.jit
def plain_gradient(params, batch):
    def loss(params):
        apply = lambda *inputs: MODEL.apply(params, {}, jax.random.key(0), True, *inputs)[0]  # noqa: E731
        total, count, *_ = next_token_loss(apply, jax.tree.map(jnp.asarray, batch))
        return total / count

    return jax.grad(loss)(params)


def steps(synchronisation, mesh, num_steps=STEPS, optimizer=None, state=None, first=0):
    """The states after each step, on the host; and the placement."""
    optimizer = optimizer or optax.sgd(RATE)
    layout = Layout(mesh=mesh)
    jax_mesh = make_mesh(layout, jax.devices()[: math.prod(mesh.values())])
    placement = make_placement(MODEL, optimizer, layout, jax_mesh, synchronisation=synchronisation)
    step = make_step(MODEL, next_token_loss, optimizer, placement)
    state = init_state(MODEL, optimizer, placement, 3) if state is None else state
    found = [jax.device_get(state)]
    state = jax.device_put(state, placement.state)
    for batch in batches()[first:num_steps]:
        state, metrics = step(state, place(batch, jax_mesh, layout.batch_axes))
        assert metrics["skipped"] == 0
        found.append(jax.device_get(state))
    return found, placement


def expected(synchronisation, num_replicas, params, placement):
    specs = placement.specs
    counts = [part(batches()[0], r, num_replicas)["weights"].sum() * SEQ for r in range(num_replicas)]
    gradient = lambda params, r, step: plain_gradient(params, part(batches()[step - 1], r, num_replicas))  # noqa: E731
    fragments = make_fragments(params, stacked_paths(specs.arrays, specs.sharded), synchronisation.fragments)
    return local_sgd(gradient, params, counts, STEPS, synchronisation, RATE, fragments)


def same(params, reference, name):
    for path, x in by_path(params).items():
        np.testing.assert_allclose(x, reference[path], 1e-5, 2e-6, err_msg=f"{name}: {path}")


GRID = list(itertools.product(MESHES, (1, 2, 4), OUTERS))


@pytest.mark.parametrize(
    ("mesh", "every", "outer"),
    [
        pytest.param(*case, marks=[pytest.mark.full] * (number % 3 != number // 9))
        for number, case in enumerate(GRID)
    ],
)
def test_local_steps_and_merges_are_those_of_each_replica(mesh, every, outer):
    synchronisation = Synchronisation(on="deltas", every=every, outer=OUTERS[outer])
    states, placement = steps(synchronisation, MESHES[mesh])
    reference = expected(synchronisation, MESHES[mesh]["data"], states[0].params, placement)
    for number, (state, params) in enumerate(zip(states[1:], reference, strict=True), 1):
        same(state.params, params, f"step {number}")


@pytest.mark.parametrize("mesh", ["data+fsdp", "data+tensor"])
def test_fragments_are_merged_in_turn(mesh):
    synchronisation = Synchronisation(on="deltas", every=4, fragments=2, outer=NESTEROV)
    states, placement = steps(synchronisation, MESHES[mesh])
    reference = expected(synchronisation, MESHES[mesh]["data"], states[0].params, placement)
    for number, (state, params) in enumerate(zip(states[1:], reference, strict=True), 1):
        same(state.params, params, f"step {number}")
    # after two steps some layers have moved, and the others have not
    moved = (states[2].params["blocks"]["up"] != states[0].params["blocks"]["up"]).any((1, 2))
    assert moved.tolist() == [True, False, True]


def test_a_merge_in_every_step_at_rate_one_is_the_plain_step():
    merged, _ = steps(Synchronisation(on="deltas"), MESHES["data"])
    plain, _ = steps(Synchronisation(), MESHES["data"])
    for a, b in zip(merged, plain, strict=True):
        same(a.params, by_path(b.params), "plain")


def test_a_state_between_merges_goes_on_with_the_same_bits():
    synchronisation = Synchronisation(by="int8+mean", on="deltas", every=4, fragments=2, outer=NESTEROV)
    whole, _ = steps(synchronisation, MESHES["data"], optimizer=optax.adam(1e-2))
    for number in range(1, STEPS):
        state = jax.tree.map(jnp.asarray, whole[number])
        parts, _ = steps(
            synchronisation, MESHES["data"], optimizer=optax.adam(1e-2), state=state, first=number
        )
        jax.tree.map(np.testing.assert_array_equal, parts[-1], whole[-1])


def test_any_optax_transformation_is_an_outer_optimizer():
    synchronisation = Synchronisation(on="deltas", every=2, outer=optax.adam(1e-2))
    states, _ = steps(synchronisation, MESHES["data"], num_steps=2)
    change = jax.tree.map(lambda a, b: abs(a - b).max(), states[2].params, states[0].params)
    # the first step of Adam moves each weight by its rate
    assert all(abs(x - 1e-2) < 1e-4 for x in jax.tree.leaves(change))


def test_presets_are_found_by_name():
    assert (Synchronisation.short("diloco") or {})["every"] == 30
    assert preset("streaming-diloco").fragments == 4
    assert Synchronisation.short("int8+adasum") == {"by": "int8+adasum"}
    assert len(PRESETS) == 6
    with pytest.raises(ValueError, match="did you mean 'diloco'"):
        preset("dilocco")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fragments": 3, "every": 2, "on": "deltas"}, "use 2 fragments or fewer"),
        ({"outer": NESTEROV}, "use deltas (--combine-on deltas)"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, text):
    with pytest.raises(ValueError) as error:
        Synchronisation(**given)
    assert text in str(error.value)


@pytest.mark.parametrize("given", [{"learning_rate": 0.0}, {"momentum": 1.0}, {"nesterov": True}])
def test_outer_optimizers_that_cannot_learn_are_refused(given):
    with pytest.raises(ValueError, match="this outer optimizer cannot be used"):
        Outer(**given)


def test_more_fragments_than_arrays_are_refused():
    with pytest.raises(ValueError, match="use --fragments 4 or fewer"):
        make_fragments({"up": jnp.ones((3, 8)), "table": jnp.ones(4)}, frozenset({"up"}), 5)
