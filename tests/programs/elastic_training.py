"""An island that trains a small GPT with dropout: FOLDER DEVICES; writes losses to losses-DEVICES.jsonl."""

import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

import shardtrain as st
from shardtrain.models.gpt import GptConfig

STEPS, SLOTS, ROWS = 50, 4, 16
MODEL = GptConfig(vocab=32, seq=8, embed=16, num_layers=2, num_heads=2, dropout=0.1)
OPTIMIZER = optax.adamw(1e-2)


def make_parts(devices):
    layout = st.Layout(mesh={"data": len(devices)})
    mesh = st.make_mesh(layout, devices)
    model = st.from_nnx(MODEL)
    placement = st.make_placement(model, OPTIMIZER, layout, mesh)
    state = st.init_state(model, OPTIMIZER, placement, seed=0)
    tokens = np.random.default_rng(0).integers(0, 32, (64, 9), np.int32)
    batches = st.Batches(source=[{"tokens": row} for row in tokens], batch=ROWS)
    return layout, mesh, model, placement, state, batches


def make_program(devices):
    _, _, model, placement, state, batches = make_parts(devices)
    training = st.Training(model, st.next_token_loss, OPTIMIZER)
    return st.ElasticProgram(training, placement, batches, SLOTS, state)


def train_alone(devices):
    """Return the losses of each step by `make_step`."""
    layout, mesh, model, placement, state, batches = make_parts(devices)
    step = st.make_step(model, st.next_token_loss, OPTIMIZER, placement)
    losses = []
    for _, (batch, _position) in zip(range(STEPS), batches.iterate(), strict=False):
        state, metrics = step(state, st.place(batch, mesh, layout.batch_axes))
        losses.append(float(metrics["loss_sum"] / metrics["count"]))
    return losses


if __name__ == "__main__":
    folder, devices = Path(sys.argv[1]), jax.devices()[: int(sys.argv[2])]
    names = folder / "names"
    names.mkdir(exist_ok=True)
    (names / f"pid-{sys.argv[2]}").write_text(str(os.getpid()))

    with (folder / f"losses-{sys.argv[2]}.jsonl").open("w", buffering=1) as output:
        program = make_program(devices)
        membership = st.Membership(num_slots=SLOTS, num_steps=STEPS, min_members=2, minority_seconds=1.0)
        with st.ElasticIsland(folder, program, membership, save_every=10, host="127.0.0.1") as island:
            island.files.describe_member(island.member.me.name, {"mesh": {"data": len(devices)}})
            for step in island:
                loss = program.metrics["loss_sum"] / program.metrics["count"]
                output.write(json.dumps([step, float(loss)]) + "\n")
                time.sleep(0.03)
