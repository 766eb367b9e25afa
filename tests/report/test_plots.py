"""The loss curve is a PNG with both curves; the drawn data is checked as arrays."""

import math
import sys

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from shardtrain.report.plots.loss_curve import (
    HELDOUT_COLOURS,
    TRAIN_COLOUR,
    format_final_values,
    plot_loss_curve,
    select_series,
    smooth,
    spans_decades,
)
from shardtrain.report.sinks.json_lines import JsonLines


def write_metrics(path, train, heldout=()):
    sink = JsonLines(path, resume_after=None)
    for step, loss in train:
        sink.write(step, {"train/loss": loss})
    for step, loss in heldout:
        sink.write(step, {"heldout/loss": loss})
    sink.close()
    return path


def num_pixels(png_path, colour):
    image = matplotlib.image.imread(png_path)
    assert image.shape == (750, 1350, 4)
    return int((np.abs(image[..., :3] - np.array(to_rgb(colour))).max(axis=-1) < 0.02).sum())


def draw(tmp_path, train, heldout=()):
    path = write_metrics(tmp_path / "metrics.jsonl", train, heldout)
    png_path = plot_loss_curve(path, tmp_path / "report" / "loss.png", title=r"a run with $\nosuch$ in it")
    assert png_path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return png_path


def test_both_curves_are_drawn(tmp_path):
    train = [(step, 2 + 5 / step) for step in range(1, 201)]
    heldout = [(step, 2.1 + 5 / step) for step in range(50, 201, 50)]
    png_path = draw(tmp_path, train, heldout)
    assert num_pixels(png_path, TRAIN_COLOUR) > 1000
    assert num_pixels(png_path, HELDOUT_COLOURS[0]) > 1000


def test_one_point_is_visible(tmp_path):
    blank = num_pixels(draw(tmp_path, [(7, math.nan)]), TRAIN_COLOUR)
    assert num_pixels(draw(tmp_path, [(7, 3.2)]), TRAIN_COLOUR) > blank + 20


@pytest.mark.parametrize("losses", [[math.nan, 2.0, math.inf, 1.0], [math.nan] * 3, [0.0] * 3, [-1.0, 30.0]])
def test_odd_losses_are_drawn(tmp_path, losses):
    draw(tmp_path, list(enumerate(losses)), [(2, math.nan)])


def test_drawing_changes_no_style_and_no_backend(tmp_path, monkeypatch):
    def style():
        # Reading the backend would itself choose one and import pyplot.
        return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}

    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    before = style()
    draw(tmp_path, [(1, 3.0), (2, 2.0)])
    assert style() == before
    assert "matplotlib.pyplot" not in sys.modules


def test_a_series_is_in_order_of_step_with_nan_for_what_is_not_finite():
    records = [{"step": 3, "a": 1.0}, {"step": 1, "a": math.inf}, {"step": 2, "b": 5.0}]
    steps, values = select_series(records, "a")
    np.testing.assert_array_equal(steps, [1, 3])
    np.testing.assert_array_equal(values, [np.nan, 1.0])


def test_smoothing_keeps_the_start_and_the_gaps():
    values = np.array([100.0, 50.0, 25.0, 12.0, np.nan, 6.0, 2.0, 4.0, 6.0, 2.0])
    smoothed = smooth(values, 2)
    np.testing.assert_array_equal(smoothed[:4], values[:4])
    np.testing.assert_allclose(smoothed[4:], [np.nan, 4.0, 4.0, 4.0, 3.5, 4.0])
    np.testing.assert_array_equal(smooth(values, 0), values)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([1.0, 19.0], False), ([1.0, 21.0, np.nan], True), ([0.0, 21.0], False), ([np.nan], False), ([], False)],
)
def test_positive_losses_over_decades_have_a_logarithmic_axis(values, expected):
    assert spans_decades(np.array(values)) is expected


def test_the_subtitle_has_the_final_values():
    train = (np.array([1, 500, 1000]), np.array([10.8, np.nan, 2.34117]))
    heldout = {"held-out": (np.array([500, 1000]), np.array([2.25, 2.4]))}
    assert format_final_values(train, heldout) == (
        "step 1,000  ·  training 10.8000 → 2.3412  ·  held-out 2.2500 → 2.4000 (lowest 2.2500 at step 500)"
        "  ·  not finite: 1 of 3"
    )
    assert format_final_values((np.array([1]), np.array([3.0])), {}) == "step 1  ·  training 3.0000"


def test_metrics_without_a_loss_are_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "grad_norm": 2.0}\n')
    with pytest.raises(ValueError) as error:
        plot_loss_curve(path, tmp_path / "loss.png", title="t")
    assert str(error.value) == (
        f"a loss curve of {path} was asked for, but none of its 1 lines has 'train/loss' or 'heldout/loss'. "
        "Point it to the metrics of a run that has logged at least one step."
    )
