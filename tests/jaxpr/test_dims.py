"""The law of moved dims: entries at an index of a dim only reach the same index of the dim of the output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardtrain.jaxpr.dims import find_mixed, find_moves, find_summed
from shardtrain.jaxpr.forward import bind, evaluate, inline

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 5)), jnp.float32)
ROWS = jnp.array([2, 0])

OPERATIONS = {
    "elementwise": lambda x: x * 2,
    "compared": lambda x: x > 0,
    "broadcast": lambda x: lax.broadcast_in_dim(x[:, :1], (2, 4, 3, 5), (1, 2, 3)),
    "transpose": lambda x: x.transpose(2, 0, 1),
    "squeeze": lambda x: lax.squeeze(x[:, :1], (1,)),
    "sum": lambda x: x.sum(1),
    "argmax": lambda x: x.argmax(0),
    "product": lambda x: jnp.einsum("abc,bcd->ad", x, jnp.ones((3, 5, 2))),
    "batched product": lambda x: jnp.einsum("abc,adc->abd", x, x),
    "convolution": lambda x: lax.conv_general_dilated(x, jnp.ones((2, 3, 2)), (1,), "SAME"),
    "lookup": lambda x: x.at[ROWS].get(mode="clip"),
    "batched lookup": lambda x: jnp.take_along_axis(x, jnp.zeros((4, 3, 1), int), 2),
    "sort": lambda x: jnp.sort(x, 1),
    "reverse": lambda x: x[:, ::-1],
    "cumulative": lambda x: jnp.cumsum(x, 2),
    "concatenate": lambda x: jnp.concatenate([x, x], 1),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0))),
    "largest": lambda x: lax.top_k(x, 5)[0],
    "pooling": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), "SAME"),
    "fourier": lambda x: jnp.fft.fft(x).real,
    "reshape": lambda x: x.reshape(12, 5),
    "scatter": lambda x: x.at[ROWS].set(0.0),
}


MOVED = {
    "elementwise": [{0: 0, 1: 1, 2: 2}, {}],
    "transpose": [{0: 1, 1: 2, 2: 0}],
    "sum": [{0: 0, 2: 1}],
    "argmax": [{1: 0, 2: 1}],
    "convolution": [{0: 0, 2: 2}, {0: 1}],
    "reshape": [{}],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_entries_stay_at_their_index_of_a_moved_dim(name):
    """A change at index 1 of a dim of an input changes the output at index 1 of the same dim only."""
    followed = []

    def compute(equation, inputs):
        outputs = bind(equation, inputs)
        followed.append([find_moves(equation, number) for number in range(len(inputs))])
        for number, (x, moves) in enumerate(zip(inputs, followed[-1], strict=True)):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                continue
            for dim in moves.keys() - find_mixed(equation):
                at_1 = (slice(None),) * dim + (1,)
                again = bind(equation, [*inputs[:number], x.at[at_1].add(1.5), *inputs[number + 1 :]])[0]
                others = np.delete(np.asarray(again != outputs[0]), 1, moves[dim])
                assert not others.any(), (equation.primitive.name, number, dim)
        return outputs

    evaluate(inline(jax.make_jaxpr(OPERATIONS[name])(X)), [X], compute)
    assert MOVED.get(name, followed[-1]) == followed[-1]
    assert any(followed[-1]) or name in ("reshape", "scatter")


def test_summed_dims_are_those_of_all_factors():
    product = jax.make_jaxpr(OPERATIONS["product"])(X).eqns[-1]
    assert find_summed(product) in ([{0: 1, 1: 0}, {0: 2, 1: 1}], [{0: 2, 1: 1}, {0: 1, 1: 0}])
    *_, convolution = jax.make_jaxpr(OPERATIONS["convolution"])(X).eqns
    assert find_summed(convolution) == [{0: 1, 1: 1}]
    assert find_summed(jax.make_jaxpr(OPERATIONS["sum"])(X).eqns[0]) == [{0: 1}]
