"""Operators with shardings of their own: trained, resumed onto another strategy, refused before a step."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.train_step.placement import restorable_state, state_specs
from shardtrain.trainer.setup import make_setup

UP, DOWN = "blocks/up:dot_general", "blocks/down:dot_general"
FIRST = {
    UP: {"data": "0", "fsdp": "2", "tensor": "2"},
    DOWN: {"data": "0", "fsdp": "sum0"},
    "blocks/up": {"fsdp": "2", "tensor": "1"},
    "embedding": {"tensor": "0"},
}
SECOND = {UP: {"fsdp": "sum0", "tensor": "1"}, DOWN: {"tensor": "2"}, "blocks/up": {"tensor": "2"}}
MODEL, OPTIMIZER = st.from_nnx(TinyConfig(num_layers=2)), optax.adamw(1e-2)
TOKENS = np.random.default_rng(0).integers(0, 256, (16, 9)).astype(np.int32)
BATCH = {"tokens": TOKENS, "weights": np.ones(16, np.float32)}


def lay(operators, **mesh):
    """The placement of a layout and two functions: of its first state, and of a step."""
    layout = st.Layout(mesh=mesh, operators=operators)
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    placement = st.make_placement(MODEL, OPTIMIZER, layout, st.make_mesh(layout, devices))
    step = st.make_step(MODEL, st.next_token_loss, OPTIMIZER, placement)
    return placement, lambda state: step(state, st.place(BATCH, placement.mesh, layout.batch_axes))


def test_another_strategy_restores_the_same_arrays_and_goes_on_with_the_same_losses(tmp_path):
    losses, placement, saved = {}, lay({}, data=1)[0], None
    for name, operators, mesh in (
        ("one", {}, {"data": 1}),
        ("cube", FIRST, {"data": 2, "fsdp": 2, "tensor": 2}),
    ):
        placement, step = lay(operators, **mesh)
        state, _ = step(st.init_state(MODEL, OPTIMIZER, placement, seed=0))
        saved = jax.device_get(state)
        with Checkpoints(tmp_path / name, CheckpointPolicy()) as checkpoints:
            checkpoints.save(1, state, {})
            checkpoints.wait()
        losses[name] = float(step(state)[1]["loss_sum"])
    # each device has a part of what the operator reads
    assert placement.state.params["blocks"]["up"].spec == jax.sharding.PartitionSpec(
        None, ("tensor",), ("fsdp",)
    )
    placement, step = lay(SECOND, fsdp=4, tensor=2)
    with Checkpoints(tmp_path / "cube", CheckpointPolicy()) as checkpoints:
        found = checkpoints.restore(restorable_state(placement))
    assert found is not None
    restored = found.state
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), saved)
    losses["other"] = float(step(restored)[1]["loss_sum"])
    np.testing.assert_allclose(list(losses.values()), losses["one"], rtol=1e-5)


def test_the_check_has_rows_for_each_device_over_which_operators_may_split_them(tmp_path, capsys):
    layout = st.Layout(mesh={"data": 2, "tensor": 4}, operators={UP: {"tensor": "2"}})
    run = st.Run(model=TinyConfig(), data=st.Text(seq=8), batch=16, strategy=st.Strategy(layout=layout))
    st.train(replace(run, steps=1, run_dir=tmp_path, evaluate_batches=None))
    assert "layout checked: the gradients of 16 rows equal" in capsys.readouterr().out


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.normal(0.5), ("embed", "mlp"))
        whole = nnx.with_partitioning(nnx.initializers.zeros_init(), (None,))
        ways = {"kernel_init": split, "bias_init": whole, "rngs": rngs}
        self.first, self.head = nnx.Linear(4, 4, **ways), nnx.Linear(4, 4, **ways)
        self.loop = nnx.RNN(nnx.GRUCell(4, 4, recurrent_kernel_init=split, **ways), rngs=rngs)

    def __call__(self, x):
        hidden: Any = self.loop(jnp.tanh(self.first(x)))
        return self.head(hidden)


@pytest.mark.parametrize(
    "operators", [{"head": ("data", "tensor")}, {"first": ("data", "fsdp", "tensor"), "head": ("data",)}]
)
def test_a_loop_without_an_entry_has_the_rows_of_the_layout(operators):
    """XLA computes the loop wrong if operators around it change how its rows are split."""
    model, rows = st.from_nnx(Recurrent), np.random.default_rng(0).standard_normal((16, 12, 4), np.float32)

    def loss(apply, batch):
        return (apply(batch["x"]) ** 2).mean((1, 2)).sum(), jnp.float32(len(batch["x"]))

    table = {f"{name}/kernel:dot_general": dict.fromkeys(axes, "0") for name, axes in operators.items()}
    found = []
    for layout in (
        st.Layout(mesh={"data": 1}),
        st.Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}, operators=table),
    ):
        mesh = st.make_mesh(layout, jax.devices()[: int(np.prod(list(layout.mesh.values())))])
        placement = st.make_placement(model, OPTIMIZER, layout, mesh)
        step, state = (
            st.make_step(model, loss, OPTIMIZER, placement),
            st.init_state(model, OPTIMIZER, placement, seed=0),
        )
        losses = []
        for _ in range(2):
            state, metrics = step(state, st.place({"x": rows}, mesh, layout.batch_axes))
            losses.append(float(metrics["loss_sum"]))
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_what_does_not_fit_is_refused_before_anything_compiles():
    layout = st.Layout(mesh={"fsdp": 2, "tensor": 4}, operators={f"{UP}[0-2]": {"tensor": "2"}})
    run = st.Run(model=TinyConfig(), data=st.Text(seq=8), batch=16, strategy=st.Strategy(layout=layout))
    with pytest.raises(ValueError, match="has blocks up to 2, and a scan computes 1; use 0 to 0"):
        make_setup(run, microbatch=BATCH)
    with pytest.raises(ValueError, match=r"no parameter 'blocks/upp' \(did you mean 'blocks/up'"):
        lay({"blocks/upp": {"tensor": "1"}}, tensor=4)
    with pytest.raises(
        ValueError, match="blocks/up: dim '2' of size 16 cannot be split over axes \\['fsdp', 'ten"
    ):
        lay({"blocks/up": {"fsdp": "2", "tensor": "2"}}, fsdp=3, tensor=2)
    with pytest.raises(ValueError, match="axis 'tensr' \\(did you mean 'tensor'"):
        st.Layout(operators={UP: {"tensr": "0"}})
    with pytest.raises(ValueError, match=r"is 3; write axes and dims, \{tensor = '1'\}"):
        st.Layout(operators={UP: 3})  # pyright: ignore[reportArgumentType]
    pipelined = replace(layout, mesh={"pipeline": 2})
    local = Synchronisation(by="adasum", on="gradients")
    mesh = st.make_mesh(st.Layout(mesh={"data": 2}), jax.devices()[:2])
    with pytest.raises(ValueError, match="is split over data, over which 'adasum' combines replicas"):
        st.make_placement(MODEL, OPTIMIZER, st.Layout(operators=FIRST), mesh, synchronisation=local)

    with pytest.raises(ValueError, match="pipeline is 2, and the stages of a mesh run one program"):
        state_specs(MODEL, OPTIMIZER, pipelined, axis_sizes(pipelined.mesh, 2))
