"""Combiners on a mesh: the step with Adasum, compression, deltas and local steps against plain arithmetic."""

import math
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.linen.spmd import with_logical_constraint

from shardtrain.cli.run_file import load_combiner
from shardtrain.combine.replicas import find_stacked_paths, split_layers, stack_layers
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import place
from shardtrain.functional.loss import classification_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement, state_specs
from shardtrain.train_step.step import list_combined_labels, make_step

ROWS, SGD_RATE = 16, 0.5
SGD, SGD_ONE, ADAM = optax.sgd(SGD_RATE), optax.sgd(1.0), optax.adam(1e-2)


def drawn(rngs, *dims):
    """A parameter of these dims; the classes have no name."""
    shape = [{"embed": 16, "mlp": 32}.get(dim, 8) for dim in dims]
    values = 0.25 * jax.random.normal(rngs.params(), shape)
    return nnx.Param(values, out_sharding=dims, eager_sharding=False)


class Net(nnx.Module):
    """Two matrices: an array to combine costs more to trace than all of this."""

    def __init__(self, rngs):
        self.up = drawn(rngs, "embed", "mlp")
        self.head = drawn(rngs, "mlp", None)

    def __call__(self, image):
        x = with_logical_constraint(image.reshape(len(image), -1), ("batch", "embed"))
        x = with_logical_constraint(jax.nn.relu(x @ self.up[...]), ("batch", "mlp"))
        return with_logical_constraint(x @ self.head[...], ("batch", None))


MODEL = from_nnx(Net)
RANDOM = np.random.default_rng(0)
BATCH = {
    "image": RANDOM.normal(size=(ROWS, 4, 4)).astype(np.float32),
    "label": RANDOM.integers(0, 8, ROWS, np.int32),
    "weights": np.where(np.arange(ROWS) < 13, 1, 0).astype(np.float32),
}
"""On four replicas the last one has a single example."""

MESHES = [{"data": 4, "fsdp": 2}, {"data": 4, "tensor": 2}]


def steps(synchronisation, optimizer, mesh, zero=3, batch=BATCH):
    """The states before and after a step, its metrics, and the placement."""
    state, step, placement = made(synchronisation, optimizer, tuple(mesh.items()), zero)
    placed = place(batch, placement.mesh, placement.layout.batch_axes)
    after, metrics = step(jax.device_put(state, placement.state), placed)
    return (state, jax.device_get(after)), jax.device_get(metrics), placement


@cache
def made(synchronisation, optimizer, mesh, zero):
    """(the state before the first step, the compiled step, the placement)."""
    layout = Layout(mesh=dict(mesh), zero=zero)
    mesh = make_mesh(layout, jax.devices()[: math.prod(layout.mesh.values())])
    placement = make_placement(MODEL, optimizer, layout, mesh, synchronisation=synchronisation)
    state = jax.device_get(init_state(MODEL, optimizer, placement, 7))
    return state, make_step(MODEL, classification_loss, optimizer, placement), placement


@cache
def replica_gradients():
    """The mean gradient of each quarter of the batch, by plain steps of one device."""
    found = []
    for quarter in range(4):
        part = {name: value[4 * quarter : 4 * quarter + 4] for name, value in BATCH.items()}
        (before, after), _, _ = steps(Synchronisation(), SGD_ONE, {"data": 1}, batch=part)
        found.append(jax.tree.map(lambda b, a: np.float64(b) - a, before.params, after.params))
    return found


def assert_changed_by(states, expected):
    for (path, before), after, change in zip(
        jax.tree.leaves_with_path(states[0].params),
        jax.tree.leaves(states[-1].params),
        jax.tree.leaves(expected),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(after - np.float64(before), change, 1e-4, 2e-6, err_msg=name)


@pytest.mark.parametrize(
    ("on", "mesh", "zero"),
    [
        pytest.param("deltas", MESHES[0], 3, marks=pytest.mark.full),
        pytest.param("gradients", MESHES[0], 3, marks=pytest.mark.full),
        ("gradients", MESHES[1], 1),
    ],
    ids=str,
)
def test_adasum_on_shards_is_that_of_whole_replicas(on, mesh, zero, references):
    """Deltas by SGD are the gradients."""
    states, metrics, placement = steps(Synchronisation(by="adasum", on=on), SGD, mesh, zero=zero)
    expected = jax.tree.map(
        lambda *g: references.tree_of_pairs([x.ravel() for x in g]).reshape(g[0].shape), *replica_gradients()
    )
    assert_changed_by(states, jax.tree.map(lambda g: -SGD_RATE * g, expected))
    # the metric: what is left of the squares of all replicas
    squares = jax.tree.map(lambda *g: sum((x**2).sum() for x in g), *replica_gradients())
    ratios = jax.tree.map(lambda e, s: (e**2).sum() / s, expected, squares)
    by_label = dict(zip(list_combined_labels(placement), metrics["orthogonality"], strict=True))
    for path, ratio in split_layers(ratios, frozenset()).items():
        np.testing.assert_allclose(by_label[path], ratio, 1e-4, err_msg=path)


def test_a_replica_without_examples_changes_nothing():
    weights = np.where(np.arange(ROWS) < 8, 1, 0).astype(np.float32)
    batch = {**BATCH, "weights": weights}
    cases = (Synchronisation(by="adasum"), SGD), (Synchronisation(by="adasum", on="deltas"), ADAM)
    for synchronisation, optimizer in cases:
        with_it, _, _ = steps(synchronisation, optimizer, {"data": 2}, batch=batch)
        half = {name: value[:8] for name, value in batch.items()}
        without, _, _ = steps(synchronisation, optimizer, {"data": 1}, batch=half)
        assert_changed_by(with_it, jax.tree.map(lambda b, a: a - b, without[0].params, without[1].params))
    assert with_it[-1].opt_state[0].count.tolist() == [1, 0]


def test_a_users_own_combiner_runs_on_the_mesh():
    text = f"{Path(__file__).parents[2] / 'examples' / 'own_combiner.py'}:median"
    synchronisation = Synchronisation(by=load_combiner(text))
    states, _, _ = steps(synchronisation, SGD_ONE, {"data": 4})
    assert_changed_by(states, jax.tree.map(lambda *g: -np.median(g, 0), *replica_gradients()))


def test_a_gradient_that_is_not_finite_on_one_replica_is_skipped_by_all():
    image = BATCH["image"].copy()
    image[5] = np.nan
    for synchronisation in (Synchronisation(by="adasum", on="deltas"), Synchronisation(by="int8+mean")):
        states, metrics, _ = steps(synchronisation, ADAM, {"data": 2}, batch={**BATCH, "image": image})
        assert metrics["skipped"] == 1
        assert states[1].step == 1
        jax.tree.map(np.testing.assert_array_equal, states[0]._replace(step=0), states[1]._replace(step=0))


def test_layers_are_combined_one_by_one():
    config = DecoderConfig(vocab=8, seq=4, embed=8, num_layers=11, num_heads=2, mlp=8)
    specs = state_specs(
        from_nnx(config), SGD_ONE, Layout(mesh={"data": 2}), {"data": 2, "fsdp": 1, "tensor": 1}
    )
    tree = jax.tree.map(
        lambda x: jnp.arange(x.size, dtype=jnp.float32).reshape(x.shape), specs.abstract.params
    )
    stacked = find_stacked_paths(specs.arrays, specs.params)
    pieces = split_layers(tree, stacked)
    labels = [label for label in sorted(pieces) if label.startswith("blocks/mlp/up/kernel")]
    assert labels == [f"blocks/mlp/up/kernel/{i:02d}" for i in range(11)]
    jax.tree.map(np.testing.assert_array_equal, stack_layers(pieces, tree, stacked), tree)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError) as error:
        Synchronisation(by="mean", on="weights", every=0, inside="max")  # type: ignore[arg-type]
    assert str(error.value).count("\n  ") == 3
    with pytest.raises(ValueError, match="adasum"):
        Synchronisation(by="adasun")
    with pytest.raises(ValueError, match="is 2, but gradients are combined in every step"):
        Synchronisation(by="adasum", every=2)
    layout = Layout(mesh={"data": 2}, parameters={"embed": ("data",)})
    with pytest.raises(ValueError, match="use fsdp for that") as error:
        state_specs(MODEL, SGD_ONE, layout, {"data": 2, "fsdp": 1, "tensor": 1}, Synchronisation(by="adasum"))
    assert "\n  - up" in str(error.value)
