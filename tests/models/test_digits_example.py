"""The example of real images: its rows, its parts of the data, and that its model takes them."""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "digits_resnet.py"))
RNG = np.random.default_rng(0)
DRAWN = SimpleNamespace(images=RNG.integers(0, 17, (300, 8, 8)) * 1.0, target=RNG.integers(0, 10, 300))


@pytest.fixture
def drawn(monkeypatch):
    """Images of the shape and range that scikit-learn has."""
    monkeypatch.setitem(sys.modules, "sklearn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sklearn.datasets", SimpleNamespace(load_digits=lambda: DRAWN))


def test_rows_are_images_from_0_to_1_and_digits(drawn):
    train = EXAMPLE["DigitsData"](num_heldout=40).train(Path())
    assert len(train) == 260
    row = train[7]
    assert (row["image"].shape, row["image"].dtype, row["label"].dtype) == ((8, 8, 1), np.float32, np.int32)
    np.testing.assert_array_equal(row["image"][..., 0] * 16, DRAWN.images[7])
    assert row["label"] == DRAWN.target[7]


def test_no_row_is_in_both_parts(drawn):
    data = EXAMPLE["DigitsData"](num_heldout=40)
    train, heldout = data.train(Path()), data.heldout(Path())
    labels = [
        row["label"] for source in (train, heldout) for row in map(source.__getitem__, range(len(source)))
    ]
    assert len(heldout) == 40
    assert labels == DRAWN.target.tolist()


def test_the_model_of_the_example_takes_its_rows(drawn):
    run = EXAMPLE["run"]()
    images = np.stack([run.data.heldout(Path())[i]["image"] for i in range(3)])
    logits = nnx.eval_shape(lambda: run.model(nnx.Rngs(0))(jax.numpy.asarray(images)))
    assert logits.shape == (3, 10)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="uv pip install scikit-learn"):
        EXAMPLE["DigitsData"]().train(Path())
