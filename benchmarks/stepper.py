"""Steps and batches that several benchmarks compile and time."""

from typing import Any

import jax
import numpy as np
import optax

import shardtrain as st
from shardtrain.functional.nnx_model import convert_model


class Stepper:
    """A compiled step of a model with its state, which each call advances.

    Args:
      config: of the model.
      loss: see `shardtrain.functional.loss.Loss`.
      optimizer: any of optax.
      rate: its schedule, for the metrics.
      num_devices: each has rows of its own.
    """

    def __init__(
        self,
        config: Any,
        loss: Any = st.next_token_loss,
        optimizer: optax.GradientTransformation | None = None,
        rate: optax.Schedule | None = None,
        num_devices: int = 1,
    ) -> None:
        self.model, layout = convert_model(config), st.Layout()
        self.optimizer = optax.adamw(3e-4) if optimizer is None else optimizer
        self.mesh, self.axes = st.make_mesh(layout, jax.local_devices()[:num_devices]), layout.batch_axes
        self.placement = st.make_placement(self.model, self.optimizer, layout, self.mesh)
        self.state = st.init_state(self.model, self.optimizer, self.placement)
        self.step: Any = st.make_step(self.model, loss, self.optimizer, self.placement, rate)

    def place(self, batch: Any) -> Any:
        """Put a batch on the devices."""
        return st.place(batch, self.mesh, self.axes)

    def __call__(self, batch: Any) -> Any:
        """Run a step on a batch that is on the devices; return its metrics."""
        self.state, metrics = self.step(self.state, batch)
        return metrics


def random_tokens(vocab: int, rows: int, seq: int, seed: Any = 0) -> dict[str, np.ndarray]:
    """Return a batch of random tokens, of equal weights."""
    tokens = np.random.default_rng(seed).integers(0, vocab, (rows, seq + 1), np.int32)
    return {"tokens": tokens, "weights": np.ones(rows, np.float32)}


def token_shapes(rows: int, seq: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of tokens."""
    return {
        "tokens": jax.ShapeDtypeStruct((rows, seq + 1), np.int32),
        "weights": jax.ShapeDtypeStruct((rows,), np.float32),
    }
