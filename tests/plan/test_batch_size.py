"""The largest batch that fits and the fastest one, against searches of all sizes."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from planned_steps import NODES as MACHINE
from planned_steps import RATES, subject_of
from tiny_language_model import TinyConfig

from shardtrain import cli
from shardtrain.functional.nnx_model import convert_model
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.plan.batch_size import CLOSE, BatchSizes
from shardtrain.plan.islands import ReplicaPlanner
from shardtrain.plan.pools import plan_pools
from shardtrain.plan.search import search
from shardtrain.plan.space import Space
from tests.cli.test_inspect import TINY_RUN

TINY = TinyConfig(vocab=64, seq=64, embed=32, num_layers=4, mlp=192)


@pytest.fixture(scope="module")
def tiny():
    return replace(subject_of(TINY), model=lambda remat: convert_model(TINY))


def sizes_of(subject, memory_gb, devices=4, most=1024):
    device = ClusterDevice(
        teraflops=0.1, memory_gb=memory_gb, memory_gb_per_second=10.0, link_gb_per_second=1.0
    )
    cluster = Cluster(islands=(IslandKind(kind="a", devices=devices, device=device),))
    space = Space(remats=(None,))
    return BatchSizes(
        plan=lambda subjects, space: plan_pools(ReplicaPlanner(subjects, cluster, space, 1), "no").pool,
        subjects=[subject],
        space=space,
        accumulate=1,
        multiple=devices,
        most=most,
    )


def test_a_batch_of_another_size_is_predicted_as_if_it_was_traced(tiny):
    machine = replace(MACHINE, rates=replace(RATES, memory_bytes=2e6))
    rows = {name: jax.ShapeDtypeStruct((40, *x.shape[1:]), x.dtype) for name, x in tiny.batch.items()}
    traced, resized = replace(tiny, batch=rows), tiny.resize(40)
    space = Space(remats=(None,))
    assert resized.row_flops == pytest.approx(traced.row_flops)
    for one, other in zip(
        *(search(each, machine, 4, space).ranked for each in (traced, resized)), strict=True
    ):
        assert one.choice == other.choice
        assert one.prediction.seconds.total == pytest.approx(other.prediction.seconds.total)
        assert one.prediction.memory.total == pytest.approx(other.prediction.memory.total)


def test_the_largest_batch_is_the_last_that_fits(tiny):
    sizes = sizes_of(tiny, 0.002)
    found = sizes.find("max")
    space = replace(sizes.space, accumulates=(1,))
    fits = {rows: sizes.plan([tiny.resize(rows)], space).fits for rows in range(4, found.rows + 12, 4)}
    assert found.rows == max(rows for rows in fits if fits[rows]) > 8
    assert found.reason == "the largest that fits with --accumulate 1, in multiples of 4"
    assert sizes_of(tiny, 0.002, most=10).find("max").reason == "all of the data, in multiples of 4"
    nothing = sizes_of(tiny, 1e-5)
    for goal in ("max", "fastest"):
        assert nothing.find(goal) == (1, "not even this batch fits; use more devices or a smaller model")


def test_the_largest_batch_may_need_any_policy_and_has_many_divisors(tiny):
    limits = {"none": 700, "outputs": 5900, "full": 5533}

    def plan(subjects, space):
        most = max(limits[remat] for remat in space.remats) * space.accumulates[0]
        return SimpleNamespace(seconds=1.0 if subjects[0].batch_rows <= most else math.inf)

    sizes = replace(sizes_of(tiny, 1.0, devices=1, most=100_000), space=Space(remats=tuple(limits)))
    found = replace(sizes, plan=plan).find("max")
    assert found == (5888, "the largest that fits with --accumulate 1, in multiples of 128")
    (all_data,) = {replace(sizes, plan=plan, most=most).find("max") for most in (2000, 2015)}
    assert all_data == (1984, "all of the data, in multiples of 32")


def test_the_fastest_batch_is_the_smallest_that_is_about_as_fast_as_any(tiny):
    sizes = sizes_of(tiny, 0.01, most=512)
    found = sizes.find("fastest")
    rates = {rows: rows / sizes.plan([tiny.resize(rows)], sizes.space).seconds for rows in range(4, 257, 4)}
    assert 4 < found.rows < 256
    assert rates[found.rows] >= CLOSE * max(rates.values()) > rates[found.rows - 4]
    assert found.reason.endswith("the most that were tried")


def test_a_plan_takes_the_batch_that_it_finds(tmp_path, capsys):
    path = tmp_path / "tiny_batch.py"
    path.write_text(TINY_RUN)
    machine = ["--devices", "2", "--device", "NVIDIA L4", "--remat", "none", "--most", "1"]
    assert cli.main(["plan", str(path), *machine, "--batch", "max"]) == 0
    line = capsys.readouterr().out.partition("\n")[0]
    assert line == "batch 14: all of the data, in multiples of 2; shardtrain train takes it as --batch 14"
    assert cli.main(["plan", str(path), *machine, "--batch", "0"]) == 2
    assert "batch is 0; use 1 or more" in capsys.readouterr().err
    assert cli.main(["plan", str(path), *machine, "--batch", "maximum"]) == 2
    assert "--batch is 'maximum'; use max, fastest or a number" in capsys.readouterr().err


CLUSTER = """
link_gb_per_second = 10.0
[[islands]]
kind = "a"
devices = 1
device = {{ teraflops = 0.1, memory_gb_per_second = 100, memory_gb = {} }}
[[islands]]
kind = "b"
devices = 1
device = {{ teraflops = 0.05, memory_gb_per_second = 50, memory_gb = {} }}
"""


@pytest.mark.parametrize(
    ("first", "second", "way"), [(8, 1e-5, "one island"), (2.2e-4, 2.2e-4, "1 pipeline")]
)
def test_the_batch_is_for_the_islands_that_are_used(first, second, way, tmp_path, capsys):
    run, cluster = tmp_path / "tiny_islands.py", tmp_path / "cluster.toml"
    run.write_text(TINY_RUN)
    cluster.write_text(CLUSTER.format(first, second))
    assert cli.main(["plan", str(run), "--cluster", str(cluster), "--remat", "none", "--batch", "max"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("batch 14: all of the data, in multiples of 2;")
    assert way in text
