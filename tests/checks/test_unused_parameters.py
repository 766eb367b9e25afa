"""Parameters that cannot change the loss are found from the program alone, whatever their values are."""

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from tiny_language_model import TinyConfig

from shardtrain.checks.unused_parameters import find_unused_parameters
from shardtrain.functional.linen_model import from_linen
from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.functional.nnx_model import convert_model, from_nnx

IMAGES = {
    "image": jax.ShapeDtypeStruct((2, 4), jnp.float32),
    "label": jax.ShapeDtypeStruct((2,), jnp.int32),
    "weights": jax.ShapeDtypeStruct((2,), jnp.float32),
}
TOKENS = {
    "tokens": jax.ShapeDtypeStruct((2, 9), jnp.int32),
    "weights": jax.ShapeDtypeStruct((2,), jnp.float32),
}


@jax.custom_vjp
def halved(x):
    return x


halved.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


def matrix(*shape):
    return nnx.Param(jnp.ones(shape), out_sharding=(None,) * len(shape))


class Parts(nnx.Module):
    """A parameter for each way of being used, or not."""

    def __init__(self, rngs):
        self.used = matrix(4, 3)
        self.branch = matrix(4, 3)
        self.own_rule = matrix(4, 3)
        self.never = matrix(4, 3)
        self.stopped = matrix(4, 3)
        self.compared = matrix(4, 3)
        self.dropped = matrix(4, 3)
        self.layers = matrix(2, 3, 3)
        self.layers_unread = matrix(2, 3, 3)

    def __call__(self, image):
        x = image @ self.used[...]
        x = jax.lax.cond(x.sum() > 0, lambda x: x + image @ self.branch[...], lambda x: x, x)
        x = x + image @ halved(self.own_rule[...])
        x = x + image @ jax.lax.stop_gradient(self.stopped[...])
        x = x + (image @ self.compared[...] > 0)
        _ = image @ self.dropped[...]

        def layer(x, of_layer):
            weight, unread = of_layer
            return jnp.tanh(x @ weight), unread.sum()

        return jax.lax.scan(jax.checkpoint(layer), x, (self.layers[...], self.layers_unread[...]))[0]


def test_each_way_of_being_unused_is_found():
    found = find_unused_parameters(from_nnx(Parts), classification_loss, IMAGES)
    assert found == ("compared", "dropped", "layers_unread", "never", "stopped")


class Linen(nn.Module):
    """A dense layer whose output is thrown away, beside one that is used."""

    @nn.compact
    def __call__(self, image, train=False):
        named = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "classes"))
        nn.Dense(3, kernel_init=named, name="spare")(image)
        return nn.Dense(3, name="used")(nn.Dropout(0.5, deterministic=not train)(image))


def test_of_a_linen_model():
    model = from_linen(Linen(), jnp.zeros((2, 4)))
    assert find_unused_parameters(model, classification_loss, IMAGES) == ("spare/bias", "spare/kernel")


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_tied_to_the_table_is_used(tied):
    config = TinyConfig(num_layers=2, dropout=0.1, tied=tied)
    assert find_unused_parameters(convert_model(config), next_token_loss, TOKENS) == ()


def test_the_loss_decides_not_the_model():
    def of_the_first_class(apply, batch):
        total, count, *_ = classification_loss(apply, batch)
        return 0 * jax.lax.stop_gradient(total) + batch["weights"].sum(), count

    found = find_unused_parameters(from_linen(Linen(), jnp.zeros((2, 4))), of_the_first_class, IMAGES)
    assert found == ("spare/bias", "spare/kernel", "used/bias", "used/kernel")


def test_what_is_no_loss_is_refused():
    with pytest.raises(ValueError, match="the loss returned"):
        find_unused_parameters(convert_model(TinyConfig()), lambda apply, batch: jnp.float32(0), TOKENS)
