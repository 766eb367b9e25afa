"""Where a batch is split, a warning names each line at which its rows depend on each other, and no other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.trainer.loss_trace import check_trace

BATCH = {
    "x": np.ones((4, 6, 8), np.float32),
    "label": np.zeros(4, np.int32),
    "weights": np.ones(4, np.float32),
}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.drop, self.cell = nnx.Dropout(0.5, rngs=rngs), nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        found: Any = self.cell(self.drop(self.norm(self.dense(x))))
        return found[:, -1]


def plain(apply, batch, x=None, of_sum=lambda total: total):
    """The cross-entropy of rows, whose labels are looked up by numbers of rows."""
    logits = jax.nn.log_softmax(apply(batch["x"] if x is None else x))
    losses = -logits[jnp.arange(len(logits)), batch["label"]]
    return of_sum((losses * batch["weights"]).sum()), batch["weights"].sum()


def pairs(apply, batch):
    logits = apply(batch["x"])
    return jax.nn.logsumexp(logits @ logits.T, -1).sum(), batch["weights"].sum()


def changed(change):
    return lambda apply, batch: plain(apply, batch, change(apply, batch["x"]))


def looped(apply, x):
    return jax.lax.scan(lambda before, row: (before + row.mean(), before + row), 0.0, x)[1]


COUPLED: dict[str, tuple[Any, str]] = {
    "pairs": (pairs, "computes something for each pair of rows"),
    "a root of the sum": (lambda *both: plain(*both, of_sum=jnp.sqrt), "takes the sqrt of a sum over rows"),
    "centred": (changed(lambda _, x: x - x.mean(0)), "a number that is computed from all rows"),
    "mixed": (changed(lambda apply, x: x + jax.random.permutation(apply.key, x)), "sorts or permutes rows"),
    "sorted": (changed(lambda _, x: x[jnp.argsort(x[:, 0, 0])]), "sorts or permutes rows"),
    "neighbours": (changed(lambda _, x: x - jnp.roll(x, 1, 0)), "moves rows to the places of others"),
    "added up": (changed(lambda _, x: jnp.cumsum(x, 0)), "adds up along rows"),
    "a loop": (changed(looped), "loops over rows"),
    "numbers": (
        changed(lambda _, x: x + jnp.arange(len(x))[:, None, None]),
        "computes with the numbers of rows",
    ),
    "in a branch": (
        changed(lambda _, x: jax.lax.cond(x.sum() > 0, lambda x: x - x.mean(0), lambda x: x, x)),
        "a number that is computed from all rows",
    ),
}


def warnings(loss, num_parts, model: Any = Net, batch=BATCH, num_microbatches=1):
    found = check_trace(from_nnx(model), loss, batch, num_parts, num_microbatches)
    assert found.problems == []
    return found.warnings


@pytest.mark.parametrize("name", COUPLED)
def test_the_line_of_dependent_rows_is_named(name):
    loss, what = COUPLED[name]
    text = "\n".join(warnings(loss, 6))
    assert what in text
    assert "test_row_coupling.py:" in text
    assert "split into 6 parts" in text
    assert "split into" not in "".join(warnings(loss, 1))


class Kept(Net):
    """It counts its calls, and keeps the mean of what it has seen."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls, self.seen = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.zeros(8))

    def __call__(self, x):
        self.calls[...] += 1
        self.seen[...] = 0.9 * self.seen[...] + 0.1 * x.mean((0, 1))
        return super().__call__(x)


def test_state_that_each_part_changes_is_named():
    assert warnings(plain, 1, Kept) == []
    (text,) = warnings(plain, 4, Kept)
    assert "a call of the model changes seen; each of the 4 parts" in text
    (text,) = warnings(plain, 2, Kept, num_microbatches=2)
    assert "changes calls, seen; each of the 2 parts" in text


def test_a_loss_need_not_call_a_model_with_state():
    assert warnings(lambda apply, batch: (batch["weights"].sum(),) * 2, 2, Kept) == []


def test_independent_rows_give_no_warning():
    """Nor of batch norms, labels by numbers of rows, loops over time, and experts of this library."""
    assert warnings(plain, 2) == []
    config = DecoderConfig(
        vocab=8, seq=4, embed=8, num_layers=2, num_heads=2, activation="swiglu", bias=False, loss_chunk=3,
        experts="num=4,top=2,capacity=1.0,over=batch,balance=0.1,bias=0.01", dropout=0.1,
    )  # fmt: skip
    batch = {"tokens": np.zeros((4, 5), np.int32), "weights": np.ones(4, np.float32)}
    assert warnings(next_token_loss, 2, config, batch) == []
