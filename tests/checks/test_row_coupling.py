"""Where a batch is split, a warning names each line at which its rows depend on each other, and no other."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_language_model import TinyConfig

from shardtrain.checks import loss_program
from shardtrain.checks.loss_program import check_trace
from shardtrain.checks.row_coupling import find_couplings
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts

RANDOM = np.random.default_rng(0)
BATCH = {
    "x": RANDOM.normal(size=(8, 6, 8)).astype(np.float32),
    "label": RANDOM.integers(0, 3, 8).astype(np.int32),
    "weights": np.ones(8, np.float32),
}


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(self.dense(x)).mean(1)


def plain(apply, batch, x=None, of_sum=lambda total: total):
    """The cross-entropy of rows, whose labels are looked up by numbers of rows."""
    logits = jax.nn.log_softmax(apply(batch["x"] if x is None else x))
    losses = -logits[jnp.arange(len(logits)), batch["label"]]
    return of_sum((losses * batch["weights"]).sum()), batch["weights"].sum()


def pairs(apply, batch):
    logits = apply(batch["x"])
    return jax.nn.logsumexp(logits @ logits.T, -1).sum(), batch["weights"].sum()


def losses_of(apply, batch):
    """The cross-entropy of each row."""
    logits = jax.nn.log_softmax(apply(batch["x"]))
    return -logits[jnp.arange(len(logits)), batch["label"]] * batch["weights"]


def of_losses(total):
    """A loss whose sum is a function of the losses of rows and of the batch."""
    return lambda apply, batch: (total(losses_of(apply, batch), batch), batch["weights"].sum())


@jax.custom_vjp
def normalized(x):
    return x


normalized.defvjp(lambda x: (x, None), lambda _, change: (change * jnp.cos(change.sum()),))


def over_rows(x):
    return nnx.avg_pool(x.swapaxes(0, 1), (3,), padding="SAME").swapaxes(0, 1)


def changed(change):
    return lambda apply, batch: plain(apply, batch, change(apply, batch["x"]))


def looped(apply, x):
    return jax.lax.scan(lambda before, row: (before + row.mean(), before + row), 0.0, x)[1]


COUPLED: dict[str, tuple[Any, str]] = {
    "pairs": (pairs, "computes something for each pair of rows"),
    "a root of the sum": (lambda *both: plain(*both, of_sum=jnp.sqrt), "takes the sqrt of a sum over rows"),
    "centred": (changed(lambda _, x: x - x.mean(0)), "a number that is computed from all rows"),
    "sorted": (changed(lambda _, x: x[jnp.argsort(x[:, 0, 0])]), "mixes rows or moves them"),
    "neighbours": (changed(lambda _, x: x - jnp.roll(x, 1, 0)), "mixes rows or moves them"),
    "added up": (changed(lambda _, x: jnp.cumsum(x, 0)), "mixes rows or moves them"),
    "a loop": (changed(looped), "loops over rows"),
    "numbers": (
        changed(lambda _, x: x + jnp.arange(len(x))[:, None, None]),
        "computes with the indices of rows",
    ),
    "reversed": (changed(lambda _, x: x - x[::-1]), "mixes rows or moves them"),
    "looked up": (changed(lambda _, x: x + x[jnp.int32(x[:, 0, 0] > 0)]), "mixes rows or moves them"),
    "written": (
        of_losses(lambda x, batch: jnp.zeros(3).at[batch["label"]].max(x).sum()),
        "mixes rows or moves them",
    ),
    "hardest": (of_losses(lambda x, _: jax.lax.top_k(x, 2)[0].sum()), "mixes rows or moves them"),
    "worst": (of_losses(lambda x, _: x.max()), "takes the largest of all rows"),
    "a ratio": (of_losses(lambda x, batch: x.sum() / (x * x).sum()), "takes the div of a sum"),
    "a product": (of_losses(lambda x, _: x.sum() * x.sum()), "takes the mul of a sum over rows"),
    "an extreme": (of_losses(lambda x, _: jnp.maximum(x.sum(), 0.3)), "takes the max of a sum over rows"),
    "a constant beside": (of_losses(lambda x, _: x.sum() + 3.0), "adds a number that no row contributes"),
    "an offset in the count": (
        lambda apply, batch: (losses_of(apply, batch).sum(), batch["weights"].sum() + 1),
        "adds a number that no row contributes",
    ),
    "the number of rows": (changed(lambda _, x: x / len(x)), "computes with the number of rows"),
    "rows by number": (
        changed(lambda _, x: x + jax.nn.one_hot(jnp.arange(len(x)), 8)[:, None]),
        "computes with the indices of rows",
    ),
    "a branch": (
        of_losses(lambda x, _: jax.lax.cond(x.sum() > 0, lambda x: x.sum(), lambda x: 0.0, x)),
        "chooses a branch by a number",
    ),
    "rows of a label": (
        of_losses(
            lambda x, batch: (x / jax.vmap(lambda own: (own == batch["label"]).sum())(batch["label"])).sum()
        ),
        "computes something for each pair of rows",
    ),
    "convolved": (
        of_losses(lambda x, _: (jnp.convolve(x, jnp.array([0.2, 0.5, 0.2]), "same") ** 2).sum()),
        "mixes rows or moves them",
    ),
    "pooled": (changed(lambda _, x: x - over_rows(x)), "mixes rows or moves them"),
    "transformed": (changed(lambda _, x: jnp.fft.fft(x, axis=0).real), "mixes rows or moves them"),
    "shifted": (
        changed(lambda _, x: x - jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:-1]),
        "mixes rows or moves them",
    ),
    "grouped": (
        changed(lambda _, x: x - x.reshape(-1, 2, 6, 8)[:, :1].repeat(2, 1).reshape(x.shape)),
        "mixes rows or moves them",
    ),
    "halves": (
        of_losses(lambda x, _: jax.nn.softplus(jnp.subtract(*jnp.split(x, 2))).sum()),
        "mixes rows or moves them",
    ),
    "by vmap": (
        of_losses(lambda x, _: jax.vmap(lambda x: x - jax.lax.pmean(x, "row"), axis_name="row")(x**2).sum()),
        "computes with the number of rows",
    ),
    "a derivative": (of_losses(lambda x, _: normalized(x).sum()), "has a derivative of its own"),
    "a mean beside": (of_losses(lambda x, _: x.sum() + x.mean()), "takes a mean over rows"),
    "in a branch": (
        changed(lambda _, x: jax.lax.cond(x.sum() > 0, lambda x: x - x.mean(0), lambda x: x, x)),
        "a number that is computed from all rows",
    ),
}


def warnings(loss, num_parts, model: Any = Net, batch=BATCH, num_microbatches=1):
    found = check_trace(from_nnx(model), loss, batch, num_parts, num_microbatches)
    assert found.problems == []
    return found.warnings


def average(x):
    """A model without parameters."""
    return x.mean(1)


average.key = jax.random.key(0)


@pytest.mark.parametrize("name", COUPLED)
def test_the_line_of_dependent_rows_is_named(name):
    loss, what = COUPLED[name]
    rows = {each: np.resize(x, (22, *x.shape[1:])) for each, x in BATCH.items()}
    found = find_couplings(jax.make_jaxpr(lambda batch: loss(average, batch))(rows), 11).lines
    assert any(what in each.what for each in found.values()), found
    assert all("test_row_coupling.py:" in line for line in found)


@pytest.mark.parametrize("name", ["centred", "an offset in the count", "halves"])
def test_a_run_warns_of_it_where_it_splits_its_batches(name):
    """A few rows are computed as well: nothing undoes what the operations do."""
    loss, what = COUPLED[name]
    text = "\n".join(warnings(loss, 6))
    assert what in text
    assert "test_row_coupling.py:" in text
    assert "split into 6 parts" in text
    assert "split into" not in "".join(warnings(loss, 1))


class Penalized(Net):
    """It returns the size of its parameters too."""

    def __call__(self, x):
        return super().__call__(x), (self.dense.kernel[...] ** 2).sum()


def penalized(weigh):
    def loss(apply, batch):
        logits, penalty = apply(batch["x"])
        total, count = plain(lambda _: logits, batch)
        return total + weigh(penalty, count), count

    return loss


def test_a_loss_that_cannot_take_more_rows_is_said_to_be_unchecked():
    loss = of_losses(lambda x, _: (jnp.sort(x) * jnp.linspace(0, 1, 16)[: len(x)]).sum())
    (text,) = warnings(loss, 4)
    assert "not checked whether rows depend on each other" in text
    assert warnings(loss, 1) == []


def test_a_number_that_no_row_contributes_is_named():
    (text,) = warnings(penalized(lambda penalty, _: penalty), 2, Penalized)
    assert "adds a number that no row contributes to a sum over rows" in text
    assert "multiply it by the count" in text


UNDONE = {
    "a mean times the count": of_losses(lambda x, batch: x.mean() * len(x)),
    "a sum of what is sorted": of_losses(lambda x, _: jnp.sort(x).sum()),
    "a guarded count": lambda apply, batch: (
        plain(apply, batch)[0],
        jnp.maximum(batch["weights"].sum(), 1e-6),
    ),
    "a penalty times the count": penalized(lambda penalty, count: penalty * count),
}


@pytest.mark.parametrize("name", UNDONE)
def test_what_is_undone_gives_no_warning(name):
    assert warnings(UNDONE[name], 2, Penalized if "penalty" in name else Net) == []


@jax.custom_jvp
def of_its_own(x):
    return x


of_its_own.defjvp(lambda x, dx: (x[0], dx[0] / (1 + jnp.square(x[0]).sum())))

SEEN: dict[str, Any] = {
    "places by numbers": changed(lambda _, x: x - x[(jnp.arange(len(x)) + 1) % len(x)]),
    "a constant in an array": of_losses(lambda x, _: jnp.concatenate([x, jnp.ones(1)]).sum()),
    "in a loop": changed(
        lambda _, x: jax.lax.while_loop(
            lambda at: at[0] < 2, lambda at: (at[0] + 1, at[1] - 0.5 * at[1].mean(0)), (0, x)
        )[1]
    ),
    "a derivative": of_losses(lambda x, _: of_its_own(x).sum()),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_no_operation_shows_is_seen_in_a_few_rows(name):
    (text,) = warnings(SEEN[name], 2)
    assert "the loss and its gradient of 9 rows differ by" in text
    assert "from the sum of their 3 parts, so rows depend on each other" in text


class OtherInEvaluation(Net):
    """Its rows depend on each other in evaluation alone, by an attribute of its own."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.deterministic = False

    def __call__(self, x):
        found = super().__call__(x)
        return found - found.mean(0) if self.deterministic else found


def test_what_a_model_does_in_evaluation_alone_is_seen():
    (text,) = warnings(plain, 2, OtherInEvaluation)
    assert "the loss in evaluation of 9 rows differs by" in text


class LaterOn(Net):
    """Its rows depend on each other from its third call on."""

    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        found = super().__call__(x)
        return jnp.where(self.calls[...] > 2, found - found.mean(0), found)


def test_what_begins_later_is_named():
    (text,) = warnings(plain, 2, LaterOn)
    assert "a number that is computed from all rows" in text


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


def test_means_of_the_users_own_are_no_batch_norm():
    class Observed(Kept):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.mean = nnx.Variable(jnp.zeros(8))

        def __call__(self, x):
            self.mean[...] = x.mean((0, 1))
            return super().__call__(x)

    (text,) = warnings(plain, 4, Observed)
    assert "changes mean, seen" in text


def test_metrics_that_count_rows_of_padding_are_named():
    def with_metrics(apply, batch):
        losses = losses_of(apply, batch)
        hits = {"weighted": (losses.sum(), batch["weights"].sum()), "rate": (jnp.float32(0.1), 1)}
        return losses.sum(), batch["weights"].sum(), {"hits": (batch["label"].sum(), len(losses)), **hits}

    (text,) = warnings(with_metrics, 1)
    assert "batch['weights'] do not change the metric hits, and they are 0" in text


def test_a_loss_need_not_call_a_model_with_state():
    assert warnings(lambda apply, batch: (batch["weights"].sum(),) * 2, 2, Kept) == []


def test_independent_rows_give_no_warning():
    """Nor of batch norms, labels by numbers of rows, loops over time, and experts of this library."""

    class Normed(Net):
        def __init__(self, rngs: nnx.Rngs):
            super().__init__(rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return super().__call__(self.norm(x))

    assert warnings(plain, 2, Normed) == []
    config = DecoderConfig(
        vocab=8, seq=4, embed=8, num_layers=2, num_heads=2, activation="swiglu", bias=False, loss_chunk=3,
        experts=Experts(num=4, top=2, capacity=1.0, over="batch", balance=0.1, bias=0.01), dropout=0.1,
    )  # fmt: skip
    batch = {"tokens": np.zeros((4, 5), np.int32), "weights": np.ones(4, np.float32)}
    assert warnings(next_token_loss, 2, config, batch) == []


def test_what_calls_python_is_not_computed():
    calls = []

    def loss(apply, batch):
        jax.debug.callback(lambda: calls.append(1))
        total, count = plain(apply, batch)
        return total / count * count, count

    (text,) = warnings(loss, 2)
    assert "takes the div of a sum" in text
    assert not calls


def test_losses_of_this_library_are_not_suspected_when_a_user_calls_them(monkeypatch):
    monkeypatch.setattr(loss_program, "compute_row_difference", lambda *_, **__: None)
    batch = {"tokens": np.zeros((4, 9), np.int32), "weights": np.ones(4, np.float32)}
    assert warnings(lambda *both: next_token_loss(*both), 2, TinyConfig(num_layers=2), batch) == []
