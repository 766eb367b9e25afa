"""Losses that return means, samples that are no rows of a batch, classes that are none: seen before the first step."""

import sys
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from quiet_training import InMemory, train_quietly

from shardtrain.checkpoints.differences import Allow
from shardtrain.checks.first_batch import find_class_problems, find_loss_problems, make_loss_facts
from shardtrain.cli import main
from shardtrain.data import Batches
from shardtrain.errors.user_code import UserCodeFailed
from shardtrain.functional.cross_entropy import cross_entropy
from shardtrain.functional.loss import (
    classification_loss,
    masked_token_loss,
    next_token_loss,
    translation_loss,
)
from shardtrain.functional.loss_guard import guard_loss
from shardtrain.functional.metrics import add_metrics
from shardtrain.functional.model import Model
from shardtrain.models.mlp import MlpConfig
from shardtrain.trainer import prepared_run, session
from shardtrain.trainer.config import Run

VOCAB, SEQ = 8, 5
random = np.random.default_rng(0)


TABLE = Model(
    init=lambda key: ({"table": jnp.zeros((VOCAB, VOCAB))}, {}),
    apply=lambda params, state, rng, train, *inputs: (params["table"][inputs[-1]], state),
    dims={"table": ("vocab", "embed")},
)
IMAGES = Model(
    init=lambda key: ({"w": jnp.zeros((4, VOCAB))}, {}),
    apply=lambda params, state, rng, train, x: (x @ params["w"], state),
    dims={"w": ("embed", "vocab")},
)
TOKENS = {"tokens": random.integers(0, VOCAB, (3, SEQ + 1)), "weights": np.ones(3, np.float32)}
LABELS = {
    "image": random.normal(size=(3, 4)).astype(np.float32),
    "label": np.array([0, 7, 3]),
    "weights": np.ones(3, np.float32),
}


def losses_of(apply, batch):
    return optax.softmax_cross_entropy_with_integer_labels(apply(batch["image"]), batch["label"])


def contrastive(apply, batch):
    """Depends on all rows at once, and is right all the same."""
    x = apply(batch["image"])
    return cross_entropy(x @ x.T, jnp.arange(len(x)), batch["weights"])


def over_pairs(apply, batch):
    """Counts every pair of rows: none of one row."""
    x = apply(batch["image"])
    others = 1 - jnp.eye(len(x))
    return ((x @ x.T) * others).sum(), others.sum()


def pairs_of_rows(apply, batch):
    """Of one row alone it raises."""
    x = apply(batch["image"])[:, 0].reshape(-1, 2)
    return jax.nn.softplus(x[:, 1] - x[:, 0]).sum(), len(x)


MEAN, COUNT = (
    "is the mean of their separate losses",
    "the count of the loss is 1 for two rows together, and 1 and 1",
)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (classification_loss, None),
        (contrastive, None),
        (lambda apply, batch: (losses_of(apply, batch).sum(), len(batch["label"])), None),
        (
            lambda apply, batch: ((losses_of(apply, batch) * batch["weights"]).sum(), batch["weights"].sum()),
            None,
        ),
        (lambda apply, batch: (losses_of(apply, batch).mean(), 1), COUNT),
        (lambda apply, batch: (losses_of(apply, batch).mean(), jnp.float32(1)), COUNT),
        (lambda apply, batch: (losses_of(apply, batch).mean(), batch["weights"].sum()), MEAN),
        (lambda apply, batch: (losses_of(apply, batch).sum(), 3), "is 3 for two rows together, and 3 and 3"),
        (lambda apply, batch: (*classification_loss(apply, batch)[:2], {"temperature": (0.5, 1)}), None),
        (over_pairs, None),
        (pairs_of_rows, None),
    ],
)
def test_a_loss_that_returns_a_mean_is_refused(loss, problem):
    found = find_loss_problems(make_loss_facts(IMAGES, guard_loss(loss), LABELS))
    assert bool(found) == (problem is not None)
    assert problem is None or problem in "; ".join(found)


@wraps(classification_loss)
def mean_of_known(apply, batch):
    loss_sum, count, *_ = classification_loss(apply, batch)
    return loss_sum / count, 1.0


@pytest.mark.parametrize("loss", [mean_of_known, add_metrics(mean_of_known)])
def test_a_loss_around_one_of_this_library_is_evaluated(loss):
    for each in (loss, guard_loss(loss)):
        assert COUNT in find_loss_problems(make_loss_facts(IMAGES, each, LABELS))[0]


@pytest.mark.parametrize(
    "loss", [lambda apply, batch: apply(batch), lambda apply, batch: (apply(batch)[0], 3)]
)
def test_a_model_that_computes_its_loss_is_left_to_itself(loss):
    model = Model(
        init=lambda key: ({"w": jnp.zeros((4, VOCAB))}, {}),
        apply=lambda params, state, rng, train, batch: (
            cross_entropy(batch["image"] @ params["w"], batch["label"]),
            state,
        ),
        dims={"w": ("embed", "vocab")},
    )
    assert find_loss_problems(make_loss_facts(model, guard_loss(loss), LABELS)) == []


@dataclass
class Smoothed:
    """A loss that has no hash."""

    by: float = 0.1

    def __call__(self, apply, batch):
        return losses_of(apply, batch).sum() * (1 - self.by), len(batch["label"])


def test_a_loss_without_a_hash():
    assert find_class_problems(make_loss_facts(IMAGES, guard_loss(Smoothed()), LABELS), LABELS) == []


def test_counts_that_weights_and_masks_make_small_are_right():
    batch = {**LABELS, "weights": np.array([0.0, 0.25, 1.0], np.float32)}
    assert find_loss_problems(make_loss_facts(IMAGES, classification_loss, batch)) == []
    batch = {**TOKENS, "weights": random.integers(0, 2, (3, SEQ)).astype(np.float32)}
    assert find_loss_problems(make_loss_facts(TABLE, next_token_loss, batch)) == []
    nobody = {**LABELS, "weights": np.zeros(3, np.float32)}
    assert find_loss_problems(make_loss_facts(IMAGES, classification_loss, nobody)) == []
    unchosen = {**TOKENS, "targets": TOKENS["tokens"], "chosen": np.zeros(TOKENS["tokens"].shape, np.float32)}
    (problem,) = find_loss_problems(make_loss_facts(TABLE, masked_token_loss, unchosen))
    assert "the count of the loss is 0 for the first batch" in problem


def test_a_great_vocabulary_costs_no_outputs(monkeypatch):
    monkeypatch.setattr("shardtrain.checks.first_batch.MOST_ELEMENTS", 1)
    mean = make_loss_facts(IMAGES, lambda apply, batch: (losses_of(apply, batch).mean(), 1), LABELS)
    assert COUNT in find_loss_problems(mean)[0]


@pytest.mark.parametrize(
    ("loss", "model", "changes", "problem"),
    [
        (next_token_loss, TABLE, {}, None),
        (next_token_loss, TABLE, {"tokens": [[1, 2, 8, 3, 4, 0], [0] * 6, [0, 0, 0, 0, 0, 9]]}, "'tokens' has 8 in row 0 at 2, 9 in row 2 at 5; the model has classes 0 to 7: give the model 10 classes or more"),
        (next_token_loss, TABLE, {"tokens": [[1, 2, -100, -100, -100, -100]] * 3}, "'tokens' has -100 in row 0 at 2, -100 in row 0 at 3, -100 in row 0 at 4 and 9 more; the model has classes 0 to 7: give entries to ignore a weight of 0 (negative labels are not ignored)"),
        (next_token_loss, TABLE, {"tokens": [[1, 2, -100, -100, -100, -100]] * 3, "weights": [[1, 1, 0, 0, 0, 0]] * 3}, None),
        (next_token_loss, TABLE, {"tokens": [[1, 2, -100, -100, -100, -100]] * 3, "weights": [[1, 0, 0, 0, 0]] * 3}, None),
        (next_token_loss, TABLE, {"tokens": np.ones((3, 6), np.float32)}, "'tokens' is float32, and classes are whole numbers; use .astype('int32')"),
        (classification_loss, IMAGES, {"label": [0, 8, 1]}, "'label' has 8 in row 1; the model has classes 0 to 7: give the model 9 classes or more"),
        (classification_loss, IMAGES, {"label": [0, 8, 1], "weights": [1, 0, 1]}, None),
        (classification_loss, IMAGES, {"label": np.eye(8, dtype=np.float32)[:3]}, None),
        (classification_loss, IMAGES, {"label": np.eye(9, dtype=np.float32)[:3]}, "'label' has shares of 9 classes, and the model has 8; make both the same"),
        (classification_loss, IMAGES, {"label": np.full((3, 8), 0.25, np.float32)}, "'label' has row 0, which adds up to 2; give each class its share, 0 or more, together 1"),
        (classification_loss, IMAGES, {"label": np.eye(8)[:3] * 3 - np.eye(8)[1:4] * 2}, "'label' has row 0, which has a share below 0; give each class its share, 0 or more, together 1"),
    ],
)  # fmt: skip
def test_classes_outside_are_named_with_row_and_value(loss, model, changes, problem):
    good = TOKENS if model is TABLE else LABELS
    expected = make_loss_facts(model, guard_loss(loss), good)
    batch = {**good, **{name: np.asarray(value) for name, value in changes.items()}}
    assert find_class_problems(expected, batch) == ([] if problem is None else [problem])


def test_the_vocabulary_of_a_model_limits_the_tokens_of_any_loss():
    def loss(apply, batch):
        return apply(batch["tokens"]).sum(), batch["weights"].sum()

    bad = {**TOKENS, "tokens": TOKENS["tokens"] + VOCAB}
    assert find_class_problems(make_loss_facts(TABLE, loss, TOKENS), bad) == []
    assert (
        "the model has classes 0 to 7"
        in find_class_problems(make_loss_facts(TABLE, loss, TOKENS, VOCAB), bad)[0]
    )
    masked = {**TOKENS, "tokens": np.where(TOKENS["tokens"] > 3, -100, TOKENS["tokens"])}
    assert find_class_problems(make_loss_facts(TABLE, loss, TOKENS, VOCAB), masked) == []


@pytest.mark.parametrize(
    ("loss", "batch", "problem"),
    [
        (next_token_loss, {"tokens": (2, 32, 129)}, "each sample has shape (32, 129): it seems to be a batch already; give 32 samples of shape (129,) instead"),
        (next_token_loss, {"tokens": (2,)}, "'tokens' has shape (2,) in a batch; give samples with 1 dims"),
        (translation_loss, {"source": (2, 4), "target": (2, 4, 5)}, "'target' has shape (2, 4, 5)"),
        (masked_token_loss, {"tokens": (2, 4), "targets": (2, 4, 1), "chosen": (2, 4)}, "'targets' has shape"),
        (classification_loss, {"image": (2, 16, 4), "label": (2, 16)}, "each sample has shape (16,): it seems to be a batch already; give 16 samples of shape ()"),
        (next_token_loss, {"tokens": (2, 6), "weights": (2, 3)}, "weights have shape (2, 3), and targets (2, 5); give one for each row (2,), each target (2, 5) or each token (2, 6)"),
    ],
)  # fmt: skip
def test_samples_that_are_batches_are_refused(loss, batch, problem):
    rows = {name: np.zeros(shape, np.int32) for name, shape in {"weights": (2,), **batch}.items()}
    with pytest.raises(ValueError) as error:
        make_loss_facts(TABLE, guard_loss(loss), rows)
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("a story", "'x' is text ('a story'), not numbers; make tokens of it, or leave it out"),
        (None, "'x' is None; give a number for what is missing, such as 0 with a weight of 0, or leave it out"),
        ([[1, 2], [3]], "'x' is a ragged list, whose rows have different lengths; pad them, with weights of 0 where padded"),
        (np.array([None, 3]), "'x' is ndarray of dtype object (array([None, 3], dtype=object)); give an array of numbers, or leave it out"),
        (np.datetime64("2026-01-01"), "'x' is datetime64[D], not numbers; use .astype('int64'), or leave it out"),
        (object, "'x' is type of dtype object (<class 'object'>); give an array of numbers, or leave it out"),
    ],
)  # fmt: skip
def test_what_is_no_array_is_named_with_its_key(value, why):
    source: Any = [{"x": value, "label": 1}]
    with pytest.raises(ValueError) as error:
        Batches(source=source, batch=1).load({"epoch": 0, "index": 0})
    assert str(error.value) == f"the data has samples that cannot be batched:\n  - sample 0: {why}"


def test_a_sample_is_a_dict():
    source: Any = [(np.zeros(3), 1)]
    with pytest.raises(ValueError, match=r"sample 0 is a tuple; give a dict that names each array"):
        Batches(source=source, batch=1).load({"epoch": 0, "index": 0})
    bfloat16: Any = [{"x": jnp.bfloat16(1.5), "flag": True}]
    assert Batches(source=bfloat16, batch=1).load({"epoch": 0, "index": 0})["x"].dtype == jnp.bfloat16


class Points:
    """64 points; from number `bad` on labels are no classes, and sample `broken` raises."""

    def __init__(self, bad: int = 64, broken: int = 64):
        self.bad, self.broken = bad, broken

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.broken:
            raise ValueError("no such picture")
        label = index % 3 if index < self.bad else 300
        return {"image": np.full(4, index, np.float32), "label": np.int32(label)}


def make_run(source: Any, folder: Path, **changes: Any) -> Run:
    model = MlpConfig(features=4, mlp=4, num_layers=1, classes=3)
    run = Run(model=model, data=InMemory(source), loss=classification_loss, batch=8, steps=3, run_dir=folder)
    return replace(run, **changes)


def test_a_run_whose_every_step_was_skipped_says_why(tmp_path, monkeypatch, one_device):
    """The first batch is not looked at here, as where only later ones are bad."""
    monkeypatch.setattr(prepared_run, "find_class_problems", lambda expected, batch: [])
    run = make_run(Points(bad=0), tmp_path)
    with pytest.raises(FloatingPointError) as error:
        train_quietly(run)
    text = str(error.value)
    assert text.startswith("every step was skipped, so nothing was learned: step 1 was skipped: loss nan")
    assert (
        "'label' has 300 in row 0, 300 in row 1, 300 in row 2 and 5 more; the model has classes 0 to 2"
        in text
    )
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_a_run_that_learned_before_it_was_resumed_may_end_with_skipped_steps(
    tmp_path, monkeypatch, one_device
):
    train_quietly(make_run(Points(), tmp_path, steps=2))
    for module in (prepared_run, session):
        monkeypatch.setattr(module, "find_class_problems", lambda expected, batch: [])
    run = make_run(Points(bad=0), tmp_path, steps=3, allow=Allow(changed=("data*",)))
    trained, printed, _ = train_quietly(run)
    assert trained.step == 3
    assert "WARNING: every step from 3 was skipped: step 3 was skipped: loss nan" in printed
    assert (tmp_path / "checkpoints" / "step_00000003").is_dir()


def test_classes_of_the_first_batch_are_refused_before_the_first_step(tmp_path, one_device):
    with pytest.raises(ValueError, match=r"this run would learn nothing.*\n  - 'label' has 300 in row"):
        train_quietly(make_run(Points(bad=0), tmp_path))


RUN_FILE = """
from tests_first_batch import Points, make_run
from pathlib import Path
def loss(apply, batch):
    return apply(batch["picture"]).sum(), 1.0
def run(): return make_run(Points(), Path({folder!r}), loss=loss)
def data(): return make_run(Points(broken=5), Path({folder!r}), batch=64)
def loader(): return make_run(iter([1]), Path({folder!r}))
"""


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("run", 1, ["    return apply(batch[\"picture\"]).sum(), 1.0", "KeyError: 'picture'", "the loss loss, given a batch of 'image' float32 (8, 4), 'label' int32 (8,), 'weights' float32 (8,), raised KeyError: 'picture'"]),
        ("data", 1, ['raise ValueError("no such picture")', "sample 5 of Points raised ValueError: no such picture"]),
        ("loader", 2, ["train(folder) gave a list_iterator; give something with a length and samples by number"]),
    ],
)  # fmt: skip
def test_an_exception_of_the_users_keeps_its_traceback_and_ends_with_1(
    name, code, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "tests_first_batch", sys.modules[__name__])
    (tmp_path / "file.py").write_text(RUN_FILE.format(folder=str(tmp_path / "run")))
    monkeypatch.delitem(sys.modules, "file", raising=False)
    assert main(["train", f"{tmp_path / 'file.py'}:{name}"]) == code
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert "shardtrain/data/batches.py" not in said


@dataclass(frozen=True)
class Constrained:
    """A model that shards its activations by itself, over an axis of the mesh."""

    axis: str

    def __call__(self, rngs: nnx.Rngs) -> nnx.Module:
        return ConstrainedModule(self.axis, rngs)


class ConstrainedModule(nnx.Module):
    def __init__(self, axis: str, rngs: nnx.Rngs):
        self.axis, self.linear = axis, nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        twice = jax.shard_map(lambda x: x * 2, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)
        return jax.lax.with_sharding_constraint(self.linear(twice), PartitionSpec(None, self.axis))


CONSTRAINED_FILE = """
from tests_first_batch import Constrained, Points, make_run
from pathlib import Path
def run(): return make_run(Points(), Path({folder!r}), steps=1, model=Constrained({axis!r}))
"""


@pytest.mark.parametrize(
    ("axis", "mesh", "code"),
    [
        ("tensor", "data=2,tensor=4", 0),
        pytest.param("data", "data=2,tensor=4", 2, marks=pytest.mark.full),
        pytest.param("tensor", "data=8", 0, marks=pytest.mark.full),
        ("data", "data=8", 2),
    ],
)
def test_a_model_with_constraints_of_its_own(axis, mesh, code, tmp_path, capsys, monkeypatch):
    """Also of one or two rows of the first batch, which the mesh does not divide."""
    monkeypatch.setitem(sys.modules, "tests_first_batch", sys.modules[__name__])
    (tmp_path / "constrained.py").write_text(CONSTRAINED_FILE.format(folder=str(tmp_path / "run"), axis=axis))
    monkeypatch.delitem(sys.modules, "constrained", raising=False)
    options = ["--mesh", mesh, "--unnamed", "replicate"]
    assert main(["train", str(tmp_path / "constrained.py"), *options]) == code
    words = "name the dims instead, as nn.with_logical_constraint(x, ('batch', None, 'embed'))"
    assert (words in capsys.readouterr().err) == (code == 2)


def test_own_mistakes_stay_what_they_are():
    """What shardtrain refuses inside of a loss is no failure of the user's code."""
    with pytest.raises(ValueError, match="seems to be a batch already"):
        guard_loss(next_token_loss)(
            lambda x: x, {"tokens": jnp.zeros((2, 3, 4), jnp.int32), "weights": jnp.ones(2)}
        )
    with pytest.raises(
        UserCodeFailed, match=r"the loss next_token_loss, given a batch of .* KeyError: 'tokens'"
    ):
        guard_loss(next_token_loss)(lambda x: x, {"image": jnp.zeros((2, 3)), "weights": jnp.ones(2)})
    assert jax.tree.map(float, next_token_loss(lambda x: jnp.zeros((*x.shape, 4)), {
        "tokens": jnp.zeros((1, 3), jnp.int32), "weights": jnp.array([[9.0, 1.0, 0.0]])
    })) == pytest.approx((np.log(4), 1.0))  # fmt: skip
