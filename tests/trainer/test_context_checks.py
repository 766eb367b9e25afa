"""A loss that cuts positions out of shards is refused in stages, where its permute would hang."""

import numpy as np
import pytest
from quiet_training import InMemory, random_tokens
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.axes import AXES
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts
from shardtrain.trainer.layout_check import check_sequences

ROWS = {"tokens": np.zeros((4, 9), np.int32), "weights": np.ones(4, np.float32)}


WINDOWS = InMemory(random_tokens(8, vocab=16))


def own_loss(apply, batch):
    targets = batch["tokens"][:, 2:]
    logits = apply(batch["tokens"][:, :-1])[:, 1:]
    return st.cross_entropy(logits, targets, batch["weights"][:, None] + 0 * targets)


def test_a_loss_that_shifts_sequences_is_refused_in_stages(tmp_path):
    layout = st.Layout(mesh={"pipeline": 2, "data": 2, "context": 2}, context_attention="all-to-all")
    run = st.Run(
        model=TinyConfig(vocab=16, num_layers=2),
        data=WINDOWS,
        loss=own_loss,
        batch=8,
        steps=1,
        strategy=st.Strategy(layout=layout, accumulate=2),
        run_dir=tmp_path,
    )
    with pytest.raises(ValueError, match=r"as in logits\[:, 1:\].*\n  - collective-permute"):
        st.train(run)


def test_collective_matmul_of_a_model_that_multiplies_itself_is_refused(tmp_path):
    """Where tensor has several devices: else there is nothing to exchange."""
    layout = st.Layout(mesh={"data": 4, "tensor": 2}, sequence_sharded=True, collective_matmul=True)
    strategy, model = st.Strategy(layout=layout), TinyConfig(vocab=16)
    run = st.Run(model=model, data=WINDOWS, batch=8, steps=1, strategy=strategy, run_dir=tmp_path)
    with pytest.raises(ValueError, match="no product of this model is computed part by part over tensor=2"):
        st.train(run)
    check_sequences(run, st.from_nnx(model), dict.fromkeys(AXES, 1), ROWS)


def test_sequences_of_a_mixture_of_experts_are_checked():
    """The loss gets its outputs, without what routers count, as in a step."""
    layout = st.Layout(mesh={"tensor": 2}, sequence_sharded=True, collective_matmul=True)
    config = DecoderConfig(vocab=16, seq=8, embed=8, num_layers=2, num_heads=2, experts=Experts(num=2, top=1))
    run = st.Run(model=config, data=WINDOWS, batch=8, steps=1, strategy=st.Strategy(layout=layout))
    sizes = {**dict.fromkeys(AXES, 1), "tensor": 2}
    assert check_sequences(run, st.from_nnx(config), sizes, ROWS) is None
