"""What a plan says beside its ranking: the frontier, the nearest that runs, rates, prices, utilization."""

from dataclasses import replace
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from planned_steps import ONE_NODE as MACHINE
from planned_steps import subject_of

from shardtrain import next_token_loss
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.traced_loss import loss_count
from shardtrain.islands.cluster import Cluster, IslandKind
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.plan.islands import ReplicaPlanner
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.search import find_frontier
from shardtrain.plan.space import (
    Space,
    find_nearest_batch,
    find_nearest_devices,
    list_allowed_choices,
    nearest_text,
)
from shardtrain.report.plan import plan_text
from shardtrain.report.plots.frontier import check_frontier, plot_frontier
from shardtrain.sharding.layout import Layout

CONFIG = DecoderConfig(vocab=64, seq=64, embed=32, num_layers=4, num_heads=4, mlp=128)
ROWS = 16
SPACE = Space(accumulates=(1, 4), remats=("none", "dots", "full"))


@pytest.fixture(scope="module")
def subject():
    return subject_of(CONFIG, ROWS, unit="tokens", row_units=float(CONFIG.seq))


def test_no_way_beats_the_frontier_in_memory_and_time(subject):
    found, points = find_frontier(subject, MACHINE, 4, SPACE)
    tried = [
        replace(choice, remat=remat)
        for choice, remat in product(list_allowed_choices(subject, 4, SPACE)[0], SPACE.remats)
    ]
    exact = [(each.memory.total, each.seconds.total) for each in predict_choices(subject, MACHINE, 4, tried)]
    unbeaten = {(m, s) for m, s in exact if not any(a <= m and b <= s and (a, b) != (m, s) for a, b in exact)}
    assert {(each.prediction.memory.total, each.prediction.seconds.total) for each in found} == unbeaten
    assert len(unbeaten) > 2
    assert set(points) <= set(exact)


def test_the_frontier_is_drawn(subject, tmp_path):
    found, points = find_frontier(subject, MACHINE, 2, SPACE)
    path = tmp_path / "frontier.png"
    check_frontier(path)
    plot_frontier(found, points, 1e9, path, title="2 devices")
    assert path.read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(ValueError, match=r"--frontier is f\.jpg; it is drawn as \.png or \.svg: use f\.png"):
        check_frontier(type(path)("f.jpg"))
    with pytest.raises(ValueError, match="there is no folder"):
        check_frontier(tmp_path / "no" / "f.png")


def test_the_nearest_batch_and_number_of_devices_run(subject):
    # 7 devices divide neither 16 rows nor any dim of the model
    assert not list_allowed_choices(subject, 7, SPACE)[0]
    assert find_nearest_batch(subject, 7, SPACE) == 14
    assert find_nearest_devices(subject, 7, SPACE) == 8
    assert nearest_text(subject, 7, SPACE) == "nearest that runs: a batch of 14 rows or 8 devices"
    fixed = Space(layout=Layout(mesh={"tensor": 3}), accumulates=(1,))
    assert nearest_text(subject, 3, fixed).startswith("no other batch and no near number of devices runs")


def test_a_loss_counts_its_rows_without_the_model():
    model = convert_model(CONFIG)
    rows = {"tokens": np.zeros((2, CONFIG.seq + 1), np.int32), "weights": np.array([1, 0], np.float32)}
    assert loss_count(model, next_token_loss, rows) == CONFIG.seq

    def confident(apply, batch):
        outputs = apply(batch["tokens"][:, :-1])
        return outputs.sum(), (outputs > 0).sum().astype(jnp.float32)

    assert loss_count(model, confident, rows) is None


def test_the_text_says_rates_prices_and_what_is_free(subject):
    device = ClusterDevice(name="NVIDIA L4", link_gb_per_second=10.0, price_per_hour=0.5)

    def text(devices):
        cluster = Cluster(islands=(IslandKind(kind="l4", devices=devices, device=device),))
        plan = ReplicaPlanner([subject], cluster, SPACE, most=3).plan_all()
        return plan, plan_text(plan, 3)

    plan, shown = text(2)
    per_second = ROWS / plan.seconds
    price = 2 * 0.5 / 3600
    assert f"{price / per_second * 1e6:.3g} for 1e6 examples" in shown
    assert f"{price / (per_second * CONFIG.seq) * 1e9:.3g} for 1e9 tokens" in shown
    # flops of the traced model are those of the formula, so that the share of the peak is the field's MFU
    assert subject.row_flops == pytest.approx(CONFIG.seq * flops_per_token(CONFIG), rel=0.05)
    (kind,) = plan.kinds
    mfu = ROWS * subject.row_flops / (2 * 30.3e12 * plan.seconds)
    assert kind.machine.peak_flops_per_second == 30.3e12
    assert f"{mfu:.0%}" in shown
    plan, shown = text(7)
    assert not plan.fits
    assert "nothing runs" in shown
    assert "nearest that runs: a batch of 14 rows or 8 devices" in shown
    # one line for each reason, with the change to make
    assert "--mesh tensor=7 and 1 like it: blocks/attention/k/bias" in shown
    assert "Use a total of 1" in shown
    assert "use one of 1, 2, 4" in shown
