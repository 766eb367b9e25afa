"""Steps to a target loss with mean and with Adasum, at more and more replicas, learning rates tuned for both.

The task is real text: the next byte from the eight before it, by a small network. Replicas are a vmapped
dim on one device, and the combiners are those of the package. Figures: docs/benchmarks/adasum.md.
"""

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from paired import markdown

from shardtrain.combine import MeshGroup, make_combiner
from shardtrain.data import Text

VOCAB, EMBED, HIDDEN = 256, 16, 64
CHUNK = 5
"""Steps between two looks at the held-out loss."""

DIVERGED = 8.0
"""A run with such a loss, or with none, is given up: knowing nothing costs log 256 = 5.5."""

BATCH, CONTEXT, HELDOUT = 16, 8, 4096
"""Examples of a replica, bytes from which the next one is predicted, and examples that are evaluated."""


REPLICAS = (1, 4, 16, 64)
BY_OWN = ("mean", "adasum+deltas", "adasum")
"""Combiners; "+deltas" combines what each replica's own optimizer made of its own gradient."""


class Setting(NamedTuple):
    """One way to train, for which learning rates are searched.

    Args:
      optimizer: learning rate -> an optimizer.
      rates: log2 of the learning rates that every combiner tries at every number of replicas.
      combiners: by name.
    """

    optimizer: Callable[[Any], optax.GradientTransformation]
    rates: range
    combiners: tuple[str, ...] = ("mean", "adasum")


SETTINGS = {
    "sgd": Setting(optax.sgd, range(-4, 3)),
    "momentum": Setting(lambda rate: optax.sgd(rate, momentum=0.9), range(-7, 1)),
    "adam": Setting(lambda rate: optax.adam(rate, b2=0.99), range(-10, -3), BY_OWN),
    "lamb": Setting(lambda rate: optax.lamb(rate, b2=0.99), range(-9, 0), BY_OWN),
}
TOO_MANY = 3
"""A run with more steps than this many times the best of its row is given up: it cannot become the best."""


TARGET, MOST_STEPS, SEEDS = 2.6, 1200, 3
"""Held-out loss, nats a byte; steps by which a run is given up; runs, of which the median counts."""


class Task(NamedTuple):
    """Bytes of text: those to train on, and the held-out examples."""

    text: jax.Array
    heldout: tuple[jax.Array, jax.Array]


def make_task(folder: Path) -> Task:
    """The default text of `examples/gpt_text.py`, the sources of Python's standard library."""
    text = Text(seq=CONTEXT)
    tokens = np.load(text.pack(folder).path)
    begin = int(len(tokens) * (1 - text.heldout_fraction))
    starts = np.random.default_rng(0).integers(begin, len(tokens) - CONTEXT - 1, HELDOUT)
    windows = tokens[starts[:, None] + np.arange(CONTEXT + 1)]
    heldout = (jnp.asarray(windows[:, :-1], jnp.int32), jnp.asarray(windows[:, -1], jnp.int32))
    return Task(jnp.asarray(tokens[:begin], jnp.uint8), heldout)


def init(key: jax.Array) -> dict[str, jax.Array]:
    """The network of Bengio et al. 2003: a table, one hidden layer, the logits."""
    keys, width = jax.random.split(key, 3), CONTEXT * EMBED
    return {
        "table": jax.random.normal(keys[0], (VOCAB, EMBED)),
        "hidden": jax.random.normal(keys[1], (width, HIDDEN)) / math.sqrt(width),
        "hidden_bias": jnp.zeros(HIDDEN),
        "head": jax.random.normal(keys[2], (HIDDEN, VOCAB)) * 0.1 / math.sqrt(HIDDEN),
        "head_bias": jnp.zeros(VOCAB),
    }


def loss(params: dict[str, jax.Array], inputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean cross-entropy in nats."""
    embedded = params["table"][inputs].reshape(len(inputs), -1)
    hidden = jnp.tanh(embedded @ params["hidden"] + params["hidden_bias"])
    logits = hidden @ params["head"] + params["head_bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


Carry = tuple[Any, Any, jax.Array]
"""Parameters, state of the optimizer (with a leading dim where replicas own it) and number of the step."""


class Trainer:
    """Runs of one setting, combiner and number of replicas: compiled once for all learning rates."""

    def __init__(self, task: Task, setting: Setting, combiner: str, replicas: int) -> None:
        name, _, on = combiner.partition("+")
        self._task, self._replicas, self._deltas = task, replicas, on == "deltas"
        self._optimizer = setting.optimizer
        self._combiner, self._group = make_combiner(name), MeshGroup("replicas", replicas)
        self._chunk = jax.jit(self._steps)

    def steps_to(self, target: float, rate: float, seed: int, most_steps: float) -> float:
        """How many steps it takes to a held-out loss; infinity where it does not come to it."""
        params = init(jax.random.key(seed))
        opt_state = self._optimizer(1.0).init(params)
        if self._deltas:
            opt_state = jax.tree.map(lambda x: jnp.stack([x] * self._replicas), opt_state)
        carry, steps = (params, opt_state, jnp.int32(0)), 0
        while steps < most_steps:
            carry, found = self._chunk(carry, jnp.float32(rate), jax.random.key(seed + 1000))
            steps += CHUNK
            if found <= target:
                return steps
            if not found < DIVERGED:
                break
        return math.inf

    def _steps(self, carry: Carry, rate: jax.Array, key: jax.Array) -> tuple[Carry, jax.Array]:
        carry, _ = jax.lax.scan(lambda c, _: (self._step(c, rate, key), None), carry, length=CHUNK)
        return carry, loss(carry[0], *self._task.heldout)

    def _step(self, carry: Carry, rate: jax.Array, key: jax.Array) -> Carry:
        (params, opt_state, step), update = carry, self._optimizer(rate).update
        text, shape = self._task.text, (self._replicas, BATCH, 1)
        starts = jax.random.randint(jax.random.fold_in(key, step), shape, 0, len(text) - CONTEXT - 1)
        windows = text[starts + jnp.arange(CONTEXT + 1)].astype(jnp.int32)
        grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, windows[..., :-1], windows[..., -1])
        if self._deltas:
            deltas, opt_state = jax.vmap(update, (0, 0, None))(grads, opt_state, params)
            updates = self._combined(deltas)
        else:
            updates, opt_state = update(self._combined(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, step + 1

    def _combined(self, trees: Any) -> Any:
        def combine(tree: Any) -> Any:
            return self._combiner.combine(tree, jnp.float32(BATCH), (), self._group).value

        found = jax.vmap(combine, axis_name="replicas")(trees)
        return jax.tree.map(lambda x: x[0], found)


class Row(NamedTuple):
    """A way to train, and log2 of the learning rate -> median steps over seeds; infinite: too many."""

    setting: str
    combiner: str
    replicas: int
    steps: dict[int, float]

    @property
    def best(self) -> int:
        """The learning rate with the fewest steps."""
        return min(self.steps, key=lambda rate: self.steps[rate])


def measure() -> Iterator[Row]:
    """Yield all rows."""
    with tempfile.TemporaryDirectory() as name:
        task = make_task(Path(name))
    for name, setting in SETTINGS.items():
        alone = None
        for replicas in REPLICAS:
            # one replica alone is the same whatever combines it
            for combiner in setting.combiners[: None if replicas > 1 else 1]:
                trainer = Trainer(task, setting, combiner, replicas)
                row = Row(name, combiner, replicas, search(trainer, setting, alone))
                if alone is None and row.steps[row.best] < math.inf:
                    alone = row.best
                yield row


def search(
    trainer: Trainer, setting: Setting, alone: int | None, target: float = TARGET, limit: int = MOST_STEPS
) -> dict[int, float]:
    """Return log2 of the learning rate -> the median of the steps over seeds.

    Args:
      alone: the rate that was best for one replica: tried first, and never given up early.
    """
    found: dict[int, float] = {}
    near = setting.rates[len(setting.rates) // 2] if alone is None else alone
    for rate in sorted(setting.rates, key=lambda rate: abs(rate - near)):
        least = min(found.values(), default=math.inf)
        most = limit if rate == alone else min(limit, TOO_MANY * least)
        found[rate] = median(trainer.steps_to(target, 2.0**rate, seed, most) for seed in range(SEEDS))
    return found


def table(rows: Sequence[Row]) -> str:
    """Format steps tuned, and at the rate that was best for one replica."""
    lines: list[tuple[object, ...]] = []
    alone: dict[str, int] = {}
    for row in rows:
        rate = row.best
        at_one = row.steps[alone.setdefault(row.setting, rate)]
        lines.append((row.setting, row.replicas, row.combiner, row.steps[rate], f"2^{rate}", at_one))
    header = ["optimizer", "P", "combiner", "steps, tuned", "its rate", "at one replica's rate"]
    return markdown(header, lines)


def main() -> None:
    rows = []
    for row in measure():
        print(row, flush=True)
        rows.append(row)
    print(table(rows))


if __name__ == "__main__":
    main()
