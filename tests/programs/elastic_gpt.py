"""The program of `elastic_island.py` that trains a small GPT, by the synchronisation of its kind."""

import jax
import numpy as np
import optax

import shardtrain as st
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.models.gpt import GptConfig


class Gpt(st.ElasticProgram):
    """A GPT with dropout, on one device; slots have unequal rows."""

    def __init__(self, kind, num_slots, every):
        synchronisation = {
            "mean": Synchronisation(),
            "int8": Synchronisation(by="int8+mean"),
            "adasum": Synchronisation(by="adasum"),
            # a faster outer step makes rounding grow, in one process too
            "diloco": Synchronisation(on="deltas", every=every, outer=Outer(learning_rate=0.5, momentum=0.5)),
        }[kind]
        model = st.from_nnx(GptConfig(vocab=32, seq=8, embed=16, num_layers=1, num_heads=2, dropout=0.1))
        layout, optimizer = st.Layout(mesh={"data": 1}), optax.adam(3e-3)
        placement = st.make_placement(model, optimizer, layout, st.make_mesh(layout, jax.devices()[:1]))
        # there is something to learn, and too much to learn it by heart
        tokens = np.cumsum(np.random.default_rng(0).integers(0, 3, (4096, 9)), 1, np.int32) % 32
        batches = st.Batches(source=[{"tokens": row} for row in tokens], batch=10)
        state = st.init_state(model, optimizer, placement, seed=0)
        training = st.Training(model, st.next_token_loss, optimizer)
        super().__init__(training, placement, batches, num_slots, state, synchronisation)

    @property
    def result(self):
        """The loss of the newest exchange; nan before the first."""
        return float(self.metrics["loss_sum"] / self.metrics["count"]) if self.metrics else float("nan")
