"""The best shardings of operators send in the compiled step what the search predicts, and less than rules."""

from collections import Counter

import pytest
from planned_steps import compiled, subject_of

import shardtrain as st
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.prediction import Choice
from shardtrain.plan.simulator.operator_search import plan_operators
from shardtrain.trainer.planned_operators import make_operator_strategy

CONFIG = DecoderConfig(vocab=512, seq=32, embed=256, num_layers=2, num_heads=8, mlp=1024)
MACHINE = Machine(
    rates=Rates(flops_per_second=1e14, memory_bytes_per_second=1e12, kernel_seconds=1e-6, memory_bytes=1e10),
    devices_per_node=4,
    device_link=Link(bytes_per_second=3e10),
    node_link=Link(bytes_per_second=1e10),
)


def test_the_compiled_step_sends_what_the_search_predicts():
    subject = subject_of(CONFIG, rows=8)
    found = plan_operators(
        subject, MACHINE, 8, layout=st.Layout(mesh={}), remat="none", proposals=400, seed=0
    )
    run = st.Run(
        model=CONFIG,
        data=st.Text(seq=CONFIG.seq),
        loss=subject.loss,
        batch=8,
        optimizer=subject.optimizer,
        strategy=st.Strategy(),
    )
    strategy = make_operator_strategy(run, subject.batch, found, "none")
    assert found.best is not None
    assert strategy.layout.operators
    sent = {}
    for name, layout, predicted in (
        ("rules", found.layout, found.by_rules.sent_bytes),
        ("operators", strategy.layout, found.best[1].best.sent_bytes),
    ):
        _, by_axes = compiled(subject, Choice(layout=layout, remat="none"), 8)
        by_axes = Counter({over: num_bytes for over, num_bytes in by_axes.items() if num_bytes})
        assert by_axes == pytest.approx(predicted, rel=0.05)
        sent[name] = by_axes.total()
    assert sent["operators"] < 0.6 * sent["rules"]
