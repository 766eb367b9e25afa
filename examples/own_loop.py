"""The pieces of shardtrain in a loop of one's own: no run file, no trainer.

python examples/own_loop.py
"""

from pathlib import Path

import optax

import shardtrain as st
from shardtrain.models.gpt import GptConfig

layout = st.Layout(mesh={"data": -1})
mesh = st.make_mesh(layout)
model = st.from_nnx(GptConfig(vocab=256, seq=64, embed=64, num_layers=2, num_heads=4))
optimizer = optax.adamw(3e-3)
placement = st.make_placement(model, optimizer, layout, mesh)
state = st.init_state(model, optimizer, placement, seed=0)
step = st.make_step(model, st.next_token_loss, optimizer, placement)
batches = st.Batches(source=st.Text(seq=64).train(Path("runs/own_loop")), batch=16)
for number, (batch, _position) in zip(range(1, 21), batches.iterate(), strict=False):
    state, metrics = step(state, st.place(batch, mesh, layout.batch_axes))
    if number % 10 == 0:
        print(number, float(metrics["loss_sum"] / metrics["count"]))
