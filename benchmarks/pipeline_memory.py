"""What a step of each schedule holds on a device, as microbatches grow, beside accumulation on one device.

Compiled ahead of time for simulated CPU devices; nothing runs. All microbatches are of the same size, so a
step of more of them is of a larger batch. Figures: docs/benchmarks/pipeline.md.
"""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import tyro

from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.pipeline.partition import counts
from shardtrain.pipeline.schedule import SCHEDULES, allowed_chunks, make_table, placement_of
from shardtrain.pipeline.stacking import Partition
from shardtrain.pipeline.tick_arrays import make_ticks
from shardtrain.plan.compile import compile_step, described_devices, figures
from shardtrain.plan.hlo.collectives import PERMUTE
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import make_placement

ONE_DEVICE = "accumulate"
CHUNKS = {name: allowed_chunks(name)[0] for name in SCHEDULES}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile.

    Args:
      schedules: of a pipeline; "accumulate" is one device, a microbatch after the other.
      stages: places along the pipeline, each a device.
      microbatches: numbers of them.
      rows: sequences of a microbatch.
      embed, num_layers, seq, vocab: of the decoder.
      cut: numbers of blocks, such as 3,2,2,1, or equal.
    """

    schedules: tuple[str, ...] = (*CHUNKS, ONE_DEVICE)
    stages: int = 4
    microbatches: tuple[int, ...] = (4, 8, 16, 32)
    rows: int = 4
    embed: int = 256
    num_layers: int = 8
    seq: int = 128
    vocab: int = 1024
    cut: str = "equal"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One compiled step; bytes are those of one device.

    Args:
      slots: the largest number of activations and cotangents that wait.
      temp_bytes: held in a step beside state and batch.
      state_bytes: of parameters and moments.
      num_instructions: of the compiled program.
      compile_seconds: with the rest of the machine's work.
      permute_bytes: sent to neighbours in a step.
    """

    schedule: str
    microbatches: int
    slots: int
    temp_bytes: int
    state_bytes: int
    num_instructions: int
    compile_seconds: float
    permute_bytes: float


def main() -> None:
    """Print the table; MB are 10^6 bytes."""
    options = tyro.cli(Options)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.stages)
    activation_bytes = options.rows * options.seq * options.embed * 4
    print(f"the activations between two stages have {activation_bytes / 1e6:.2f} MB\n")
    print("| schedule | microbatches | slots | temporary MB | state MB | sent MB | instructions | s |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for schedule in options.schedules:
        for microbatches in options.microbatches:
            row = measured(options, schedule, microbatches)
            print(
                f"| {schedule} | {microbatches} | {row.slots or ''} | {row.temp_bytes / 1e6:.2f}"
                f" | {row.state_bytes / 1e6:.2f} | {row.permute_bytes / 1e6:.2f} | {row.num_instructions:,}"
                f" | {row.compile_seconds:.1f} |",
                flush=True,
            )


def measured(options: Options, schedule: str, microbatches: int) -> Row:
    """The figures of one compiled step."""
    config = DecoderConfig(
        vocab=options.vocab, seq=options.seq, embed=options.embed, num_layers=options.num_layers, num_heads=4
    )
    stages = None if schedule == ONE_DEVICE else cut(options, schedule)
    layout = Layout(mesh={"data": 1} if stages is None else {"pipeline": options.stages})
    mesh = make_mesh(layout, described_devices("cpu", 1 if stages is None else options.stages))
    batch = {
        "tokens": jax.ShapeDtypeStruct((microbatches * options.rows, options.seq + 1), jnp.int32),
        "weights": jax.ShapeDtypeStruct((microbatches * options.rows,), jnp.float32),
    }
    start = time.perf_counter()
    model, optimizer = from_nnx(config), optax.adam(1e-3)
    pipeline = {} if stages is None else {"stages": stages, "schedule": schedule}
    placement = make_placement(model, optimizer, layout, mesh, **pipeline)
    compiled = compile_step(model, next_token_loss, optimizer, placement, batch, microbatches=microbatches)
    seconds = time.perf_counter() - start
    found = figures(compiled, dict(mesh.shape))
    sent = sum(c.wire_bytes_per_device for c in found.collectives if c.kind == PERMUTE)
    return Row(
        schedule=schedule,
        microbatches=microbatches,
        slots=0 if stages is None else num_slots(stages, schedule, microbatches),
        temp_bytes=found.temp_bytes,
        state_bytes=found.alias_bytes,
        num_instructions=(compiled.as_text() or "").count(" = "),
        compile_seconds=seconds,
        permute_bytes=sent,
    )


def cut(options: Options, schedule: str) -> Partition:
    """The partition of the model; a list has as many numbers as there are stages."""
    num_chunks = CHUNKS[schedule]
    by = "equal" if options.cut == "equal" or num_chunks > 1 else tuple(map(int, options.cut.split(",")))
    found = counts(by, options.num_layers, options.stages * num_chunks)
    placement = placement_of(schedule, num_chunks)
    return Partition(
        num_stages=options.stages, num_chunks=num_chunks, placement=placement, counts=tuple(found)
    )


def num_slots(stages: Partition, schedule: str, microbatches: int) -> int:
    """Activations and cotangents that a device keeps, with a slot of each for those that are dropped."""
    table = make_table(schedule, stages.num_stages, microbatches, stages.num_chunks, lockstep=True)
    ticks = make_ticks(table)
    return ticks.num_inputs + ticks.num_cotangents + 2


if __name__ == "__main__":
    main()
