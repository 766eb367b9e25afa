"""Memory of sequences whose parts are on several devices, by the compiler's figures; nothing is computed.

uv run python benchmarks/context.py [--tokens 32768]

For each kind of attention over the axis context and 2, 4 and 8 devices: temporary bytes of a device in a step
of a decoder with one block, 64 features and 8 heads, on one sequence. The table is in docs/context.md.
"""

import argparse
from dataclasses import replace
from typing import get_args

import jax
import numpy as np
import optax

from shardtrain import next_token_loss
from shardtrain.functional.nnx_model import as_model
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.compile import compile_step, figures
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import ContextAttentions, Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

jax.config.update("jax_num_cpu_devices", 8)

DECODER = DecoderConfig(
    vocab=64, seq=32_768, embed=64, num_layers=1, num_heads=8, positions="rotary", bias=False, tied=False
)


def temporary_bytes(kind: str, num_devices: int, tokens: int) -> float:
    """Return the temporary bytes of a device in a step on one sequence."""
    model, optimizer = as_model(replace(DECODER, seq=tokens)), optax.sgd(0.1)
    layout = Layout(mesh={"context": num_devices}, context_attention=kind)  # type: ignore[arg-type]
    mesh = make_mesh(layout, jax.devices()[:num_devices])
    batch = {
        "tokens": jax.ShapeDtypeStruct((1, tokens + 1), np.int32),
        "weights": jax.ShapeDtypeStruct((1,), np.float32),
    }
    placement = make_placement(model, optimizer, layout, mesh)
    compiled = compile_step(model, next_token_loss, optimizer, placement, batch, microbatches=1)
    return figures(compiled, axis_sizes(layout.mesh, num_devices)).temp_bytes


def main() -> None:
    """Print a row for each number of devices."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32_768)
    tokens = parser.parse_args().tokens
    kinds = get_args(ContextAttentions)
    print(f"| devices | {' | '.join(kinds)} |")
    for num_devices in (2, 4, 8):
        found = (temporary_bytes(kind, num_devices, tokens) / 1e6 for kind in kinds)
        print(f"| {num_devices} | {' | '.join(f'{each:,.0f} MB' for each in found)} |", flush=True)


if __name__ == "__main__":
    main()
