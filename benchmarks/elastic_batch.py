"""Held-out loss after equal samples where islands come and go: one batch in a step, or one for each member.

A small GPT on text, with the numbers of `train --elastic 1..4` in one process. Members are 1, 3, 2 and 4 for
a quarter of the samples each. The rate is the best of the fixed batch, and falls to 0 with the samples.
"""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from paired import markdown

import shardtrain as st
from shardtrain.models.gpt import GptConfig
from shardtrain.optim.scaling import RATES

MEMBERS, BATCH, BATCHES, SEEDS = (1, 3, 2, 4), 8, 960, 3
CONFIG = GptConfig(vocab=256, seq=32, embed=32, num_layers=1, num_heads=2)

Make = Callable[[optax.Schedule], optax.GradientTransformation]
OPTIMIZERS: dict[str, tuple[Make, Sequence[float]]] = {
    "SGD, momentum 0.9": (lambda rate: optax.sgd(rate, momentum=0.9), (0.03, 0.1, 0.3)),
    "Adam": (lambda rate: optax.adam(rate), (3e-3, 1e-2, 3e-2)),
}


def list_sizes(grows: bool) -> list[int]:
    """Return the number of batches of each step."""
    quarter = BATCHES // len(MEMBERS)
    return [size for each in MEMBERS for size in ([each] * (quarter // each) if grows else [1] * quarter)]


class Task:
    """The data, and a run of one process."""

    def __init__(self, folder: Path) -> None:
        text = st.Text(seq=CONFIG.seq)
        self.source, heldout = text.train(folder), text.heldout(folder)
        assert heldout is not None
        rows = st.Batches(source=heldout, batch=256, shuffle=False).load({"epoch": 0, "index": 0})
        self.rows = {name: x[None] for name, x in rows.items()}

    def train(self, make: Make, peak: float, sizes: Sequence[int], rule: str, by: str, seed: int) -> float:
        """Return the held-out loss at the end."""
        read = np.cumsum([0, *sizes])
        left = jnp.array(1 - read / read[-1], jnp.float32)
        layout, model = st.Layout(mesh={"data": 1}), st.from_nnx(CONFIG)
        mesh = st.make_mesh(layout, jax.devices()[:1])
        optimizer = make(lambda step: peak * left[step])
        placement = st.make_placement(model, optimizer, layout, mesh)
        training = st.Training(model, st.next_token_loss, optimizer)
        batches = st.Batches(source=self.source, batch=BATCH, seed=seed)
        state = st.init_state(model, optimizer, placement, seed)
        by_all = st.Synchronisation(by=by)
        program = st.ElasticProgram(
            training, placement, batches, 1, state, by_all, members=max(MEMBERS), rate=rule
        )
        for step, (start, size) in enumerate(zip(read[:-1].tolist(), sizes, strict=True)):
            program.apply(step, program.compute(step, range(size), range(start, start + size)))
        gradients = jax.jit(st.make_gradients(model, st.next_token_loss, placement))
        return float(gradients(program.state.params, {}, jax.random.key(0), self.rows, 0).mean_loss)

    def measure(self, make: Make, peak: float, sizes: Sequence[int], rule: str, by: str) -> float:
        """Return the median over seeds."""
        return statistics.median(self.train(make, peak, sizes, rule, by, seed) for seed in range(SEEDS))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # seeds share their programs
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        task, rows = Task(Path(folder)), []
        for name, (make, peaks) in OPTIMIZERS.items():
            fixed, grown = list_sizes(False), list_sizes(True)
            losses = {peak: task.train(make, peak, fixed, "none", "mean", 0) for peak in peaks}
            best = min(losses, key=losses.__getitem__)
            found = [task.measure(make, best, fixed, "none", "mean")]
            found += [task.measure(make, best, grown, rule, "mean") for rule in RATES]
            found.append(task.measure(make, best, grown, "none", "adasum"))
            rows.append([f"{name}, rate {best}", *(f"{loss:.3f}" for loss in found)])
            print({peak: round(loss, 3) for peak, loss in losses.items()}, rows[-1], flush=True)
    rules = [f"members, {rule}" for rule in RATES]
    print(f"{len(fixed)} steps, or {len(grown)} with members")
    print(markdown(["", "fixed", *rules, "members, Adasum"], rows))


if __name__ == "__main__":
    main()
