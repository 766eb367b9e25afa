"""Steps that were measured on one H200, beside what the planner predicts for them. No GPU, nothing runs.

The measured figures are those of docs/benchmarks/gpu.md; the predictions are what `shardtrain plan` counts
for one "NVIDIA H200". Figures: docs/benchmarks/planner.md.

uv run python benchmarks/gpu_predicted.py
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from gpu import CASES, LLAMA_1B, LLAMA_8B_SLICE, ROOMY, here

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import convert_model
from shardtrain.islands.cluster_device import ClusterDevice
from shardtrain.models.decoder import DecoderConfig
from shardtrain.optim.optimizer import Optimizer, make_optimizer
from shardtrain.plan.machine import make_machine
from shardtrain.plan.predict import predict_choices
from shardtrain.plan.prediction import Choice, Prediction
from shardtrain.plan.subject import Subject
from shardtrain.plan.trace import Target
from shardtrain.report.tables import table_text
from shardtrain.sharding.layout import Layout

DEVICE = "NVIDIA H200"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that was measured.

    Args:
      name: of the model, and what it recomputes.
      config: the model.
      rows: of the batch.
      ms: of a step, measured; None: only its memory was.
      memory_gib: the most memory in use, measured; None: it was not.
    """

    name: str
    config: DecoderConfig
    rows: int
    ms: float | None = None
    memory_gib: float | None = None


STEPS = (
    Step(name="GPT-2 124M", config=here(CASES["gpt2-124m"]), rows=32, ms=61.0, memory_gib=16.9),
    Step(name="Llama 1.2B, remat weights", config=replace(LLAMA_1B, remat="weights"), rows=8, ms=248),
    Step(name="Llama 1.2B, remat outputs", config=LLAMA_1B, rows=8, ms=295),
    Step(
        name="Llama 1.2B, remat weights, all logits",
        config=replace(LLAMA_1B, **ROOMY),
        rows=8,
        memory_gib=42.7,
    ),
    Step(name="4 of 32 blocks of a Llama 8B, remat outputs", config=LLAMA_8B_SLICE, rows=1, ms=172),
)


def predicted(step: Step) -> Prediction:
    """Return what the planner predicts for a step on one device."""
    model = convert_model(step.config)
    batch = {
        "tokens": jax.ShapeDtypeStruct((step.rows, step.config.seq + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((step.rows,), jnp.float32),
    }
    subject = Subject(
        model=lambda _: model,
        loss=next_token_loss,
        optimizer=make_optimizer(Optimizer(), 1000, model.dims)[0],
        batch=batch,
        target=Target(DEVICE, one_device=True),
    )
    machine = make_machine(ClusterDevice(name=DEVICE), 1, in_float32=False)
    (found,) = predict_choices(subject, machine, 1, [Choice(layout=Layout())])
    return found


def compared(measured: float | None, found: float) -> tuple[str, str, str]:
    """Format a measured figure, the predicted one, and predicted over measured."""
    if measured is None:
        return "", f"{found:.1f}", ""
    return f"{measured:.1f}", f"{found:.1f}", f"{found / measured:.2f}"


HEADER = (
    "model", "rows x tokens", "measured ms", "predicted ms", "ratio",
    "measured GiB", "predicted GiB", "ratio",
)  # fmt: skip


def main() -> None:
    rows = []
    for step in STEPS:
        found = predicted(step)
        times = compared(step.ms, 1e3 * found.seconds.total)
        memory = compared(step.memory_gib, found.memory.total / 2**30)
        rows.append((step.name, f"{step.rows} x {step.config.seq}", *times, *memory))
    print(f"one {DEVICE}, nothing runs")
    print(table_text(HEADER, rows))


if __name__ == "__main__":
    main()
