"""Steps of GPT-2 124M, a Llama of 1.2B and a slice of an 8B, compiled for an H100 and TPUs that are not here.

In bfloat16, the last at 8,192 tokens. Nothing runs: the compiler says memory and flops. On a GPU
`overhead.py` measures GPT-2. Figures: docs/benchmarks/gpu.md.

uv run --extra ahead-of-time --extra ahead-of-time-tpu python benchmarks/gpu.py
"""

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.models.decoder import DecoderConfig, gpt2
from shardtrain.models.decoder_flops import flops_per_token
from shardtrain.plan.compile import compile_step, described_devices
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
MODELS: dict[str, tuple[DecoderConfig, int]] = {
    "gpt2-124m": (gpt2(dtype="bfloat16"), 16),
    "llama-1b": (LLAMA_1B, 4),
    "llama-8b, 4 of 32 blocks": (LLAMA_8B_SLICE, 1),
}
"""Name -> the model, and rows of each device."""

TARGETS = {"h100": 1, "a100": 1, "v5p:2x2x1": 4, "v6e:2x2": 4}
"""Kind of absent devices -> their number; their mesh is fsdp over all."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile.

    Args:
      models: names, from those of this file; by default all.
      targets: kinds of absent devices, see `described_devices`.
    """

    models: tuple[str, ...] = tuple(MODELS)
    targets: tuple[str, ...] = ("h100", "v5p:2x2x1", "v6e:2x2")


def compiled_row(name: str, kind: str) -> tuple[str, ...]:
    """Compile a step for absent devices; return its figures per device, or why there are none."""
    config, rows = MODELS[name]
    num_devices = TARGETS[kind]
    model, layout = as_model(config), Layout(mesh={"fsdp": num_devices})
    mesh = make_mesh(layout, described_devices(kind, num_devices))
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


def main(options: Options) -> None:
    if unknown := [name for name in options.models if name not in MODELS]:
        raise SystemExit(f"unknown models {unknown}; use some of {list(MODELS)}")
    if unknown := [kind for kind in options.targets if kind not in TARGETS]:
        raise SystemExit(f"unknown targets {unknown}; use some of {list(TARGETS)}")
    rows = [compiled_row(name, kind) for kind in options.targets for name in options.models]
    print(table_text(HEADER, rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
