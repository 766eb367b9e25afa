"""Bytes, counts, durations and losses as text, by value."""

import pytest

from shardtrain.report.quantities import bytes_text, count_text, duration_text, loss_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_text(num_bytes, text):
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"),
        (-1.5, "-1.5000"),
        (1_234_567.0, "1.235e+06"),
        (float("inf"), "inf"),
    ],
)
def test_loss_text(value, text):
    assert loss_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999_600, "1.00M"),
        (5e15, "5.00e+15"),
        (float("nan"), "nan"),
    ],
)
def test_count_text(value, text):
    assert count_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.7, "1m00s"),
        (3599.6, "1h00m"),
        (86_400, "1d00h"),
        (float("nan"), "?"),
    ],
)
def test_duration_text(seconds, text):
    assert duration_text(seconds) == text
