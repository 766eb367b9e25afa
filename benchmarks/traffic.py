"""What a step moves between 8 devices, beside what theory says: one table row for each kind of collective.

Compiled ahead of time, for simulated CPU devices or for GPUs that are not here; nothing runs. The model is
GPT-2 medium. Figures: docs/benchmarks/traffic.md.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import tyro

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.transformer_options import Dtypes
from shardtrain.plan.compile import Figures, compile_step, describe_devices, figures
from shardtrain.plan.hlo.collectives import sum_by_axis
from shardtrain.plan.traffic import StepSizes, step_traffic, weights
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement, state_specs

NUM_DEVICES = 8
LAYOUTS: dict[str, tuple[Layout, int]] = {
    "data=8": (Layout(mesh={"data": 8}), 1),
    "data=8, 4 microbatches": (Layout(mesh={"data": 8}), 4),
    "fsdp=8": (Layout(mesh={"fsdp": 8}), 1),
    "fsdp=8, 4 microbatches": (Layout(mesh={"fsdp": 8}), 4),
    "fsdp=8, zero 2, 4 microbatches": (Layout(mesh={"fsdp": 8}, zero=2), 4),
    "tensor=8": (Layout(mesh={"tensor": 8}), 1),
    "tensor=8, sequence sharded": (Layout(mesh={"tensor": 8}, sequence_sharded=True), 1),
    "tensor=8, collective matmul": (
        Layout(mesh={"tensor": 8}, sequence_sharded=True, collective_matmul=True),
        1,
    ),
    "data=2 fsdp=2 tensor=2, 4 microbatches": (Layout(mesh={"data": 2, "fsdp": 2, "tensor": 2}), 4),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile, and for what.

    Args:
      target: simulated CPU devices, or GPUs that need not be here (extra `ahead-of-time`).
      dtype: compute dtype. XLA for CPUs turns bfloat16 into float32 before it moves it.
      tied: whether the head is the embedding table, as in GPT-2.
      rows: sequences in the whole batch.
    """

    target: Literal["cpu", "h100", "a100"] = "cpu"
    dtype: Dtypes = "float32"
    tied: bool = True
    rows: int = 64


def main() -> None:
    """Print the table."""
    options = tyro.cli(Options)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
    config = DecoderConfig(
        vocab=50304, seq=1024, embed=1024, num_layers=24, num_heads=16, tied=options.tied, dtype=options.dtype
    )
    print("| layout | collective | over | runs | MB | theory | ratio |")
    print("|---|---|---|--:|--:|--:|--:|")
    for name, (layout, microbatches) in LAYOUTS.items():
        for row in rows(config, layout, microbatches, options):
            print(f"| {name} | {row} |")


def rows(config: DecoderConfig, layout: Layout, microbatches: int, options: Options) -> list[str]:
    """The table's rows of one layout; MB are 10^6 bytes that a device sends in a step."""
    mesh = make_mesh(layout, describe_devices(options.target, NUM_DEVICES))
    sizes = dict(mesh.shape)
    model, optimizer = from_nnx(config), optax.adamw(1e-3)
    batch = {
        "tokens": jax.ShapeDtypeStruct((options.rows, config.seq + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((options.rows,), jnp.float32),
    }
    placement = make_placement(model, optimizer, layout, mesh)
    compiled = compile_step(model, next_token_loss, optimizer, placement, batch, microbatches=microbatches)
    arrays = state_specs(model, optimizer, layout, sizes).arrays
    work = StepSizes(
        weights=weights(arrays, layout.sharded_rules),
        num_tokens=options.rows * config.seq,
        embed=config.embed,
        num_blocks=config.num_layers,
        microbatches=microbatches,
        compute_bytes=jnp.dtype(config.dtype).itemsize,
    )
    return compared(figures(compiled, sizes), work, layout, sizes)


def compared(found: Figures, work: StepSizes, layout: Layout, sizes: dict[str, int]) -> list[str]:
    """Measured beside theory, the dearest first; what is below 0.1 % of the step is put together."""
    theory: dict[tuple[str, tuple[str, ...]], float] = {}
    for key, num_bytes in step_traffic(work, layout, sizes).items():
        theory[key.kind, key.axes] = theory.get((key.kind, key.axes), 0) + num_bytes
    measured = {**dict.fromkeys(theory, (0, 0.0)), **sum_by_axis(found.collectives)}
    total = sum(num_bytes for _, num_bytes in measured.values())
    lines, rest = [], 0.0
    for key, (runs, num_bytes) in sorted(measured.items(), key=lambda item: -item[1][1]):
        expected = theory.get(key, 0.0)
        if max(num_bytes, expected) < 0.001 * total:
            rest += num_bytes
            continue
        known = f"{expected / 1e6:.1f} | {num_bytes / expected:.3f}" if expected > 0.001 * total else " | "
        lines.append(f"{key[0]} | {' '.join(key[1])} | {runs} | {num_bytes / 1e6:.1f} | {known}")
    whole = sum(theory.values())
    if rest:
        lines.append(f"the rest | | | {rest / 1e6:.1f} | | ")
    lines.append(f"**all** | | | {total / 1e6:.1f} | {whole / 1e6:.1f} | {total / whole:.3f}")
    return lines


if __name__ == "__main__":
    main()
