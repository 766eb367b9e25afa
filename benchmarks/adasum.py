"""Adasum beside the mean, of the same gradients between the same ranks: time, and bytes that a rank sends.

Run it on several ranks: `mpiexec -n 4 python benchmarks/adasum.py`. Figures: docs/benchmarks/adasum.md.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from bridge import bind, in_turn
from paired import Spread, spread

from shardtrain.combine import make_combiner
from shardtrain.islands.bridge import MpiGroup, world


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
      embed: features; the leaves are the six of a block: 3 embed^2 + 8 embed^2 and two vectors.
      blocks: how many.
      combiners: by name; each is set beside the first.
      rounds: calls of each.
      quiet: rounds in which other programs took more than this share of the processors are run again.
      seed: of gradients and orders.
      json: where to write all figures too.
    """

    embed: int = 512
    blocks: int = 8
    combiners: tuple[str, ...] = ("mean", "adasum")
    rounds: int = 30
    quiet: float = 1.0
    seed: int = 0
    json: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came out.

    Args:
      options: what was asked for.
      num_parameters, num_leaves, num_ranks: of what was combined.
      sent_bytes: combiner -> what one rank sends.
      ring_bytes: what it sends in an all-reduce of the gradients, 2 n (P - 1) / P.
      seconds: combiner -> the median over rounds of the slowest rank's.
      ratios: combiner -> over the first combiner, round by round.
      faults: combiner -> median page faults of a call on rank 0.
    """

    options: Options
    num_parameters: int
    num_leaves: int
    num_ranks: int
    sent_bytes: dict[str, float]
    ring_bytes: float
    seconds: dict[str, float]
    ratios: dict[str, Spread]
    faults: dict[str, float]


class CountingGroup:
    """A group that counts what this rank sends, as it is traced.

    An all-reduce of n bytes over P ranks counts 2 n (P - 1) / P, an all-gather n (P - 1).
    """

    def __init__(self, group: MpiGroup) -> None:
        self._group, self.size, self.index = group, group.size, group.index
        self.sent_bytes = 0.0

    def all_reduce(self, x: jax.Array, span: int | None = None) -> jax.Array:
        span = self.size if span is None else span
        self.sent_bytes += 2 * x.nbytes * (span - 1) / span
        return self._group.all_reduce(x, span)

    def exchange(self, x: jax.Array, sources: Sequence[int]) -> jax.Array:
        self.sent_bytes += x.nbytes * (sources[self.index] != self.index)
        return self._group.exchange(x, sources)

    def all_gather(self, x: jax.Array) -> jax.Array:
        self.sent_bytes += x.nbytes * (self.size - 1)
        return self._group.all_gather(x)

    def whole(self, x: jax.Array, op: Any = "sum", *, stages: bool = False) -> jax.Array:
        return self._group.whole(x, op)


def gradients(options: Options, rank: int) -> dict[str, jax.Array]:
    """Random float32 leaves with the shapes of a decoder's blocks; ranks share half of what they have."""
    embed = options.embed
    shapes = {
        "query_key_value": (embed, 3 * embed),
        "output": (embed, embed),
        "up": (embed, 4 * embed),
        "down": (4 * embed, embed),
        "up_bias": (4 * embed,),
        "norm": (embed,),
    }
    common, own = jax.random.split(jax.random.key(options.seed))
    own = jax.random.fold_in(own, rank)

    def leaf(number: int, shape: tuple[int, ...]) -> jax.Array:
        keys = jax.random.fold_in(common, number), jax.random.fold_in(own, number)
        return sum((jax.random.normal(key, shape) for key in keys), jnp.zeros(shape))

    blocks = range(options.blocks)
    names = [(f"{block:02}/{name}", shape) for block in blocks for name, shape in shapes.items()]
    return jax.jit(lambda: {name: leaf(i, shape) for i, (name, shape) in enumerate(names)})()


def measure(options: Options) -> Figures:
    """Time the combiners in turn; all ranks together."""
    comm = world()
    group, tree = MpiGroup(comm), gradients(options, comm.rank)
    sides, sent = {}, {}
    for text in options.combiners:
        combiner, counting = make_combiner(text), CountingGroup(group)
        state = combiner.init(tree)

        def combine(tree: Any, state: Any, combiner: Any = combiner, group: Any = group) -> Any:
            return combiner.combine(tree, jnp.float32(1), state, group)

        jax.eval_shape(lambda tree, state, c=combine, g=counting: c(tree, state, group=g), tree, state)
        sent[text] = counting.sent_bytes
        compiled = jax.jit(combine)
        sides[text] = lambda compiled=compiled, state=state: jax.block_until_ready(
            compiled(tree, state).value
        )
    in_turn(comm, sides, 2, options.seed)
    calls = in_turn(comm, sides, options.rounds, options.seed, options.quiet)
    num_parameters = sum(x.size for x in tree.values())
    base = calls[options.combiners[0]]
    return Figures(
        options=options,
        num_parameters=num_parameters,
        num_leaves=len(tree),
        num_ranks=comm.size,
        sent_bytes=sent,
        ring_bytes=2 * 4 * num_parameters * (comm.size - 1) / comm.size,
        seconds={name: median(call.seconds for call in found) for name, found in calls.items()},
        ratios={
            name: spread([a.seconds / b.seconds for a, b in zip(found, base, strict=True)])
            for name, found in calls.items()
        },
        faults={name: median(call.faults for call in found) for name, found in calls.items()},
    )


def report(figures: Figures) -> str:
    """The figures as a table."""
    lines = [
        f"{figures.num_parameters:,} float32 parameters in {figures.num_leaves} leaves,"
        f" {figures.num_ranks} ranks;"
        f" an all-reduce sends 2 n (P - 1) / P = {figures.ring_bytes:,.0f} bytes per rank;"
        f" {figures.options.rounds} rounds; jax {jax.__version__}",
        "",
        f"| combiner | ms | over {figures.options.combiners[0]} | quartiles | bytes sent |"
        " beside 2 n (P - 1) / P | page faults |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for name, seconds in figures.seconds.items():
        ratio, sent = figures.ratios[name], figures.sent_bytes[name]
        lines.append(
            f"| {name} | {1e3 * seconds:.1f} | {ratio.median:.2f} | {ratio.low:.2f} - {ratio.high:.2f} |"
            f" {sent:,.0f} | {sent - figures.ring_bytes:+,.0f} | {figures.faults[name]:.0f} |"
        )
    return "\n".join(lines)


def main(options: Options) -> None:
    bind()
    figures = measure(options)
    if world().rank == 0:
        if options.json is not None:
            options.json.write_text(json.dumps(asdict(figures), indent=1, default=str) + "\n")
        print(report(figures))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
