"""Collective matmul in programs for GPUs that need not be here: which exchanges run beside a product.

uv run --extra ahead-of-time python benchmarks/collective_matmul.py [--target h100] [--devices 2 4 8]

For each number of devices along tensor a step of a decoder of 2 blocks, bfloat16, with a sharded sequence,
gathered and reduced by the compiler, and by collective matmul. Of each program: exchanges in its loops over
blocks, how many of these have a matrix product between their start and their end, and temporary memory.
Nothing is timed. The table is in docs/speed.md.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

from shardtrain import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.plan.compile import compile_step, described_devices
from shardtrain.plan.hlo.collectives import KINDS
from shardtrain.plan.hlo.dataflow import Frame
from shardtrain.plan.hlo.text import Instruction, parse
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

DECODER = DecoderConfig(
    vocab=4096, seq=2048, embed=2048, num_layers=2, num_heads=16, positions="rotary", dtype="bfloat16",
    activation="swiglu", norm="rmsnorm", bias=False,
)  # fmt: skip
LEAST_BYTES = 1 << 20
"""Of an exchange that is counted: the gradients of norms are smaller."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile for.

    Args:
      target: "h100" or "a100".
      devices: numbers of devices along tensor.
      rows: sequences of a batch.
    """

    target: str = "h100"
    devices: tuple[int, ...] = (2, 4, 8)
    rows: int = 4


def main() -> None:
    """Print the table."""
    options = tyro.cli(Options)
    jax.config.update("jax_platforms", "cpu")
    print("| tensor | products | exchanges in blocks | beside a product | temporary MB |")
    print("|--:|---|--:|--:|--:|")
    for num_devices in options.devices:
        for collective_matmul in (False, True):
            compiled = _compiled(options, num_devices, collective_matmul)
            found = list(exchanges(compiled.as_text() or ""))
            memory: Any = compiled.memory_analysis()
            megabytes = memory.temp_size_in_bytes / 1e6
            name = "collective matmul" if collective_matmul else "whole"
            print(f"| {num_devices} | {name} | {len(found)} | {sum(found)} | {megabytes:,.0f} |", flush=True)


def _compiled(options: Options, num_devices: int, collective_matmul: bool) -> jax.stages.Compiled:
    layout = Layout(mesh={"tensor": num_devices}, sequence_sharded=True, collective_matmul=collective_matmul)
    mesh = make_mesh(layout, described_devices(options.target, num_devices))
    model, optimizer = from_nnx(DECODER), optax.adamw(3e-4)
    batch = {
        "tokens": jax.ShapeDtypeStruct((options.rows, DECODER.seq + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((options.rows,), jnp.float32),
    }
    placement = make_placement(model, optimizer, layout, mesh)
    return compile_step(model, next_token_loss, optimizer, placement, batch, microbatches=1)


def exchanges(hlo_text: str) -> Iterator[bool]:
    """Return for each exchange of activations in a loop whether a product runs between its start and its end.

    Args:
      hlo_text: of a compiled program, whose instructions stand in the order in which they run.
    """
    module = parse(hlo_text)
    entry = Frame(module=module, computation=module.entry)
    for loop in module.entry.instructions.values():
        if loop.opcode == "while":
            yield from _in_body(entry.body(loop))


def _in_body(frame: Frame) -> Iterator[bool]:
    # name of what has started -> whether a product has run since
    running: dict[str, bool] = {}
    for name, instruction in frame.computation.instructions.items():
        kind = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if _is_product(frame, instruction):
            running = dict.fromkeys(running, True)
        if kind not in KINDS or sum(array.num_bytes for array in instruction.arrays) < LEAST_BYTES:
            continue
        if instruction.opcode.endswith("-start"):
            running[name] = False
        elif instruction.opcode.endswith("-done"):
            yield running.pop(instruction.operands[0])
        else:
            yield False


def _is_product(frame: Frame, instruction: Instruction) -> bool:
    if instruction.opcode == "dot" or "__cublas" in instruction.attributes:
        return True
    inner = frame.callee(instruction)
    if inner is None:
        return False
    return any(_is_product(inner, each) for each in inner.computation.instructions.values())


if __name__ == "__main__":
    main()
