"""The best shardings of operators send in the compiled step what the search predicts, and less than rules."""

from collections import Counter
from dataclasses import replace

import jax
import pytest
from planned_steps import compiled, subject_of

import shardtrain as st
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.linen_decoder import LinenDecoder
from shardtrain.plan.machine import Link, Machine, Rates
from shardtrain.plan.operators.search import plan_operators
from shardtrain.plan.predict import steps, sum_sent_by_axes
from shardtrain.plan.search import search
from shardtrain.plan.space import Space
from shardtrain.trainer.config import make_model
from shardtrain.trainer.planned import make_operator_choice

CONFIG = DecoderConfig(vocab=512, seq=32, embed=256, num_layers=2, num_heads=8, mlp=1024)
MACHINE = Machine(
    rates=Rates(flops_per_second=1e14, memory_bytes_per_second=1e12, kernel_seconds=1e-6, memory_bytes=1e10),
    devices_per_node=4,
    device_link=Link(bytes_per_second=3e10),
    node_link=Link(bytes_per_second=1e10),
)


def make_subjects():
    """Name -> a run of a model, and what is planned of it."""
    run = st.Run(model=CONFIG, data=st.Text(seq=CONFIG.seq), loss=st.next_token_loss, batch=8)
    # its blocks are computed again in the backward, which sends again
    small = replace(CONFIG, vocab=256, embed=128, mlp=512, remat="dots")
    decoder = st.from_linen(LinenDecoder(small), jax.ShapeDtypeStruct((1, 32), "int32"))
    linen = replace(run, model=decoder)
    return {
        "decoder": (run, subject_of(CONFIG, rows=8)),
        "linen": (linen, subject_of(CONFIG, rows=8, model=lambda _: make_model(linen))),
    }


@pytest.mark.parametrize("name", ["decoder", "linen"])
def test_the_compiled_step_sends_what_the_search_predicts(name):
    run, subject = make_subjects()[name]
    space = Space(layout=st.Layout(mesh={"pipeline": 1}), accumulates=(1,), remats=(None,))
    best, *_ = search(subject, MACHINE, 8, space, most=1).ranked
    found = plan_operators(subject, MACHINE, 8, space=space, best=best)
    assert found.best is not None
    choice = make_operator_choice(run, subject.batch, found.best)
    assert choice.choice.layout.operators
    sent = {}
    for each in (best, choice):
        layout = replace(each.choice.layout, operators={})
        (step,) = steps(subject, MACHINE, 8, [replace(each.choice, layout=layout)])
        # XLA for CPU adds up the gradients of a table that is used twice separately
        predicted = sum_sent_by_axes(step, simulated=True)
        if each.change is not None:
            predicted = each.change.predict_sent(predicted)
        _, by_axes = compiled(subject, each.choice, 8)
        by_axes = Counter({over: num_bytes for over, num_bytes in by_axes.items() if num_bytes})
        assert by_axes == pytest.approx(predicted, rel=0.05)
        sent[each.change is not None] = by_axes.total()
    assert sent[True] < 0.7 * sent[False]
