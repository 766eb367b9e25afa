"""A parameter that the loss does not depend on is reported, and decayed or not as the run asks."""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fine_tuning import Numbers, initial
from flax import nnx
from quiet_training import train_quietly
from tiny_language_model import SIZES, TinyConfig, TinyModel

from shardtrain.axes import EMBED, MLP
from shardtrain.islands.options import Across
from shardtrain.models.layers import normal
from shardtrain.optim.optimizer import OPTIMIZERS, Optimizer, make_optimizer
from shardtrain.optim.schedules import Schedule
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run
from shardtrain.trainer.setup import format_unused, make_setup
from shardtrain.trainer.strategy import Strategy

RATE, DECAY, STEPS = 0.1, 0.5, 2


@dataclass(frozen=True, kw_only=True)
class SpareConfig(TinyConfig):
    """The tiny model with a matrix that nothing reads."""

    def __call__(self, rngs: nnx.Rngs) -> TinyModel:
        model = TinyModel(self, rngs)
        sizes = dict(zip(SIZES, (self.vocab, self.embed, self.mlp, self.num_layers), strict=True))
        model.spare = normal((EMBED, MLP), sizes=sizes, std=0.1, rngs=rngs)  # type: ignore[attr-defined]
        return model


def make_run(strategy: Strategy, folder: Path | None = None, decay_unused: bool = True) -> Run:
    rate = Schedule(name="constant", peak=RATE)
    return Run(
        model=SpareConfig(num_layers=2),
        data=Numbers(),
        optimizer=Optimizer(learning_rate=rate, weight_decay=DECAY, decay_unused=decay_unused),
        strategy=strategy,
        batch=8,
        steps=STEPS,
        run_dir=folder,
    )


def test_a_run_reports_it_and_decays_it_or_not(tmp_path):
    pipeline = Strategy(layout=Layout(mesh={"pipeline": 2, "data": 4}), accumulate=2)
    run = make_run(pipeline, tmp_path, decay_unused=False)
    trained, printed, _ = train_quietly(run)
    assert "1 parameter cannot change the loss, its gradient is always zero: spare; not decayed" in printed
    np.testing.assert_array_equal(trained.state.params["spare"], initial(run)["spare"])


def test_a_stage_leaves_its_unused_parameters_as_they_are():
    strategy = Strategy(layout=Layout(mesh={"data": -1}), across=Across(axis="pipeline"))
    microbatch = {
        "tokens": np.zeros((8, 9), np.int32),
        "weights": np.ones(8, np.float32),
    }
    setup = make_setup(make_run(strategy, decay_unused=False), 2, microbatch, 0)
    assert setup.unused == ("spare",)
    params = setup.model.init(jax.random.key(0))[0]
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = setup.optimizer.update(zeros, setup.optimizer.init(params), params)
    assert not updates["spare"].any()  # type: ignore[index]
    assert updates["embedding"].all()  # type: ignore[index]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_leaves_it_as_it_is_and_keeps_the_same_state(name):
    dims = {"spare": ("embed", "mlp"), "used": ("embed", "mlp")}
    params = {path: jnp.ones((4, 8)) for path in dims}
    grads = {"spare": jnp.zeros((4, 8)), "used": jnp.arange(32.0).reshape(4, 8)}
    found = []
    for decay_unused in (True, False):
        rate = Schedule(name="constant", peak=RATE)
        asked = Optimizer(name=name, learning_rate=rate, weight_decay=DECAY, decay_unused=decay_unused)
        optimizer, _ = make_optimizer(asked, 10, dims, ("spare",))
        found.append(optimizer.update(grads, optimizer.init(params), params))
    (decayed, state), (kept, same_state) = found
    assert (decayed["spare"] < 0).all()
    assert not kept["spare"].any()
    np.testing.assert_array_equal(decayed["used"], kept["used"])
    jax.tree.map(np.testing.assert_array_equal, state, same_state)


def test_of_many_the_first_are_named():
    text = format_unused([f"layer{i}" for i in range(10)], Optimizer(weight_decay=0.0))
    assert text.startswith("10 parameters cannot change the loss, their gradient is always zero: layer0, ")
    assert text.endswith("layer7, ...")
    decayed = format_unused(["a"], Optimizer(weight_decay=0.1))
    assert decayed == (
        "1 parameter cannot change the loss, its gradient is always zero: a; weight decay shrinks matrices"
        " all the same (not with decay_unused=False of the optimizer)"
    )
