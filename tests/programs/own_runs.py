"""Runs of models and losses as people write them, right and wrong ones, for `test_own_runs.py`."""

# the mistakes are meant
# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalSubscript=false
# pyright: reportUndefinedVariable=false

import random
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec

import shardtrain as st


class Rows:
    """Points and what to find of them."""

    def __init__(self, num_rows=24):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        draws = np.random.default_rng(index)
        return {"x": draws.normal(size=4).astype(np.float32), "y": np.float32(index % 3)}


class Data:
    def __init__(self, source=None, heldout=None):
        self.source, self.of_evaluation = source or Rows(), heldout

    def train(self, folder):
        return self.source

    def heldout(self, folder):
        return self.of_evaluation


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def weigh(losses, batch):
    return (losses * batch["weights"]).sum(), batch["weights"].sum()


def squares(apply, batch, *arguments, **options):
    return weigh((apply(batch["x"], *arguments, **options)[:, 0] - batch["y"]) ** 2, batch)


def make(model=Net, loss=squares, source=None, heldout=None, **options):
    optimizer = optax.sgd(0.05)
    given = {"batch": 8, "steps": 2, "log_every": 1, "optimizer": optimizer, **options}
    return st.Run(model=model, data=Data(source, heldout), loss=loss, **given)


# -- losses and models that draw


class Noisy(Net):
    """As the VAE of Flax's examples: the key is an argument."""

    def __call__(self, x, key):
        return super().__call__(x + jax.random.normal(key, x.shape))


def own_key():
    return make(Noisy, lambda apply, batch: squares(apply, batch, jax.random.key(0)))


def step_key():
    return make(Noisy, lambda apply, batch: squares(apply, batch, apply.key), heldout=Rows(12))


def step_key_with_metrics():
    loss = st.add_metrics(step_key().loss, size=lambda out, batch: (out.sum(), batch["weights"].sum()))
    return make(Noisy, loss)


def key_in_call():
    class Own(Net):
        def __call__(self, x):
            return super().__call__(x + jax.random.uniform(jax.random.PRNGKey(3), x.shape))

    return make(Own)


def key_of_rows():
    def loss(apply, batch):
        keys = jax.random.split(jax.random.key(1), len(batch["x"]))
        return squares(apply, {**batch, "x": jax.vmap(jax.random.normal, (0, None))(keys, (4,))})

    return make(loss=loss)


def key_from_samples():
    """What the samples have is the same wherever they are."""

    def loss(apply, batch):
        keys = jax.vmap(jax.random.key)(batch["y"].astype(int))
        return squares(apply, {**batch, "x": jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)})

    return make(loss=loss)


def key_as_state():
    class Own(Net):
        def __init__(self, rngs):
            super().__init__(rngs=rngs)
            self.key = nnx.Variable(jax.random.key_data(jax.random.key(0)))

        def __call__(self, x):
            def body(x, key):
                return x + jax.random.normal(key, x.shape), None

            keys = jax.random.split(jax.random.wrap_key_data(self.key[...]), 3)
            return super().__call__(jax.lax.scan(body, x, keys)[0])

    return make(Own)


def key_as_attribute():
    class Own(Net):
        def __init__(self, rngs):
            super().__init__(rngs=rngs)
            self.key = rngs.params()

    return make(Own)


def fixed_features():
    """A draw that no row has is a constant."""

    def loss(apply, batch):
        return squares(apply, {**batch, "x": batch["x"] @ jax.random.normal(jax.random.key(0), (4, 4))})

    return make(loss=loss)


def numpy_noise():
    return make(
        loss=lambda apply, batch: squares(apply, {**batch, "x": batch["x"] + np.random.normal(size=4)})
    )


@jax.jit
def scale_at_random(x):
    return x * random.random()


def python_noise():
    class Own(Net):
        @nnx.jit
        def __call__(self, x):
            return scale_at_random(super().__call__(x))

    return make(Own)


def numpy_rows():
    def loss(apply, batch):
        noise = np.random.default_rng(0).normal(size=batch["x"].shape)
        return squares(apply, {**batch, "x": batch["x"] + noise.astype(np.float32)})

    return make(loss=loss)


# -- losses


def broadcast():
    return make(loss=lambda apply, batch: weigh((apply(batch["x"]) - batch["y"]) ** 2, batch))


def without_weights():
    def loss(apply, batch):
        losses = (apply(batch["x"])[:, 0] - batch["y"]) ** 2
        return losses.sum(), len(losses)

    return make(loss=loss)


def count_of_none():
    return make(loss=lambda apply, batch: (squares(apply, batch)[0], batch["weights"].sum() * 0))


def whole_numbers():
    def loss(apply, batch):
        return (apply(batch["x"])[:, 0] > batch["y"]).sum(), batch["weights"].sum()

    return make(loss=loss)


# -- data and options


def other_samples():
    class Changing(Rows):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "x": np.random.normal(size=4).astype(np.float32)}

    return make(source=Changing())


def few_samples():
    return make(source=Rows(5))


class Absent(Rows):
    """Each sample has a list that is empty, such as boxes of an image without any."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "boxes": np.zeros((0, 4), np.float32)}


def array_without_elements():
    return make(source=Absent())


def unknown_field():
    return make(bacth=3)


def unknown_field_of_a_part():
    return make(checkpoints=st.CheckpointPolicy(evry_steps=3))


def wrong_name():
    return undefined_thing  # noqa: F821


def optimizer_without_name():
    return make(optimizer=optax.sgd(lambda step: undefined_rate * step))  # noqa: F821


def optimizer_of_other_shapes():
    update = optax.stateless(lambda updates, params: jax.tree.map(jnp.sum, updates))
    return make(optimizer=update)


def evaluated_without_name():
    return make(evaluate_with=lambda opt_state, params: undefined_average)  # noqa: F821


# -- modules


def streams_kept():
    class Own(Net):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs=rngs)
            self.rngs, self.drop = rngs, nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return super().__call__(self.drop(x) + jax.random.normal(self.rngs.noise(), x.shape))

    return make(Own)


def arrays_kept():
    class Own(Net):
        def __init__(self, rngs):
            super().__init__(rngs=rngs)
            self.scale, self.shift = jnp.full(4, 0.3), np.arange(4)
            self.tables = nnx.List([rngs.normal((4,)), jnp.arange(4) > 2])

        def __call__(self, x):
            first, mask = self.tables
            return super().__call__(jnp.where(mask, x * self.scale + self.shift, first))

    return make(Own)


def no_streams():
    class Own(nnx.Module):
        def __init__(self, start=0.0):
            self.w = nnx.Param(jnp.full((4, 1), start))

        def __call__(self, x):
            return x @ self.w

    return make(Own)


class Sized(Net):
    def __init__(self, width, *, rngs):
        super().__init__(rngs=rngs)


def more_arguments():
    return make(Sized)


def more_arguments_given():
    return make(partial(Sized, 3))


def no_arguments():
    return make(lambda: Net(rngs=nnx.Rngs(0)))


def instance():
    return make(Net(rngs=nnx.Rngs(0)))


def linen_class():
    class Own(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)

    return make(Own)


def no_module():
    return make(lambda rngs: (Net(rngs=rngs), None))


def no_call():
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, 1, rngs=rngs)

    return make(Own)


def broken_constructor():
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(4, rngs=rngs)

    return make(Own)


def broken_call():
    class Own(Net):
        def __call__(self, x):
            return super().__call__(x.reshape(-1, 3))

    return make(Own)


def whole_number_parameters():
    class Own(Net):
        def __init__(self, rngs):
            super().__init__(rngs=rngs)
            self.table = nnx.Param(jnp.arange(4))

    return make(Own)


def sets_a_parameter():
    class Own(Net):
        def __call__(self, x):
            self.up.bias[...] = self.up.bias[...] * 0.9
            return super().__call__(x)

    return make(Own)


def spectral_norm():
    class Own(Net):
        def __init__(self, rngs):
            super().__init__(rngs=rngs)
            self.up = nnx.SpectralNorm(self.up, rngs=rngs)

    return make(Own)


class Means(Net):
    """Batch statistics with kept dims, as (1, 4) after the first update."""

    def __init__(self, rngs, shape):
        super().__init__(rngs=rngs)
        self.mean = nnx.BatchStat(jnp.zeros(shape))

    def __call__(self, x):
        self.mean.set_value(0.9 * self.mean[...] + 0.1 * x.mean(0, keepdims=True))
        return super().__call__(x - jax.lax.stop_gradient(self.mean[...]))


def kept_dims():
    return make(lambda rngs: Means(rngs, (4,)))


def grown_state():
    return make(lambda rngs: Means(rngs, ()))


class Options(Net):
    def __call__(self, x, *, scale, mode="none", flip=False):
        return super().__call__(-x if flip else x) * scale * (mode == "all")


def options_by_name():
    options = {"scale": 0.5, "mode": "all", "flip": True}
    return make(Options, lambda apply, batch: squares(apply, batch, **options))


def options_by_place():
    class Own(Options):
        def __call__(self, x, scale, mode, flip):
            return super().__call__(x, scale=scale, mode=mode, flip=flip)

    return make(Own, lambda apply, batch: squares(apply, batch, 0.5, "all", True))


def key_by_annotation():
    class Own(Noisy):
        def __call__(self, x, rngs: jax.Array):
            return super().__call__(x, rngs)

    return make(Own)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, z_rng, *, scale):
        return nn.Dense(1)(x + scale * jax.random.normal(z_rng, x.shape))


def linen_key():
    model = st.from_linen(Linen(), np.zeros((1, 4)), jax.random.key(0), options={"scale": 0.5})
    return make(model, lambda apply, batch: squares(apply, batch, apply.key, scale=0.5))


def shardings_of_outputs():
    class Own(Net):
        def __call__(self, x):
            x = nnx.relu(self.up(x, out_sharding=PartitionSpec("data", "tensor")))
            return self.down(x, PartitionSpec("data", None))

    return make(Own)


def explicit_shardings():
    class Own(Net):
        def __call__(self, x):
            return super().__call__(jnp.matmul(x, jnp.eye(4), out_sharding=PartitionSpec("data", None)))

    return make(Own)
