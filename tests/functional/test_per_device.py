"""Convolutions and FFTs of models that constrain nothing: losses and gradients of one device on any mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from shardtrain import init_state, make_gradients, make_mesh, make_placement, place
from shardtrain.functional.activation_rules import activation_rules, noting
from shardtrain.functional.loss import classification_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.models.resnet import ResNetConfig
from shardtrain.pipeline.cuts import make_partition
from shardtrain.pipeline.options import Pipeline
from shardtrain.plan.compile import compile_step, describe_devices, figures
from shardtrain.sharding.layout import Layout

CUBE = {"data": 2, "fsdp": 2, "tensor": 2}


def mean_square(apply: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    y = apply(batch["x"])
    rows = jnp.square(y - 1).mean(tuple(range(1, y.ndim)))
    return (rows * batch["weights"]).sum(), batch["weights"].sum()


class Net(nnx.Module):
    """Layers, and how they are applied: one after another, by default."""

    def __init__(self, layers: Sequence[Any], apply: Callable[..., Any] | None = None):
        self.layers, self.apply = nnx.List(layers), apply

    def __call__(self, x):
        if self.apply is not None:
            return self.apply(self.layers, x)
        for layer in self.layers:
            x = jax.nn.silu(layer(x))
        return x


def layer(
    kind: Any,
    channels_in: int,
    channels_out: int,
    *size: Any,
    rngs: nnx.Rngs,
    named: bool = True,
    **options: Any,
):
    """A layer of Flax whose kernel and bias are named or not."""
    init, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros
    if named:
        window = () if not size else (None,) * len(size[0])
        init = nnx.with_partitioning(init, (*window, "embed", "mlp"))
        zeros = nnx.with_partitioning(zeros, ("mlp",))
    return kind(channels_in, channels_out, *size, kernel_init=init, bias_init=zeros, rngs=rngs, **options)


def pointwise(rngs):
    return Net([layer(nnx.Conv, 16, 16, (1, 1), rngs=rngs)])


def in_scan(rngs):
    def apply(layers, x):
        def body(x, _):
            # of a model that maps over examples itself, in a block that is computed again
            return x + jax.vmap(lambda one: jax.nn.silu(layers[0](one)))(x), None

        return jax.lax.scan(jax.checkpoint(body), x, None, length=2)[0]

    return Net([layer(nnx.Conv, 16, 16, (3, 3), rngs=rngs)], apply)


class Staged(nnx.Module):
    """Blocks with a depthwise convolution, which a pipeline inside a mesh can cut."""

    def __init__(self, rngs):
        self.stem = layer(nnx.Conv, 8, 16, (3,), rngs=rngs)
        block = lambda key: layer(nnx.Conv, 16, 16, (3,), feature_group_count=16, rngs=nnx.Rngs(key))  # noqa: E731
        keys = jax.random.split(rngs.params(), 2)
        self.blocks = nnx.vmap(block, transform_metadata={nnx.PARTITION_NAME: "layers"})(keys)
        self.head = layer(nnx.Linear, 16, 4, rngs=rngs)

    def first(self, x):
        return self.stem(x)

    def run(self, blocks, x, keys=None):
        return jax.lax.scan(lambda x, block: (x + jax.nn.silu(block(x)), None), x, blocks)[0]

    def last(self, x):
        return self.head(x)

    def __call__(self, x):
        return self.last(self.run(self.blocks, self.first(x)))


CASES: dict[str, tuple[Any, tuple[int, ...], dict[str, int], dict[str, Any]]] = {
    "one pixel, each replica its own gradient": (pointwise, (4, 4, 16), {"data": 2, "tensor": 2}, {}),
    "vmap, scan and remat": (in_scan, (4, 4, 16), CUBE, {}),
    "stages": (Staged, (6, 8), {"pipeline": 2, "data": 2, "tensor": 2}, {}),
}
"""Name -> model, shape of a row, mesh, options of the layout.

Without the rule numbers are wrong, or XLA ends the process; `fuzz/known_cases.txt` has other convolutions.
"""


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(case, assert_same):
    make, row, sizes, options = CASES[case]
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(16, *row)).astype(np.float32), "weights": np.ones(16, np.float32)}
    model, found = from_nnx(make), []
    for mesh_sizes in ({"data": 1}, sizes):
        layout = Layout(mesh=mesh_sizes, **options)
        mesh = make_mesh(layout, jax.devices()[: np.prod(list(mesh_sizes.values()))])
        stages = None
        if (num_stages := mesh_sizes.get("pipeline", 1)) > 1:
            microbatch = {name: x[:8] for name, x in rows.items()}
            stages = make_partition(model, Pipeline(), num_stages, mean_square, microbatch)
        placement = make_placement(model, optax.identity(), layout, mesh, stages=stages)
        state = init_state(model, optax.identity(), placement, 7)
        gradients = jax.jit(make_gradients(model, mean_square, placement))
        batch = place(rows, mesh, layout.batch_axes, 2)
        sums = gradients(state.params, state.model_state, step_key(state.seed, jnp.int32(0)), batch)
        found.append(jax.device_get((sums.loss_sum, sums.grads)))
    assert_same(found[1], found[0])


def test_a_run_says_where_devices_compute_the_same():
    mesh = make_mesh(Layout(mesh={"fsdp": 2, "context": 2}), jax.devices()[:4])
    notes: list[str] = []
    x, kernel = jnp.ones((4, 8, 2)), jnp.ones((3, 2, 2))
    with noting(notes.append), activation_rules(Layout().activation_rules, mesh):
        jax.make_jaxpr(
            lambda: jax.lax.conv_general_dilated(
                x, kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")
            )
        )()
    assert notes == ["conv_general_dilated: devices along context=2 each compute all of it"]


@pytest.mark.full
def test_no_more_is_sent_than_by_the_partitioner_where_it_is_right(monkeypatch):
    """Of a model that constrains its convolutions."""
    model = from_nnx(ResNetConfig(depth=11, filters=8, height=8, width=8, num_groups=4))
    layout = Layout(mesh={"fsdp": 2, "tensor": 2})
    rows = {
        "image": jax.ShapeDtypeStruct((16, 8, 8, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((16,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((16,), jnp.float32),
    }
    mesh = make_mesh(layout, describe_devices("cpu", 4))
    placement = make_placement(model, optax.identity(), layout, mesh)

    def sent_bytes():
        compiled = compile_step(model, classification_loss, optax.identity(), placement, rows, microbatches=1)
        found = figures(compiled, dict(mesh.shape)).collectives
        return sum(each.wire_bytes_per_device for each in found)

    per_device = sent_bytes()
    monkeypatch.delattr(jax.lax.conv_general_dilated_p, "bind")
    assert 0 < per_device <= 1.02 * sent_bytes()
