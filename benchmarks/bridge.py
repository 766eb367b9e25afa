"""The bridge between islands, beside MPI alone: an all-reduce, a step, gradients in parts, combiners.

mpiexec -n 2 python benchmarks/bridge.py [--part step]
mpiexec -n 4 python benchmarks/bridge.py --part buckets --core 0.25   # as root; also with other -n

Sides are called in turn on all ranks. Figures: docs/benchmarks/bridge.md and adasum.md.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from paired import markdown, spread, take_turns
from ranks import CpuQuota, bind
from stepper import Stepper, random_tokens

import shardtrain as st
from shardtrain.combine import make_combiner
from shardtrain.combine.mean import add_up
from shardtrain.islands.bridge import MPI, MpiGroup, world
from shardtrain.islands.buckets import CAP_BYTES, FIRST_BYTES
from shardtrain.islands.transfer import Transfer
from shardtrain.models.decoder import DecoderConfig
from shardtrain.system.xla_flags import apply_preset
from shardtrain.train_step.island_combiner import Channel
from shardtrain.train_step.island_compute import IslandCompute
from shardtrain.train_step.sync.local_steps import EveryStep

Side = Callable[[], Any]

NUM_BYTES = (4 << 10, 1 << 20, 16 << 20, 64 << 20)
"""What is summed."""
COMBINERS, LEAVES = ("mean", "adasum"), 48
"""Combiners, and leaves of what they combine: pairs of a square kernel and a vector."""
NUM_PROGRAMS = (1, 2, 4)
"""Programs of the gradients."""
BUCKET_BYTES = (256 << 10, 1 << 20, 4 << 20, CAP_BYTES)
"""Sizes of buckets; the last is the default."""
NUM_LAYERS, SEQ = 4, 64
"""Of the decoder that steps."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      part: "all_reduce": the bridge beside MPI_Allreduce; "step": a step with it beside the step alone;
        "overlap": gradients in several programs beside one; "buckets": sizes of buckets;
        "combiners": combiners beside the first.
      rounds: calls of each side.
      embed: of the decoder that steps; kernels that are combined have 2 embed^2 elements.
      rows: of each island.
      steps: in one call.
      core: part of a core of each rank, by a quota (root); 1 sets none.
    """

    part: Literal["all_reduce", "step", "overlap", "buckets", "combiners"] = "all_reduce"
    rounds: int = 40
    embed: int = 128
    rows: int = 8
    steps: int = 5
    core: float = 1.0


def time_call(comm: MPI.Comm, side: Side) -> float:
    """Return the seconds of one call, from a barrier to the last rank's end."""
    comm.Barrier()
    start = time.perf_counter()
    side()
    return comm.allreduce(time.perf_counter() - start, MPI.MAX)


def all_reduce_sides(comm: MPI.Comm, num_bytes: int) -> dict[str, Side]:
    """Return the same sum, from MPI's own to that of the step."""
    # made as a gradient is, by a compiled program, not on memory of NumPy's
    array = jax.jit(lambda: jnp.full(num_bytes // 4, comm.rank + 1, jnp.float32))()
    host = np.full(num_bytes // 4, comm.rank + 1, np.float32)
    out = np.empty_like(host)
    group = MpiGroup(comm)
    transfer = Transfer(st.make_mesh(st.Layout(), jax.local_devices()[:1]), [group])
    compiled = jax.jit(group.all_reduce)

    def bridge() -> jax.Array:
        return jax.block_until_ready(transfer.map(add_up, [array])[0])

    np.testing.assert_array_equal(np.asarray(bridge()), np.float32(comm.size * (comm.size + 1) / 2))
    return {
        "MPI": lambda: comm.Allreduce(host, out),
        "one jit": lambda: jax.block_until_ready(compiled(array)),
        "bridge": bridge,
    }


def combiner_sides(options: Options, comm: MPI.Comm) -> dict[str, Side]:
    """Return the combination of the same random gradients by each combiner; ranks share half of theirs."""
    shapes = [(options.embed, 2 * options.embed), (options.embed,)] * (LEAVES // 2)
    common = jax.random.key(0)
    own = jax.random.fold_in(common, comm.rank + 1)

    @jax.jit
    def draw() -> dict[str, Any]:
        return {
            f"{i:03}": sum(jax.random.normal(jax.random.fold_in(k, i), shape) for k in (common, own))
            for i, shape in enumerate(shapes)
        }

    tree, sides, group = draw(), {}, MpiGroup(comm)
    for text in COMBINERS:
        combiner = make_combiner(text)
        compiled = jax.jit(
            lambda tree, state, c=combiner: c.combine(tree, jnp.float32(1), state, group).value
        )
        state = combiner.init(tree)
        sides[text] = lambda run=compiled, state=state: jax.block_until_ready(run(tree, state))
    return sides


class IslandSteps:
    """Steps of one island on its own rows, each with a state of its own: alone, or with a transfer.

    Args:
      options: what to measure.
      transfer: to the others; None steps alone.
      wait: called after each step, when it is computed; None computes on.
      exchange: options of `Channel`.
    """

    def __init__(
        self, options: Options, transfer: Transfer | None, wait: Side | None = None, **exchange: Any
    ) -> None:
        self._wait, self._num_steps = wait, options.steps
        config = DecoderConfig(vocab=256, seq=SEQ, embed=options.embed, num_layers=NUM_LAYERS, num_heads=4)
        self._step = step = Stepper(config)
        self._batch = step.place(random_tokens(256, options.rows, SEQ, world().rank))
        if transfer is not None:
            training = st.Training(step.model, st.next_token_loss, step.optimizer)
            channel = Channel(transfer, **exchange)
            step.step = EveryStep(IslandCompute(training, step.placement, channel, batch=self._batch))
            step.state = step.step.begin(step.state, self._batch)

    def __call__(self) -> None:
        """Run some steps, waited for at the end only, as a loop that reads its metrics late."""
        for _ in range(self._num_steps):
            metrics = self._step(self._batch)
            if self._wait is not None:
                jax.block_until_ready(metrics)
                self._wait()
        jax.block_until_ready((self._step.state.params, metrics))


def step_sides(options: Options, comm: MPI.Comm) -> dict[str, Side]:
    """Return the step of an island alone, and with the bridge in several ways."""
    group, mesh = [MpiGroup(comm)], st.make_mesh(st.Layout(), jax.local_devices()[:1])
    stepper = partial(IslandSteps, options)
    if options.part == "overlap":
        parts = {f"bridge, programs: {n}": stepper(Transfer(mesh, group), num_parts=n) for n in NUM_PROGRAMS}
        return {**parts, "alone": stepper(None)}
    if options.part == "buckets":
        sizes = {f"buckets of {n >> 10:,} KB": stepper(Transfer(mesh, group, n)) for n in BUCKET_BYTES}
        return {"alone": stepper(None), **sizes}
    return {
        "alone": stepper(None),
        # what waiting for each other costs, if nothing is sent
        "alone, and a barrier": stepper(None, comm.Barrier),
        "bridge": stepper(Transfer(mesh, group)),
        "bridge, gradients in bfloat16": stepper(Transfer(mesh, group), dtype="bfloat16"),
        "bridge, a first bucket of 1 MB": stepper(Transfer(mesh, group, CAP_BYTES, FIRST_BYTES)),
    }


def format_calls(calls: Mapping[str, Sequence[float]], what: str, num_calls: int = 1) -> list[list[str]]:
    """Format each side beside the first."""
    base, rows = next(iter(calls.values())), []
    for side, found in calls.items():
        ratio = spread([a / b for a, b in zip(found, base, strict=True)])
        ms = 1e3 * median(found) / num_calls
        rows.append([what, side, f"{ms:.3g}", str(ratio), f"{ratio.low:.2f} - {ratio.high:.2f}"])
    return rows


def list_sides(options: Options, comm: MPI.Comm) -> dict[str, dict[str, Side]]:
    """Return what is measured -> its sides."""
    if options.part == "combiners":
        return {f"{LEAVES} leaves": combiner_sides(options, comm)}
    if options.part != "all_reduce":
        return {f"{options.rows} x {SEQ} tokens": step_sides(options, comm)}
    return {f"{num_bytes >> 10:,} KB": all_reduce_sides(comm, num_bytes) for num_bytes in NUM_BYTES}


def measure(options: Options, comm: MPI.Comm) -> list[list[str]]:
    """Return all rows; all ranks together."""
    rows, num_steps = [], options.steps if options.part in ("step", "overlap", "buckets") else 1
    for what, sides in list_sides(options, comm).items():
        calls = {name: partial(time_call, comm, side) for name, side in sides.items()}
        take_turns(calls, 2, 0)
        quota = CpuQuota(options.core)
        if options.core < 1:
            quota.begin()
        rows += format_calls(take_turns(calls, options.rounds, 0), what, num_steps)
        quota.end()
    return rows


def main(options: Options) -> None:
    bind()
    # as `shardtrain train` does, before jax starts
    os.environ["XLA_FLAGS"] = apply_preset("auto", os.environ, metadata.version("jaxlib")).xla_flags
    comm = world()
    rows = measure(options, comm)
    if comm.rank == 0:
        mpi = MPI.Get_library_version().splitlines()[0].rstrip(chr(0))
        print(f"{comm.size} ranks, {options.rounds} rounds; jax {jax.__version__}, {mpi}")
        print(markdown(["", "", "ms", "ratio (95 %)", "quartiles"], rows))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
