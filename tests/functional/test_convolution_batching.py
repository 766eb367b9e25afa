"""Convolutions of one pixel, and their gradients, on replicas that are devices of a mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from shardtrain import init_state, make_gradients, make_mesh, make_placement, place
from shardtrain.functional.convolution_batching import products_for_convolutions
from shardtrain.functional.loss import classification_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.sharding.layout import Layout

RNG = np.random.default_rng(0)


def loss(padding, stride, groups, kernel, images):
    dims = "HWD"[: kernel.ndim - 2]
    y = jax.lax.conv_general_dilated(
        images, kernel, (stride,) * len(dims), padding, feature_group_count=groups,
        dimension_numbers=(f"N{dims}C", f"{dims}IO", f"N{dims}C"),
    )  # fmt: skip
    return jnp.square(y).mean()


CASES = {
    "one pixel": ((6, 6, 8), (1, 1, 8, 12), "SAME", 1, 1),
    "one pixel of images of one": ((1, 1, 8), (1, 1, 8, 12), "SAME", 1, 1),
    "one pixel with strides": ((6, 6, 8), (1, 1, 8, 12), "SAME", 2, 1),
    "one pixel in groups": ((6, 6, 8), (1, 1, 4, 12), "SAME", 1, 2),
    "the whole image": ((6, 6, 8), (6, 6, 8, 12), "VALID", 1, 1),
    "one position of a sequence": ((6, 8), (1, 8, 12), "SAME", 1, 1),
    "no product": ((6, 6, 8), (3, 3, 8, 12), "SAME", 1, 1),
}
"""Name -> an image, a kernel, padding, stride, groups of features."""


# a parameter is the same on all replicas, and after local steps each has its own
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("case", CASES)
def test_each_replica_gets_its_own_gradient(case, own):
    image, kernel, *options = CASES[case]
    images = RNG.normal(size=(2, 4, *image)).astype(np.float32)
    kernels = np.stack([RNG.normal(size=kernel).astype(np.float32)] * 2)
    kernels[1] *= 2 if own else 1
    compute = jax.value_and_grad(partial(loss, *options), argnums=(0, 1))
    alone = [compute(kernels[i], images[i]) for i in range(2)]
    expected = jax.tree.map(lambda *parts: np.stack(parts), *alone)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    images = jax.device_put(images, sharding)
    given = jax.device_put(kernels, sharding) if own else kernels[0]
    replicas = jax.vmap(compute, (0 if own else None, 0), spmd_axis_name="data")
    with products_for_convolutions():
        found = jax.jit(replicas, out_shardings=sharding)(given, images)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, expected)


class Pointwise(nnx.Module):
    """Somebody else's model: Flax's own convolutions."""

    def __init__(self, rngs):
        self.wide = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.mix = nnx.Conv(8, 8, (1, 1), rngs=rngs)

    def __call__(self, images):
        return self.mix(nnx.relu(self.wide(images))).mean((1, 2))


def test_gradients_of_a_mesh_are_those_of_one_device():
    rows = {
        "image": RNG.normal(size=(8, 4, 4, 3)).astype(np.float32),
        "label": RNG.integers(0, 8, 8, np.int32),
        "weights": np.ones(8, np.float32),
    }
    model, found = from_nnx(Pointwise), []
    for size in (1, 2):
        layout = Layout(mesh={"data": size}, unnamed="replicate")
        mesh = make_mesh(layout, jax.devices()[:size])
        placement = make_placement(model, optax.identity(), layout, mesh)
        state = init_state(model, optax.identity(), placement, 7)
        gradients = jax.jit(make_gradients(model, classification_loss, placement))
        batch = place(rows, mesh, layout.batch_axes, 2)
        key = step_key(state.seed, jnp.int32(0))
        found.append(jax.device_get(gradients(state.params, state.model_state, key, batch).grads))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), *found)
