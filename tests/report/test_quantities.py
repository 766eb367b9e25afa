"""Bytes, counts, durations and losses as text, by value."""

import pytest

from shardtrain.report.quantities import bytes_text, count_text, duration_text, loss_text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_bytes_text(num_bytes, text):
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.34117, "2.3412"),
        (0.0, "0.0000"),
        (-1.5, "-1.5000"),
        (0.00001234, "1.234e-05"),
        (1_234_567.0, "1.235e+06"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_loss_text(value, text):
    assert loss_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00"),
        (5, "5.00"),
        (12.34, "12.3"),
        (9.996, "10.0"),
        (99.96, "100"),
        (999.4, "999"),
        (999.9, "1.00k"),
        (12_345, "12.3k"),
        (999_600, "1.00M"),
        (3.2e9, "3.20G"),
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
        (80, "1m20s"),
        (3599.6, "1h00m"),
        (7_500, "2h05m"),
        (86_400, "1d00h"),
        (273_600, "3d04h"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_duration_text(seconds, text):
    assert duration_text(seconds) == text
