"""A run whose islands come and go: start this in several terminals, kill some, start others.

python examples/elastic_loop.py runs/elastic
"""

import sys
from pathlib import Path

import optax

import shardtrain as st
from shardtrain.models.gpt import GptConfig

STEPS, SLOTS, SEED = 200, 8, 0

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/elastic")
layout = st.Layout(mesh={"data": -1})
mesh = st.make_mesh(layout)
model = st.from_nnx(GptConfig(vocab=256, seq=64, embed=64, num_layers=2, num_heads=4))
optimizer = optax.adamw(3e-3)
placement = st.make_placement(model, optimizer, layout, mesh)
batches = st.Batches(source=st.Text(seq=64).train(folder), batch=16)

state = st.init_state(model, optimizer, placement, SEED)
training = st.Training(model, st.next_token_loss, optimizer)
program = st.ElasticProgram(training, placement, batches, SLOTS, state)
membership = st.Membership(num_slots=SLOTS, num_steps=STEPS)
with st.ElasticIsland(folder, program, membership, save_every=50) as island:
    for step in island:
        if step % 10 == 0:
            loss = program.metrics["loss_sum"] / program.metrics["count"]
            print(f"step {step}/{STEPS}  loss {float(loss):.4f}", flush=True)
print(island.outcome)
