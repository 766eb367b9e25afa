"""Steps of GPT-2 124M, a Llama of 1.2B and a slice of an 8B, in bfloat16, the last at 8,192 tokens.

On a GPU they run, in the toolkit's loop and in a hand-written one in turn (`overhead.py`), and training is
started twice, up to its first step (`startup.py`): this file is its run file too. Elsewhere they are compiled
for GPUs and TPUs that are not here: nothing runs, the compiler says memory and flops. Figures:
docs/benchmarks/gpu.md.

uv run --extra ahead-of-time --extra ahead-of-time-tpu python benchmarks/gpu.py
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import overhead
import startup
import tyro

from shardtrain import Optimizer, Run, Schedule, Text
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import convert_model
from shardtrain.models.decoder import DecoderConfig, gpt2
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.plan.compile import compile_step, describe_devices
from shardtrain.plan.hlo.flops import matrix_flops
from shardtrain.report.tables import table_text
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

LLAMA_1B = DecoderConfig(
    vocab=128_256, seq=2048, embed=2048, num_layers=16, num_heads=32, num_kv_heads=8, mlp=8192,
    positions="rotary", theta=500_000.0, norm="rmsnorm", activation="swiglu", bias=False, tied=True,
    dtype="bfloat16", remat="outputs", loss_chunk=2048,
)  # fmt: skip
LLAMA_8B_SLICE = DecoderConfig(
    vocab=128_256, seq=8192, embed=4096, num_layers=4, num_heads=32, num_kv_heads=8, mlp=14_336,
    positions="rotary", theta=500_000.0, norm="rmsnorm", activation="swiglu", bias=False, tied=False,
    dtype="bfloat16", remat="outputs", loss_chunk=2048,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how much of it is one step.

    Args:
      config: the model, as it is compiled for absent devices.
      rows: of a step, on each absent device.
      rows_here: of a step on a GPU that is here.
      changes: of the model's options there, where attention keeps no scores.
      rounds: blocks of each loop there.
    """

    config: DecoderConfig
    rows: int
    rows_here: int
    changes: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 4


# no block is recomputed, and all logits are there at once
ROOMY = {"remat": "weights", "loss_chunk": None}
CASES = {
    # the vocabulary is filled up to a multiple of 128, as nanoGPT does: 50,257 columns do not align
    "gpt2-124m": Case(
        config=gpt2(dtype="bfloat16"), rows=16, rows_here=32, changes={"vocab": 50304}, rounds=8
    ),
    "llama-1b": Case(config=LLAMA_1B, rows=4, rows_here=8, changes=ROOMY),
    "llama-8b, 4 of 32 blocks": Case(config=LLAMA_8B_SLICE, rows=1, rows_here=2, changes=ROOMY),
}
"""Name -> what one step is of."""


def here(case: Case) -> DecoderConfig:
    """Return the model of a case as it runs on a GPU that is here."""
    return replace(case.config, **case.changes)


TARGETS = {"h100": 1, "a100": 1, "v5p:2x2x1": 4, "v6e:2x2": 4}
"""Kind of absent devices -> their number; their mesh is fsdp over all."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to run or compile.

    Args:
      models: names, from those of this file; by default all.
      targets: where no GPU is here: kinds of absent devices, see `describe_devices`.
      steps: of a block of each loop, where a GPU is here.
    """

    models: tuple[str, ...] = tuple(CASES)
    targets: tuple[str, ...] = ("h100", "v5p:2x2x1", "v6e:2x2")
    steps: int = 12


def compiled_row(name: str, kind: str) -> tuple[str, ...]:
    """Compile a step for absent devices; return its figures per device, or why there are none."""
    config, rows = CASES[name].config, CASES[name].rows
    num_devices = TARGETS[kind]
    model, layout = convert_model(config), Layout(mesh={"fsdp": num_devices})
    mesh = make_mesh(layout, describe_devices(kind, num_devices))
    optimizer = optax.adamw(3e-4)
    placement = make_placement(model, optimizer, layout, mesh)
    batch = {
        "tokens": jax.ShapeDtypeStruct((rows * num_devices, config.seq + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((rows * num_devices,), jnp.float32),
    }
    start = time.perf_counter()
    try:
        compiled = compile_step(model, next_token_loss, optimizer, placement, batch)
    except jax.errors.JaxRuntimeError as error:
        return (name, f"{num_devices} x {kind}", f"refused: {str(error).splitlines()[0][:90]}", *[""] * 6)
    seconds = time.perf_counter() - start
    memory: Any = compiled.memory_analysis()
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    whole = state + temporary + memory.output_size_in_bytes - memory.alias_size_in_bytes
    model_flops = flops_per_token(config) * config.seq * rows
    return (
        name,
        f"{num_devices} x {kind}",
        f"{rows} x {config.seq}",
        *(f"{each / 2**30:.2f}" for each in (state, temporary, whole)),
        f"{model_flops / 1e12:.1f}",
        f"{matrix_flops(compiled.as_text() or '') / model_flops:.2f}",
        f"{seconds:.0f}",
    )


HEADER = (
    "model", "devices", "rows x tokens a device", "state, batch GiB", "temporary GiB", "all GiB",
    "model Tflops", "executed over model", "compile s",
)  # fmt: skip


STARTED = ("model", "peak GiB", "first start s, of it compiling", "second start s, of it loading")
MEASURED = (
    "model", "rows x tokens", "ms a step", "tokens/s", "MFU", "loop over hand-written (95 %)",
    "step over hand-written (95 %)", "losses differ by",
)  # fmt: skip


def run() -> Run:
    """Return the run that is started: a model of published size on the bytes of real text."""
    case = CASES[os.environ["GPU_MODEL"]]
    return Run(
        model=here(case),
        data=Text(seq=here(case).seq, heldout_fraction=0),
        optimizer=Optimizer(learning_rate=Schedule(peak=3e-4)),
        batch=case.rows_here,
        steps=60,
    )


def has_gpu() -> bool:
    """Ask another process whether jax finds a GPU, whose memory this one would keep from later ones."""
    question = "import jax; print(jax.default_backend())"
    return "gpu" in subprocess.run([sys.executable, "-c", question], stdout=subprocess.PIPE, text=True).stdout


def started(name: str) -> tuple[str, ...]:
    """Start the training of a model twice up to its first step; return the figures.

    Returns:
      The most memory in use, then for each start its seconds, and those that compile or load programs.
    """
    os.environ["GPU_MODEL"] = name
    words = (__file__,)
    with tempfile.TemporaryDirectory() as folder:
        starts = [startup.start(words, Path(folder, str(i)), Path(folder, "programs")) for i in range(2)]
    times = [f"{found['together'][0]:.1f}, {found['together'][1]:.1f}" for found, _ in starts]
    return f"{(starts[0][1] or 0) / 2**30:.1f}", *times


def measured(name: str, steps: int) -> tuple[str, ...]:
    """Run a model in both loops; return the figures."""
    case = CASES[name]
    config = here(case)
    figures = overhead.measure(overhead.Options(steps=steps, rounds=case.rounds), config, case.rows_here)
    spreads = (figures.spreads[pair]["step_seconds"] for pair in ("whole loop", "compiled step alone"))
    return (
        name,
        f"{case.rows_here} x {config.seq}",
        f"{1e3 * figures.step_seconds[overhead.TOOLKIT]:.2f}",
        f"{figures.tokens_per_second:,.0f}",
        "?" if figures.mfu is None else f"{figures.mfu:.1%}",
        *map(str, spreads),
        f"{figures.difference:.1e}",
    )


def main(options: Options) -> None:
    if has_gpu():
        # printed one by one, in case the next one does not fit
        for name in options.models:
            print(table_text(STARTED, [(name, *started(name))]), flush=True)
        for name in options.models:
            print(table_text(MEASURED, [measured(name, options.steps)]), flush=True)
        print(f"{jax.devices()[0].device_kind}; jax {jax.__version__}")
        return
    rows = [compiled_row(name, kind) for kind in options.targets for name in options.models]
    print(table_text(HEADER, rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
