"""Parts of a chain that draw from one stream are refused, as stages would count its draws from 0 each."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from shardtrain.functional.nnx_model import from_nnx

KEY, ROWS = jax.random.key(0), jnp.ones((2, 4))


class Net(nnx.Module):
    """Four blocks in a list; dropout of each part is a stream of its own unless it is shared."""

    def __init__(self, shares: str, rngs: nnx.Rngs):
        def dropout() -> nnx.Dropout:
            return nnx.Dropout(0.5, rngs=rngs)

        self.before, self.after, self.between = dropout(), dropout(), dropout()
        self.blocks = nnx.List([nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), dropout()) for _ in range(4)])
        self.keys: Any = rngs["dropout"].fork()
        if shares == "first and last":
            self.after = self.before
        if shares == "run alone":
            self.between = dropout()
        if shares == "blocks":
            self.blocks[3].layers[1] = self.blocks[0].layers[1]
        if shares == "block_keys and first":
            self.keys = self.before.rngs
        self.shares = shares

    def first(self, x):
        return self.before(x)

    def block_keys(self):
        return jax.random.split(self.keys(), 4)

    def run(self, blocks, x, keys):
        for block in blocks:
            x = block(x)
        return self.between(x) if self.shares == "run alone" else x

    def last(self, x):
        return self.after(x)

    def __call__(self, x):
        return self.last(self.run(self.blocks, self.first(x), self.block_keys()))


def trace(shares: str, sizes: tuple[int, ...], train: bool = True) -> None:
    """Trace the parts of a chain that is cut into stages of some blocks."""
    model = from_nnx(lambda rngs: Net(shares, rngs))
    chain = model.chain
    assert chain is not None

    def stages(params):
        x, start = chain.first(params, {}, KEY, train, ROWS)[0], 0
        for number in sizes:
            x = chain.run(params, {}, KEY, train, start, number, x)[0]
            start += number
        return chain.last(params, {}, KEY, train, x)[0]

    params, _ = jax.eval_shape(model.init, KEY)
    jax.eval_shape(stages, params)


@pytest.mark.parametrize(
    ("shares", "sizes", "text"),
    [
        ("first and last", (4,), "after/rngs is drawn from in first and in last: their masks"),
        ("blocks", (2, 2), "blocks/0/layers/1/rngs is drawn from in run and in run of other blocks"),
        ("block_keys and first", (4,), "before/rngs is drawn from in first and in block_keys"),
    ],
)
def test_a_stream_that_parts_share_is_refused(shares, sizes, text):
    with pytest.raises(ValueError) as error:
        trace(shares, sizes)
    assert text in str(error.value)
    assert "self.rngs = rngs.fork()" in str(error.value)
    trace(shares, sizes, train=False)


@pytest.mark.parametrize(("shares", "sizes"), [("nothing", (1, 3)), ("blocks", (4,))])
def test_streams_of_their_own_are_fine(shares, sizes):
    trace(shares, sizes)
    trace(shares, (4,))
