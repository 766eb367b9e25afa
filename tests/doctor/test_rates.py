"""Rates: outliers by value, wrong products, a real measurement of one device."""

import jax
import pytest

from shardtrain.doctor import rates
from shardtrain.doctor.rates import evaluate, make_product, measure


def device(speed=1.0, kind="NVIDIA H100 80GB HBM3", platform="gpu", exact=True):
    figures = {"float32": 5e13 * speed, "bfloat16": 7e14 * speed, "memory": 2.8e12 * speed}
    return {"kind": kind, "platform": platform, "exact": exact, **figures}


def ranks(told, *devices):
    return evaluate(told([{"devices": [one]} for one in devices], "abcdef"[: len(devices)]))


def test_equal_devices_are_well(told, by_what):
    rows = by_what(ranks(told, device(), device(0.9)))
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["bfloat16 products"].finding == (
        "2 x NVIDIA H100 80GB HBM3: 630.0 to 700.0 Tflop/s, median 665.0 Tflop/s"
    )


def test_a_device_below_the_median_of_its_kind_is_named(told, by_what):
    rows = by_what(ranks(told, device(), device(0.7), device()))
    for row in rows.values():
        assert row.status == "warning"
        assert "slow: rank 1 device 0" in row.finding
        assert "(70%)" in row.finding


def test_kinds_are_not_compared_with_each_other(told):
    rows = ranks(told, device(), device(0.1, kind="cpu", platform="cpu"))
    assert {row.status for row in rows} == {"ok"}
    assert len(rows) == 6


def test_the_ranks_of_a_cpu_may_disturb_each_other_more(told):
    def cpu(speed):
        return device(speed, kind="cpu", platform="cpu")

    assert {row.status for row in ranks(told, cpu(1.0), cpu(0.7), cpu(1.0))} == {"ok"}
    assert {row.status for row in ranks(told, cpu(1.0), cpu(0.4), cpu(1.0))} == {"warning"}


def test_all_devices_far_below_their_data_sheet_are_a_warning(told, by_what):
    rows = by_what(ranks(told, device(0.3), device(0.3)))
    assert rows["bfloat16 products"].status == rows["memory bandwidth"].status == "warning"
    assert "21% of the data sheet's 989.5 Tflop/s" in rows["bfloat16 products"].finding
    assert rows["float32 products"].status == "ok"


def test_a_wrong_product_is_wrong(told, by_what):
    row = by_what(ranks(told, device(), device(exact=False)))["exact products"]
    assert (row.status, row.finding[-15:]) == ("wrong", "rank 1 device 0")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_is_checked_against_what_it_must_be(dtype, monkeypatch):
    _, is_right = make_product(jax.local_devices()[0], 64, dtype)
    assert is_right()
    multiply = jax.numpy.matmul
    monkeypatch.setattr(
        jax.numpy, "matmul", lambda a, b, **options: multiply(a, b, **options).at[3, 5].add(1)
    )
    _, is_right = make_product(jax.local_devices()[0], 64, dtype)
    assert not is_right()


def test_a_device_is_measured(monkeypatch):
    monkeypatch.setitem(rates.SIZES, "cpu", (128, 2**16))
    found = measure(jax.local_devices()[0])
    assert found["exact"]
    assert min(found["float32"], found["bfloat16"], found["memory"]) > 0
