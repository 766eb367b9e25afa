"""What checkpoints cost: the stall of a save in steps, and time and peak memory of a restore.

Beside both stands plain Orbax used by hand (`StandardCheckpointer`), in turn. Each restore is a process of
its own. Figures: docs/benchmarks/checkpoint.md.
"""

import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from paired import markdown, spread, take_turns
from stepper import Stepper, random_tokens

import shardtrain as st
from shardtrain.checkpoints.manifest_entries import ArrayOrigin
from shardtrain.checkpoints.origins import select_saved_state
from shardtrain.checkpoints.reader import visible_readers
from shardtrain.checkpoints.restore import restore_arrays
from shardtrain.models.decoder import DecoderConfig

NOTHING, TOOLKIT, FAST, ORBAX = "nothing", "toolkit", "toolkit, fast tier", "Orbax by hand"
BY_HAND, VOCAB = "by_hand", 8192
MEMORY = Path("/dev/shm")
"""A folder in memory, for the fast tier."""
CASES = {  # devices that saved, devices that restore, a third
    "1 device": (1, 1, False),
    "1 device -> fsdp 8": (1, 8, False),
    "fsdp 8 -> 1 device": (8, 1, False),
    "a third of the blocks": (1, 1, True),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      part: stall or restore.
      embed: features of the model.
      num_layers: blocks; restores want a number that 3 divides.
      rows: rows of a step's batch.
      seq: tokens of a row.
      steps: steps of a block, from the save on.
      rounds: how often each side is run, at least 2.
    """

    part: Literal["stall", "restore"]
    embed: int = 512
    num_layers: int = 6
    rows: int = 4
    seq: int = 128
    steps: int = 8
    rounds: int = 5


class Steps(NamedTuple):
    """Seconds of the steps of a block, of one step, of the call that saves, and of the processors in all."""

    seconds: float
    step_seconds: float
    blocked: float
    cpu_seconds: float


class Training:
    """A decoder with Adam, step after step, and one save in a block of them."""

    def __init__(self, options: Options) -> None:
        self.num_steps = options.steps
        embed, layers, heads = options.embed, options.num_layers, max(1, options.embed // 64)
        config = DecoderConfig(vocab=VOCAB, seq=options.seq, embed=embed, num_layers=layers, num_heads=heads)
        self.step = Stepper(config, optimizer=optax.adam(1e-4))
        self.batch = self.step.place(random_tokens(VOCAB, options.rows, options.seq))

    def run_block(self, save: Callable[[Any], Any]) -> Steps:
        """Run some steps, the first with the save before it."""
        cpu_start, begun = time.process_time(), time.perf_counter()
        save(select_saved_state(self.step.state))
        ticks = [time.perf_counter()]
        for _ in range(self.num_steps):
            jax.block_until_ready((self.step(self.batch), self.step.state))
            ticks.append(time.perf_counter())
        each = median(np.diff(ticks).tolist())
        return Steps(ticks[-1] - begun, each, ticks[0] - begun, time.process_time() - cpu_start)

    def run_saving(self, side: str, folder: Path) -> Steps:
        """Run a block with a save by one side, and delete what was saved."""
        if side == NOTHING:
            return self.run_block(lambda state: None)
        with TemporaryDirectory(dir=folder) as disk, TemporaryDirectory(dir=MEMORY) as memory:
            if side == ORBAX:
                with ocp.StandardCheckpointer() as checkpointer:
                    return self.run_block(lambda state: checkpointer.save(Path(disk, "run"), state))
            policy = st.CheckpointPolicy(fast=Path(memory) if side == FAST else None)
            with st.Checkpoints(Path(disk), policy) as checkpoints:
                return self.run_block(lambda state: checkpoints.save(1, state, {}))


def measure_stalls(options: Options, folder: Path) -> list[tuple[str, ...]]:
    """Return for each side what a save adds (time, call, processor), in steps of the block without a save."""
    training = Training(options)
    sides = NOTHING, TOOLKIT, FAST, ORBAX
    calls = {side: partial(training.run_saving, side, folder) for side in sides}
    take_turns(calls, 1, 0)
    found = take_turns(calls, options.rounds, 0)
    rows: list[tuple[str, ...]] = []
    for side, blocks in found.items():
        pairs = list(zip(blocks, found[NOTHING], strict=True))
        stall = spread([a.seconds / b.step_seconds - options.steps for a, b in pairs])
        cpu = spread([(a.cpu_seconds / b.cpu_seconds - 1) * options.steps for a, b in pairs])
        call = median(a.blocked / b.step_seconds for a, b in pairs)
        figures = (stall.median, stall.low, stall.high, call, cpu.median)
        rows.append((side, *(f"{figure:.2f}" for figure in figures)))
    return rows


def measure_restores(options: Options, folder: Path) -> list[tuple[str, ...]]:
    """Return a row for every case in every way, in turn."""
    rows: list[tuple[str, ...]] = []
    for case, (devices_saved, devices, third) in CASES.items():
        saved = folder / f"by {devices_saved}"
        if not saved.exists():
            run_child(devices_saved, save, saved, options.embed, options.num_layers)
        ways = ["toolkit", "verified", *([] if third else ["orbax"])]
        calls = {way: partial(run_child, devices, restore, saved, third, way) for way in ways}
        found = take_turns(calls, options.rounds, len(rows))
        base = found["toolkit" if third else "orbax"]
        for way, runs in found.items():
            ratio = spread([a["seconds"] / b["seconds"] for a, b in zip(runs, base, strict=True)])
            seconds, read = (median(run[name] for run in runs) for name in ("seconds", "read"))
            figures = (seconds, ratio.median, max(run["peak"] for run in runs), read)
            megabytes = f"{runs[0]['array_bytes'] / 1e6:,.0f}"
            rows.append((case, way, megabytes, *(f"{figure:.2f}" for figure in figures)))
    return rows


def run_child(num_devices: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a process of its own with so many devices."""
    with ProcessPoolExecutor(1, get_context("spawn"), use_cpu_devices, (num_devices,)) as pool:
        return pool.submit(function, *arguments).result()


def use_cpu_devices(num_devices: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def shard_all() -> NamedSharding:
    """Return a sharding of the second dim over all devices, as fsdp has it."""
    return NamedSharding(Mesh(np.array(jax.devices()), ("fsdp",)), PartitionSpec(None, "fsdp"))


def save(folder: Path, embed: int, num_layers: int) -> None:
    """Save random arrays in the shapes of a decoder, with Adam's two moments, by the toolkit and by hand."""
    generator, where = np.random.default_rng(0), shard_all()
    shapes = {
        "embedding/table": (VOCAB, embed),
        "blocks/attention/qkv": (num_layers, embed, 3 * embed),
        "blocks/attention/out": (num_layers, embed, embed),
        "blocks/mlp/up": (num_layers, embed, 4 * embed),
        "blocks/mlp/down": (num_layers, 4 * embed, embed),
        "blocks/norm/scale": (num_layers, embed),
    }
    state = {
        f"{tree}/{path}": jax.device_put(generator.standard_normal(shape, np.float32), where)
        for tree in ("params", "mu", "nu")
        for path, shape in shapes.items()
    }
    with st.Checkpoints(folder, st.CheckpointPolicy()) as checkpoints:
        checkpoints.save(1, state, {})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / BY_HAND, state)


def restore(folder: Path, third: bool, way: str) -> dict[str, float]:
    """Restore to all devices; return seconds, and the peak of memory and the bytes read over the bytes."""
    where, wanted, origins = shard_all(), {}, {}
    for path, leaf in visible_readers(folder)[-1].leaves.items():
        shape = leaf.shape
        if third and "/blocks/" not in path:
            continue
        if third:
            layers, *rest = shape
            rows = tuple(range(layers // 3))
            shape, origins[path] = (len(rows), *rest), ArrayOrigin(rows=rows, num_rows=layers)
        wanted[path] = jax.ShapeDtypeStruct(shape, np.float32, sharding=where)
    num_bytes = sum(4 * int(np.prod(like.shape)) for like in wanted.values())
    jax.block_until_ready(jax.device_put(np.zeros((8, 8)), where))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    resident, _, read = read_process()
    start = time.perf_counter()
    if way == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore(folder / BY_HAND, wanted)
    else:
        reader = visible_readers(folder)[-1]
        if way == "verified":
            assert not reader.problems()
        allow = st.Allow(unused=("*",)) if third else st.Allow()
        arrays = restore_arrays(reader, wanted, origins, allow)
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - start
    _, peak, read_after = read_process()
    assert set(arrays) == set(wanted)
    over = {"peak": (peak - resident) / num_bytes, "read": (read_after - read) / num_bytes}
    return {"seconds": seconds, "array_bytes": num_bytes, **over}


def read_process() -> tuple[int, int, int]:
    """Return resident bytes, their peak, and bytes read of files, as Linux counts them."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    io = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    resident, peak = (1024 * int(status[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return resident, peak, int(io["rchar"])


def main(options: Options) -> None:
    with TemporaryDirectory() as name:
        if options.part == "stall":
            header = ["save", "stall, steps", "first quartile", "third", "the call", "processor time"]
            rows = measure_stalls(options, Path(name))
        else:
            header = [
                "restore",
                "way",
                "MB",
                "seconds",
                "over Orbax or toolkit",
                "peak / bytes",
                "read / bytes",
            ]
            rows = measure_restores(options, Path(name))
    print(markdown(header, rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
