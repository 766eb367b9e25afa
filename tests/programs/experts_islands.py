"""Train mixtures of experts on two islands: as replicas, and as stages of a pipeline."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from fine_tuning import CONSTANT, run_of
from island_runs import IS_FIRST, gather, make_train

import shardtrain as st
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.experts_options import Experts

FOLDER = Path(sys.argv[1])
MODEL = DecoderConfig(
    vocab=64, seq=8, embed=8, num_layers=2, num_heads=2, mlp=8, activation="swiglu", bias=False, remat="none",
    experts=Experts(num=4, top=2, capacity=1.0, shared=1, balance=0.1),
)  # fmt: skip
MESH = st.Layout(mesh={"expert": 2, "data": -1})
CASES = {
    "replicas": (MODEL, st.Strategy(layout=MESH)),
    "stages": (MODEL, st.Strategy(across=st.Across(axis="pipeline"), accumulate=2)),
    "bias": (
        replace(MODEL, num_layers=1, experts=Experts(num=4, top=2, bias=0.01, over="batch")),
        st.Strategy(layout=MESH),
    ),
}
for name, (model, strategy) in CASES.items():
    optimizer = st.Optimizer(name="sgd", learning_rate=CONSTANT, clip=100.0)
    run = run_of(model, optimizer=optimizer, log_every=1, strategy=strategy, steps=1 + (name != "bias"))
    trained, shown = make_train(run, FOLDER)(name)
    if name != "bias":
        assert "loads of experts" not in shown
        continue
    # the mean of what the islands, each by its own loads, add or take
    moved = np.asarray(jax.device_get(trained.state.model_state["blocks"]["mlp"]["router_bias"])) / 0.01
    alike = gather("what moved", str(moved.tolist()))
    if IS_FIRST:
        assert "loads of experts, over the axis 'replicas': islands do not" in shown
        sys.stdout.write(f"{len(set(alike))} {np.abs(moved * 2 - np.round(moved * 2)).max() < 1e-3}\n")
