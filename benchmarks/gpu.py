"""Steps of GPT-2 124M, a Llama of 1.2B and a slice of an 8B, in bfloat16, the last at 8,192 tokens, on a GPU.

They run in the toolkit's loop and in a hand-written one in turn (`overhead.py`), and training is started
twice, up to its first step (`startup.py`): this file is its run file too. Figures: docs/benchmarks/gpu.md.

uv run python benchmarks/gpu.py
"""

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import loops
import overhead
import startup
import tyro
from paired import markdown

from shardtrain import Optimizer, Run, Schedule, Text
from shardtrain.models.decoder import DecoderConfig, gpt2
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.plan.devices import find_device

LLAMA_1B = DecoderConfig(
    vocab=128_256, seq=2048, embed=2048, num_layers=16, num_heads=32, num_kv_heads=8, mlp=8192,
    positions="rotary", theta=500_000.0, norm="rmsnorm", activation="swiglu", bias=False, tied=True,
    dtype="bfloat16", remat="outputs", loss_chunk=2048,
)  # fmt: skip
LLAMA_8B_SLICE = replace(LLAMA_1B, seq=8192, embed=4096, num_layers=4, mlp=14_336, tied=False)


class Case(NamedTuple):
    """A model, rows of a step, and blocks of each loop."""

    config: DecoderConfig
    rows: int
    rounds: int = 4


# no block is recomputed, and all logits are there at once
ROOMY: Mapping[str, Any] = {"remat": "weights", "loss_chunk": None}
CASES = {
    # the vocabulary is filled up to a multiple of 128, as nanoGPT does: 50,257 columns do not align
    "gpt2-124m": Case(gpt2(dtype="bfloat16", vocab=50304), rows=32, rounds=8),
    "llama-1b": Case(replace(LLAMA_1B, **ROOMY), rows=8),
    "llama-8b, 4 of 32 blocks": Case(replace(LLAMA_8B_SLICE, **ROOMY), rows=2),
}
"""Name -> what one step is of."""


STARTED = ("model", "first start, s", "second start, s", "peak memory")
MEASURED = (
    "model", "rows x tokens", "ms a step", "tokens/s", "MFU", "loop over hand-written (95 %)",
    "step over hand-written (95 %)", "losses differ by",
)  # fmt: skip


def run() -> Run:
    """Return the run that is started: a model of published size on the bytes of real text."""
    case = CASES[os.environ["GPU_MODEL"]]
    return Run(
        model=case.config,
        data=Text(seq=case.config.seq, heldout_fraction=0),
        optimizer=Optimizer(learning_rate=Schedule(peak=3e-4)),
        batch=case.rows,
    )


def started(name: str) -> tuple[str, ...]:
    """Start the training of a model twice up to its first step; return the figures."""
    os.environ["GPU_MODEL"] = name
    with tempfile.TemporaryDirectory() as folder:
        starts = [startup.start(__file__, Path(folder), str(i)) for i in range(2)]
    (peak,) = [line for line in starts[0][1].splitlines() if line.startswith("peak memory")]
    return name, *(f"{seconds:.1f}" for seconds, _ in starts), peak.rpartition(": ")[2]


def measured(name: str) -> tuple[str, ...]:
    """Run a model in both loops; return the figures."""
    case = CASES[name]
    figures = overhead.measure(case.config, case.rows, steps=12, rounds=case.rounds)
    seconds = figures.step_seconds(overhead.TOOLKIT)
    tokens_per_second = case.rows * case.config.seq / seconds
    device = find_device(jax.devices()[0].device_kind)
    peak = (device and device.matrix_flops_per_second) or math.nan
    return (
        name,
        f"{case.rows} x {case.config.seq}",
        f"{1e3 * seconds:.2f}",
        f"{tokens_per_second:,.0f}",
        f"{tokens_per_second * flops_per_token(case.config) / peak:.1%}",
        *(str(figures.ratio(pair, "step_seconds")) for pair in ("whole loop", "compiled step alone")),
        f"{loops.largest_difference(*figures.losses):.1e}",
    )


def main(models: tuple[str, ...] = tuple(CASES)) -> None:
    """Print the figures of models."""
    # processes first, whose memory this one would keep; printed one by one, in case the next does not fit
    for name in models:
        print(markdown(STARTED, [started(name)]), flush=True)
    for name in models:
        print(markdown(MEASURED, [measured(name)]), flush=True)
    print(f"{jax.devices()[0].device_kind}; jax {jax.__version__}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
