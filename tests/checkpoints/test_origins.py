"""What a pipeline stores is saved as it lies, and read back by any other; and what becomes of the rest."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_language_model import TinyConfig

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.differences import Allow
from shardtrain.checkpoints.manifest_entries import COMMON, ArrayOrigin, WriterPart
from shardtrain.checkpoints.origins import make_find_origins, restore_block_order, select_saved_state
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.functional.model import path_text
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.pipeline.stacking import Partition
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement, restorable_state

MODEL = from_nnx(TinyConfig(vocab=32, embed=16, mlp=32, num_layers=5))
OPTIMIZER = optax.adam(1e-3)


def placed(sizes, stages=None, optimizer=OPTIMIZER, synchronisation=Synchronisation()):
    return _placed(tuple(sizes.items()), stages, optimizer, synchronisation)


@functools.cache
def _placed(sizes, stages, optimizer, synchronisation):
    layout = Layout(mesh=dict(sizes))
    mesh = make_mesh(layout, jax.devices()[: math.prod(size for _, size in sizes)])
    placement = make_placement(MODEL, optimizer, layout, mesh, synchronisation=synchronisation, stages=stages)
    return placement, init_state(MODEL, optimizer, placement, seed=3)


def with_moments(placement, state):
    """Moments that differ from zero, and from each other."""
    adam, *rest = state.opt_state
    opt_state = (adam._replace(mu=jax.tree.map(lambda x: x * 2, state.params)), *rest)
    return jax.device_put(state._replace(opt_state=opt_state), placement.state)


def moved(folder, source, state, target):
    """A state through a checkpoint, from one placement onto another."""
    saved = select_saved_state(state)
    with Checkpoints(folder, CheckpointPolicy()) as checkpoints:
        checkpoints.save(1, saved, {}, make_find_origins(source)(saved))
    wanted = select_saved_state(restorable_state(target))
    with Checkpoints(folder, CheckpointPolicy()) as checkpoints:
        restored = checkpoints.restore(wanted, origins=make_find_origins(target)(wanted))
    assert restored is not None
    for got, want in zip(jax.tree.leaves(restored.state), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding
    return restored.state


PIPELINES = {
    "one device": ({"data": 1}, None),
    "filled up": ({"pipeline": 4}, Partition(num_stages=4, counts=(1, 2, 1, 1))),
    "interleaved": ({"pipeline": 2, "fsdp": 2}, Partition(num_stages=2, num_chunks=2, counts=(1, 2, 1, 1))),
}


V = ({"pipeline": 2}, Partition(num_stages=2, num_chunks=2, placement="v", counts=(1, 2, 1, 1)))
PAIRS = [*itertools.product(PIPELINES, PIPELINES), *(("V", name) for name in PIPELINES)]
PAIRS += [("one device", "V"), ("interleaved", "V")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_any_pipeline_reads_what_any_other_saved(source, target, tmp_path):
    before, after = (placed(*{**PIPELINES, "V": V}[name]) for name in (source, target))
    found = moved(tmp_path, before[0], with_moments(*before), after[0])
    expected = select_saved_state(with_moments(*after))
    # rows of padding are no blocks; they are zeros
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_factored_moments_are_moved_by_blocks_too(tmp_path):
    factored = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    uneven, even = Partition(num_stages=2, counts=(3, 2)), Partition(num_stages=1, counts=(5,))
    placement, state = placed({"pipeline": 2}, uneven, factored)
    # rows that are told apart, as the mesh has them
    number = jnp.asarray(uneven.stored_blocks, jnp.float32)
    opt_state = jax.tree.map(
        lambda x: x + number.reshape(-1, *[1] * (x.ndim - 1)) if x.shape[:1] == (6,) else x, state.opt_state
    )
    one, begun = placed({"data": 1}, None, factored)
    found = moved(tmp_path, placement, state._replace(opt_state=opt_state), one)
    assert even.is_plain
    changed = 0
    for (path, x), y in zip(
        jax.tree.leaves_with_path(found.opt_state), jax.tree.leaves(begun.opt_state), strict=True
    ):
        if x.shape[:1] == (5,):
            changed += 1
            difference = np.asarray(x - y).reshape(5, -1)
            np.testing.assert_allclose(difference, np.broadcast_to(np.arange(5.0)[:, None], difference.shape))
        else:
            np.testing.assert_array_equal(x, y, err_msg=path_text(path))
    assert changed == 4  # a row and a column of each of the two stacked parameters


def test_the_sample_sees_blocks_in_the_models_order():
    placement, state = placed(*PIPELINES["filled up"])
    _, one = placed({"data": 1})
    jax.tree.map(np.testing.assert_array_equal, restore_block_order(placement, state.params), one.params)


def own_moments(num_replicas):
    """An optimizer state for each replica: that of replica r is r everywhere."""
    combine = Synchronisation(by="adasum", on="deltas")
    placement, state = placed({"data": num_replicas}, None, OPTIMIZER, combine)

    def numbered(x):
        number = jnp.arange(num_replicas, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        return jnp.zeros_like(x) + number

    opt_state = jax.tree.map(numbered, state.opt_state)
    return placement, jax.device_put(state._replace(opt_state=opt_state), placement.state)


def test_replicas_of_a_pipeline_save_their_optimizers_in_the_models_order(tmp_path):
    combine = Synchronisation(by="adasum", on="deltas")
    stages = Partition(num_stages=2, counts=(2, 3))
    staged, state = placed({"data": 2, "pipeline": 2}, stages, OPTIMIZER, combine)
    whole, _ = placed({"data": 2}, None, OPTIMIZER, combine)

    def numbered(path, x):
        if x.ndim < 3:
            return x
        # replica r has 10 r + the number of the block
        blocks = np.asarray(stages.stored_blocks).reshape(1, -1, *[1] * (x.ndim - 2))
        own = 10 * np.arange(2).reshape(2, *[1] * (x.ndim - 1))
        return jnp.where(blocks >= 0, own + blocks, 0).astype(x.dtype) + jnp.zeros_like(x)

    blocks = lambda tree: {**tree, "blocks": jax.tree.map_with_path(numbered, tree["blocks"])}  # noqa: E731
    adam, *rest = state.opt_state
    opt_state = (adam._replace(mu=blocks(adam.mu)), *rest)
    state = jax.device_put(state._replace(opt_state=opt_state), staged.state)
    found = moved(tmp_path / "whole", staged, state, whole)
    for x in jax.tree.leaves(found.opt_state[0].mu["blocks"]):
        assert (np.asarray(x) == (10 * np.arange(2)[:, None] + np.arange(5))[..., None, None]).all()
    again = moved(tmp_path / "again", whole, found, staged)
    jax.tree.map(np.testing.assert_array_equal, again.opt_state, state.opt_state)


@pytest.mark.parametrize(
    "num_after", [1, 3, 8, *(pytest.param(number, marks=pytest.mark.full) for number in (2, 4))]
)
def test_replicas_take_over_optimizers_by_their_number_modulo(num_after, tmp_path):
    before, state = own_moments(3)
    after, _ = own_moments(num_after)
    found = moved(tmp_path, before, state, after)
    for x in jax.tree.leaves(found.opt_state):
        for replica in range(num_after):
            assert (np.asarray(x[replica]) == replica % 3).all()


def test_one_optimizer_of_all_becomes_that_of_each_and_back(tmp_path):
    common, state = placed({"data": 2})
    state = with_moments(common, state)
    own, _ = own_moments(4)
    found = moved(tmp_path / "out", common, state, own)
    for x, y in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(state.opt_state), strict=True):
        np.testing.assert_array_equal(x, np.broadcast_to(y, (4, *y.shape)))
    own, state = own_moments(3)
    found = moved(tmp_path / "back", own, state, common)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(found.opt_state))


def test_islands_save_what_each_has_and_any_number_of_them_reads_it(tmp_path):
    """Three islands with an optimizer each: the first saves what all have in common."""
    placement, state = placed({"data": 2})
    for island in (2, 1, 0):
        opt_state = jax.tree.map(lambda x: jnp.full_like(x, island), state.opt_state)  # noqa: B023
        own = select_saved_state(state._replace(opt_state=opt_state), own=island > 0)
        of = make_find_origins(placement, None, (island, 3), own_optimizers=True)
        with Checkpoints(tmp_path, CheckpointPolicy(), WriterPart(island, 3)) as checkpoints:
            checkpoints.save(4, own, {"island": island}, of(own))
            assert checkpoints.discover().step is None or island == 0
    with Checkpoints(tmp_path, CheckpointPolicy(), WriterPart(0, 3)) as checkpoints:
        chosen = checkpoints.discover()
        assert (chosen.step, chosen.num_parts, chosen.extra) == (4, 3, {"island": 0})
        reader = chosen.reader(checkpoints.folders)
    for replica in range(5):
        wanted = restorable_state(placement)
        where = make_find_origins(placement, None, (replica, 5), own_optimizers=True)(wanted)
        leaves = {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(wanted)}
        found = restore_arrays(reader, leaves, where)
        assert (np.asarray(found["opt_state/0/count"]) == replica % 3).all()
        table = next(path for path in found if path.startswith("params/embed"))
        assert (np.asarray(found[table]) == np.asarray(leaves_of(state)[table])).all()
        moments = [path for path in found if path.startswith("opt_state/0/mu/")]
        assert moments
        assert all((np.asarray(found[path]) == replica % 3).all() for path in moments)


def test_islands_with_pipelines_and_optimizers_of_their_own_find_both(tmp_path):
    """Stored order and whose it is: moments of island 1, in a pipeline that stores blocks otherwise."""
    stored, state = placed(*PIPELINES["interleaved"])
    state = with_moments(stored, state)
    for island in (1, 0):
        opt_state = jax.tree.map(lambda x: x * (island + 1), state.opt_state)  # noqa: B023
        own = select_saved_state(state._replace(opt_state=opt_state), own=island > 0)
        with Checkpoints(tmp_path, CheckpointPolicy(), WriterPart(island, 2)) as checkpoints:
            checkpoints.save(
                4, own, {}, make_find_origins(stored, None, (island, 2), own_optimizers=True)(own)
            )
    one, expected = placed({"data": 1})
    expected = leaves_of(with_moments(one, expected).opt_state[0].mu)
    with Checkpoints(tmp_path, CheckpointPolicy(), WriterPart(0, 2)) as checkpoints:
        reader = checkpoints.discover().reader(checkpoints.folders)
    for island in (0, 1):
        wanted = select_saved_state(restorable_state(one), own=True)
        where = make_find_origins(one, None, (island, 2), own_optimizers=True)(wanted)
        found = restore_arrays(reader, leaves_of(wanted), where, Allow(unused=("*",)))
        for path, x in expected.items():
            np.testing.assert_array_equal(found[f"opt_state/0/mu/{path}"], x * (island + 1), err_msg=path)


def leaves_of(state):
    return {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}


def test_what_is_whole_is_not_noted():
    placement, state = placed({"data": 2})
    assert make_find_origins(placement)(state) == {}
    assert ArrayOrigin() == COMMON
