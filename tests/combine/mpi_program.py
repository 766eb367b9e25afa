"""Combiners over MPI: reads rank-stacked trees, writes what each size of group makes of them."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.combine import make_combiner
from shardtrain.islands.bridge import MpiGroup, world


def meet(comm):
    """A barrier in which ranks sleep: MPI's own would keep the cores from those that still compile."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.005)


def main(inputs, output, *cases):
    comm = world()
    data = np.load(inputs)
    found = {}
    for name, size in (case.rsplit("@", 1) for case in cases):
        inside = comm.rank < int(size)
        part = comm.Split(0 if inside else 1, comm.rank)
        if not inside:
            meet(comm)
            continue
        group = MpiGroup(part)
        combiner = make_combiner(name)
        # a group of three has a leaf of bfloat16 too
        which = range(int(size) != 3, int(data["leaves"]))
        dtypes = [jnp.bfloat16 if i == 0 else jnp.float32 for i in which]
        like = [data[f"0/{i}"][0].astype(dtype) for i, dtype in zip(which, dtypes, strict=True)]
        state = jax.jit(combiner.init)(like)
        combine = jax.jit(lambda *arguments, c=combiner, g=group: c.combine(*arguments, g)[:3])
        combine.lower(like, np.float32(1), state).compile()  # kept, and found again by the first call
        meet(part)
        for step in range(2):
            # numpy's arithmetic: each operation of jax alone would compile
            tree = [data[f"{step}/{i}"][comm.rank].astype(x.dtype) for i, x in zip(which, like, strict=True)]
            counts = data["counts"][: int(size)]
            if step and int(size) > 1:
                counts = np.where(np.arange(int(size)) == 1, 0, counts)
                if part.rank == 1:
                    tree = [np.full_like(x, np.nan) for x in tree]
            value, after, metrics = combine(tree, np.float32(counts[part.rank]), state)
            values = [np.asarray(x, np.float32) for x in value]
            # the same bits on all ranks
            everyone = part.allgather([x.tobytes() for x in (*values, *map(np.asarray, metrics.values()))])
            assert all(other == everyone[0] for other in everyone), (name, size)
            if not counts[part.rank]:
                kept, before = (
                    (state, after) if isinstance(state, tuple) and not state else (after[0], state[0])
                )
                jax.tree.map(np.testing.assert_array_equal, kept, before)
            state = after
            if part.rank == 0:
                for i, x in zip(which, values, strict=True):
                    found[f"{name}@{size}/{step}/{i}"] = x
        # a NaN of one rank reaches all of them
        tree = [np.ones_like(x) for x in tree]
        tree[-2][...] = np.nan if part.rank == int(size) - 1 else 1
        value, _, _ = combine(tree, np.float32(1), state)
        assert not np.isfinite(value[-2]).all(), (name, size)
        meet(comm)
    if comm.rank == 0:
        np.savez(output, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
