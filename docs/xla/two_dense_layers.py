"""The gradient of two dense layers on a 2 x 2 x 2 mesh: by plain `jax.jit`, and by a step of shardtrain.

    uv run python docs/xla/two_dense_layers.py

Kernels are sharded over (fsdp, tensor), rows over (data, fsdp), and nothing else is constrained. Prints the
largest difference of each kernel's gradient from one device, relative to its largest element.
"""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import shardtrain as st

SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
random = np.random.default_rng(0)
KERNELS = [jnp.array(random.normal(size=(16, 16)) / 4, jnp.float32) for _ in range(2)]
ROWS = random.normal(size=(16, 16)).astype(np.float32)


class Layers(nnx.Module):
    """Two dense layers whose kernels name their dims."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernels = nnx.List([nnx.Param(kernel, out_sharding=("embed", "mlp")) for kernel in KERNELS])

    def __call__(self, x):
        for kernel in self.kernels:
            x = jnp.tanh(x @ kernel[...])
        return x


def squares(y):
    return jnp.sum((y - 1) ** 2) / y.size


def plain(kernels, x):
    for kernel in kernels:
        x = jnp.tanh(x @ kernel)
    return squares(x)


def by_jit() -> list[jax.Array]:
    """Gradients by `jax.jit` with shardings of inputs and outputs alone."""
    mesh = st.make_mesh(st.Layout(mesh=SIZES))
    spread = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    rows = jax.device_put(ROWS, NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    kernels = [jax.device_put(kernel, spread) for kernel in KERNELS]
    return jax.jit(jax.grad(plain), out_shardings=[spread, spread])(kernels, rows)


def by_shardtrain() -> list[jax.Array]:
    """Gradients by a step of SGD with a learning rate of 1: the old kernels minus the new ones."""
    layout = st.Layout(mesh=SIZES)
    mesh, model, optimizer = st.make_mesh(layout), st.from_nnx(Layers), optax.sgd(1.0)
    placement = st.make_placement(model, optimizer, layout, mesh)

    def loss(apply, batch):
        errors = jnp.mean((apply(batch["x"]) - 1) ** 2, axis=1)
        return jnp.sum(errors * batch["weights"]), batch["weights"].sum()

    step = st.make_step(model, loss, optimizer, placement)
    state = st.init_state(model, optimizer, placement, seed=0)
    batch = {"x": ROWS, "weights": np.ones(len(ROWS), np.float32)}
    state, _ = step(state, st.place(batch, mesh, layout.batch_axes))
    return [
        old - jax.device_get(new) for old, new in zip(KERNELS, jax.tree.leaves(state.params), strict=True)
    ]


print(f"jax {jax.__version__}")
EXPECTED = jax.grad(plain)(KERNELS, ROWS)
for name, found in (("plain jax.jit", by_jit()), ("shardtrain   ", by_shardtrain())):
    off = [float(abs(np.asarray(a) - b).max() / abs(b).max()) for a, b in zip(found, EXPECTED, strict=True)]
    print(
        f"{name} on 2 x 2 x 2 devices: gradients off by {off[0]:.0e} and {off[1]:.0e} (jax {jax.__version__})"
    )
