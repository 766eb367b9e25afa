"""What the bridge between islands costs: its all-reduce beside MPI's, the step with it beside that without.

Run it on several ranks: `mpiexec -n 2 python benchmarks/bridge.py`. Figures: docs/benchmarks/bridge.md.
"""

import json
import os
import random
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from paired import Spread, spread

from shardtrain.combine.mean import add_up
from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.islands.binding import bind_cpus
from shardtrain.islands.bridge import MPI, MpiGroup, world
from shardtrain.islands.buckets import CAP_BYTES, FIRST_BYTES
from shardtrain.islands.rank_environment import find_rank_environment
from shardtrain.islands.transfer import Transfer
from shardtrain.models.decoder import DecoderConfig
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.system.xla_flags import Preset, preset_text, with_preset
from shardtrain.train_step.initial_state import init_state
from shardtrain.train_step.island_step import GradientIslandStep, make_island_step
from shardtrain.train_step.placement import make_placement
from shardtrain.train_step.step import make_step

Side = Callable[[], Any]
RAW, NEW, JIT, BRIDGE = "MPI", "MPI into new memory", "one jit", "bridge"
RAW_READ, BRIDGE_READ = "MPI, and a program that reads as much", "bridge, and a program that reads the mean"
ALONE, BARRIER, DEFAULT, NARROW, TOGETHER, ONE_BY_ONE = (
    "alone",
    "alone, and a barrier",
    "bridge",
    "bridge, gradients in bfloat16",
    "bridge, a first bucket of 1 MB",
    "bridge, bucket after bucket",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      part: "all_reduce": the bridge beside MPI_Allreduce; "step": a step with it beside the step alone;
        "overlap": a step with it and gradients in several programs beside one with them in one.
      num_bytes: what is summed.
      rounds: calls of each side.
      quiet: rounds in which other programs took more than this share of the processors are run again;
        1 takes all. It asks Linux, and all ranks must be on one host.
      embed, num_layers, seq: of the decoder that steps.
      rows: of each island.
      steps: in one call.
      bucket_bytes: see `options.Across`.
      num_parts: numbers of programs of the gradients, beside 1, see `options.Across.gradient_parts`.
      seed: of parameters, data and orders.
      xla_preset: flags of XLA, as of `shardtrain train`.
      json: where to write all figures too.
    """

    part: Literal["all_reduce", "step", "overlap"] = "all_reduce"
    num_bytes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
    rounds: int = 40
    quiet: float = 1.0
    embed: int = 128
    num_layers: int = 4
    seq: int = 64
    rows: int = 8
    steps: int = 5
    bucket_bytes: int = CAP_BYTES
    num_parts: tuple[int, ...] = (2, 3, 4)
    seed: int = 0
    xla_preset: Preset = "auto"
    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One side.

    Args:
      what: was done.
      side: by whom.
      seconds: median over rounds of the slowest rank's.
      ratio: over another side, round by round.
      faults: median page faults of a call on rank 0.
    """

    what: str
    side: str
    seconds: float
    ratio: Spread
    faults: float


class Call(NamedTuple):
    """One timed call: the slowest rank's seconds, and this rank's page faults."""

    seconds: float
    faults: int


def in_turn(
    comm: MPI.Comm, sides: Mapping[str, Side], num_rounds: int, seed: int = 0, quiet: float = 1.0
) -> dict[str, list[Call]]:
    """Run every side once a round, each round in another order, after a barrier; the ranks do it together.

    Args:
      comm: of all ranks.
      sides: name -> one call, the same on all ranks.
      num_rounds: how often.
      seed: of the orders.
      quiet: rounds in which other programs took more than this share of the processors are run again;
        1 takes all.

    Returns:
      name -> its calls, one a round.
    """
    order, generator = list(sides), random.Random(seed)
    found: dict[str, list[Call]] = {name: [] for name in sides}
    while len(found[order[0]]) < num_rounds:
        generator.shuffle(order)
        calls, share = others_share(comm, lambda: [timed(comm, sides[name]) for name in order])
        if share <= quiet:
            for name, call in zip(order, calls, strict=True):
                found[name].append(call)
        else:
            time.sleep(0.2)
    return found


def timed(comm: MPI.Comm, side: Side) -> Call:
    """One call, from a barrier to the last rank's end."""
    comm.Barrier()
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    side()
    seconds = time.perf_counter() - start
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return Call(comm.allreduce(seconds, MPI.MAX), faults)


def others_share(comm: MPI.Comm, work: Callable[[], Any]) -> tuple[Any, float]:
    """What some work returns, and the share of this host's processors that no rank took; equal on all ranks.

    All ranks must be on one host.
    """
    comm.Barrier()
    before, began, own = _busy_seconds(), time.perf_counter(), time.process_time()
    result = work()
    ranks = comm.allreduce(time.process_time() - own)
    others = _busy_seconds() - before - ranks
    return result, comm.bcast(others / ((time.perf_counter() - began) * (os.cpu_count() or 1)), 0)


def _busy_seconds() -> float:
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except FileNotFoundError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def bind() -> None:
    """Keep to this rank's cores, as `shardtrain train` does; before jax starts its threads."""
    if cores := bind_cpus(find_rank_environment(os.environ)):
        os.sched_setaffinity(0, cores)


def all_reduced(arrays: list[jax.Array], group: Any) -> list[jax.Array]:
    """A program of the bucket device that sums every array over ranks, as a step does for a mean."""
    return add_up(arrays, group)


def all_reduce_sides(comm: MPI.Comm, transfer: Transfer, group: MpiGroup, num_bytes: int) -> dict[str, Side]:
    """The same sum, from MPI's own to that of the step: what lies between them tells where time goes."""
    # made as a gradient is, by a compiled program, not on memory of NumPy's
    array = jax.jit(lambda: jnp.full(num_bytes // 4, comm.rank + 1, jnp.float32))()
    host = np.full(num_bytes // 4, comm.rank + 1, np.float32)
    out = np.empty_like(host)
    compiled = jax.jit(group.all_reduce)

    def bridge(program: Any) -> jax.Array:
        return jax.block_until_ready(transfer.map(program, [array])[0])

    # a mean is divided by the program that uses it, such as the update: here one that reads it
    read = jax.jit(lambda total, count: jnp.vdot(total / count, total / count))

    def raw_and_read() -> None:
        comm.Allreduce(host, out)
        jax.block_until_ready(read(array, comm.size))

    total = comm.size * (comm.size + 1) / 2
    np.testing.assert_array_equal(np.asarray(bridge(all_reduced)), np.float32(total))
    return {
        RAW: lambda: comm.Allreduce(host, out),
        NEW: lambda: comm.Allreduce(host, np.empty_like(host)),
        JIT: lambda: jax.block_until_ready(compiled(array)),
        BRIDGE: partial(bridge, all_reduced),
        RAW_READ: raw_and_read,
        BRIDGE_READ: lambda: jax.block_until_ready(read(bridge(all_reduced), comm.size)),
    }


class OneByOne(Transfer):
    """A transfer that waits for each bucket before it starts the next."""

    def start(self, number: int, program: Any, arrays: Any, *, timed: bool = False) -> Any:
        future = super().start(number, program, arrays, timed=timed)
        future.result()
        return future


class Stepper:
    """Steps of one island on its own rows, each with a state of its own: alone, or with a transfer.

    Args:
      options: what to measure.
      rank: of this island.
      transfer: to the others; None steps alone.
      meet: called after each step, when it is computed; None computes on.
      reduce_dtype: of gradients that are sent.
    """

    def __init__(
        self,
        options: Options,
        rank: int,
        transfer: Transfer | None,
        meet: Callable[[], Any] | None = None,
        reduce_dtype: str = "float32",
        num_parts: int = 1,
    ) -> None:
        self._meet = meet
        config = DecoderConfig(
            vocab=256,
            seq=options.seq,
            embed=options.embed,
            num_layers=options.num_layers,
            num_heads=4,
        )
        model, layout, optimizer = from_nnx(config), Layout(), optax.adamw(1e-3)
        mesh = make_mesh(layout, jax.local_devices()[:1])
        placement = make_placement(model, optimizer, layout, mesh)
        self._state = init_state(model, optimizer, placement, options.seed)
        tokens = np.random.default_rng([options.seed, rank]).integers(0, 256, (options.rows, options.seq + 1))
        batch = {"tokens": tokens.astype(np.int32), "weights": np.ones(options.rows, np.float32)}
        self._batch = place(batch, mesh, layout.batch_axes)
        if transfer is None:
            self._step = make_step(model, next_token_loss, optimizer, placement)
        else:
            self._step = make_island_step(
                model,
                next_token_loss,
                optimizer,
                placement,
                transfer,
                reduce_dtype=reduce_dtype,
                num_parts=num_parts,
                batch=self._batch,
            )
        if isinstance(self._step, GradientIslandStep):
            self._state = self._step.begin(self._state, self._batch)
        self._num_steps = options.steps
        self.num_parameters = sum(x.size for x in jax.tree.leaves(self._state.params))

    def __call__(self) -> None:
        """Some steps, waited for at the end only, as a loop that reads its metrics late."""
        for _ in range(self._num_steps):
            self._state, metrics = self._step(self._state, self._batch)
            if self._meet is not None:
                jax.block_until_ready(metrics)
                self._meet()
        jax.block_until_ready((self._state.params, metrics))


def step_sides(options: Options, comm: MPI.Comm) -> dict[str, Stepper]:
    """The step of an island alone, and with the bridge in several ways."""
    mesh = make_mesh(Layout(), jax.local_devices()[:1])
    caps = (options.bucket_bytes, min(options.bucket_bytes, FIRST_BYTES))
    transfers = {
        DEFAULT: Transfer(mesh, [MpiGroup(comm)]),
        TOGETHER: Transfer(mesh, [MpiGroup(comm)], *caps),
        ONE_BY_ONE: OneByOne(mesh, [MpiGroup(comm)], *caps),
    }
    return {
        ALONE: Stepper(options, comm.rank, None),
        # what waiting for each other costs, if nothing is sent
        BARRIER: Stepper(options, comm.rank, None, comm.Barrier),
        NARROW: Stepper(options, comm.rank, Transfer(mesh, [MpiGroup(comm)]), reduce_dtype="bfloat16"),
        **{name: Stepper(options, comm.rank, transfer) for name, transfer in transfers.items()},
    }


def overlap_sides(options: Options, comm: MPI.Comm) -> dict[str, Stepper]:
    """The step of an island alone, and with the bridge and gradients in several numbers of programs."""
    mesh = make_mesh(Layout(), jax.local_devices()[:1])
    parts = {
        programs_text(number): Stepper(options, comm.rank, Transfer(mesh, [MpiGroup(comm)]), num_parts=number)
        for number in (1, *options.num_parts)
    }
    return {ALONE: Stepper(options, comm.rank, None), **parts}


def programs_text(number: int) -> str:
    """The name of a side."""
    return f"bridge, gradients in {number} program{'s' * (number > 1)}"


def summed_up(calls: Mapping[str, Sequence[Call]], base: str, what: str, num_steps: int = 1) -> list[Row]:
    """Each side beside the base, round by round; the bridge with a reader beside MPI with one."""
    bases = {side: RAW_READ if side == BRIDGE_READ else base for side in calls}
    return [
        Row(
            what=what,
            side=side,
            seconds=median(call.seconds for call in found) / num_steps,
            ratio=spread([a.seconds / b.seconds for a, b in zip(found, calls[bases[side]], strict=True)]),
            faults=median(call.faults for call in found) / num_steps,
        )
        for side, found in calls.items()
    ]


def measure(options: Options) -> list[Row]:
    """All rows; all ranks together."""
    comm = world()
    turns = partial(in_turn, comm, seed=options.seed)
    if options.part != "all_reduce":
        sides = (step_sides if options.part == "step" else overlap_sides)(options, comm)
        turns(sides, 1)
        what = f"{sides[ALONE].num_parameters:,} parameters, {options.rows} x {options.seq} tokens"
        base = ALONE if options.part == "step" else programs_text(1)
        return summed_up(turns(sides, options.rounds, quiet=options.quiet), base, what, options.steps)
    group = MpiGroup(comm)
    transfer = Transfer(make_mesh(Layout(), jax.local_devices()[:1]), [group])
    rows = []
    for num_bytes in options.num_bytes:
        sides = all_reduce_sides(comm, transfer, group, num_bytes)
        turns(sides, 3)
        what = f"{num_bytes >> 10:,} KB"
        rows += summed_up(turns(sides, options.rounds, quiet=options.quiet), RAW, what)
    transfer.close()
    return rows


def set_xla_flags(preset: Preset) -> str:
    """Set the flags of a preset, as `shardtrain train` does; before jax starts; return a line about them."""
    found = with_preset(preset, os.environ, metadata.version("jaxlib"))
    os.environ["XLA_FLAGS"] = found.xla_flags
    return preset_text(preset, found) or f"XLA flags: {found.xla_flags or 'none'}"


def report(rows: Sequence[Row], num_ranks: int, options: Options, flags_text: str) -> str:
    """The rows as a table."""
    lines = [
        f"{num_ranks} ranks, {os.cpu_count()} cores, {options.rounds} rounds; jax {jax.__version__},"
        f" {MPI.Get_library_version().splitlines()[0].rstrip(chr(0))}",
        flags_text,
        "",
        "| | | ms | ratio | quartiles | 95 % interval of the median | page faults |",
        "|---|---|--:|--:|---|---|--:|",
    ]
    for row in rows:
        ratio, (low, high) = row.ratio, row.ratio.sure
        lines.append(
            f"| {row.what} | {row.side} | {1e3 * row.seconds:.3g} | {ratio.median:.2f} |"
            f" {ratio.low:.2f} - {ratio.high:.2f} | {low:.2f} - {high:.2f} | {row.faults:.0f} |"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    bind()
    flags_text = set_xla_flags(options.xla_preset)
    rows, comm = measure(options), world()
    if comm.rank == 0:
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(report(rows, comm.size, options, flags_text))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
