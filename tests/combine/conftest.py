"""What the tests of combiners share: references in float64 that gather and compute, and ranks to run on.

Ranks of MPI have the same operations: `islands/test_bridge.py`.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardtrain.combine import MeshGroup, make_combiner


def pair(a, b):
    """Adasum of two vectors."""
    both, of_a, of_b = a @ b, a @ a, b @ b
    return (1 - both / (2 * of_a) if of_a else 1) * a + (1 - both / (2 * of_b) if of_b else 1) * b


def tree_of_pairs(vectors):
    """Consecutive pairs, the odd one waits for the next round."""
    vectors = [np.asarray(v, np.float64) for v in vectors]
    while len(vectors) > 1:
        pairs = [pair(*both) for both in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + vectors[2 * len(pairs) :]
    return vectors[0]


def mean(ranks, counts):
    """ranks: for each the list of its leaves."""
    weights = np.asarray(counts, np.float64) / max(np.sum(counts), 1e-300)
    return [sum(w * x for w, x in zip(weights, leaf, strict=True)) for leaf in zip(*ranks, strict=True)]


def summed(ranks, counts):
    return [x * np.sum(np.asarray(counts) > 0) for x in mean(ranks, counts)]


def adasum(ranks, counts, units=None):
    """units: the number of each leaf's unit; by default each leaf is one."""
    units = list(range(len(ranks[0]))) if units is None else units
    found: list = [None] * len(units)
    for unit in set(units):
        which = [i for i, u in enumerate(units) if u == unit]
        flat = [
            np.concatenate([np.ravel(rank[i]) for i in which]) * (n > 0)
            for rank, n in zip(ranks, counts, strict=True)
        ]
        ends = np.cumsum([0, *(np.size(ranks[0][i]) for i in which)])
        result = tree_of_pairs(flat)
        for i, first, last in zip(which, ends, ends[1:], strict=False):
            found[i] = result[first:last].reshape(np.shape(ranks[0][i]))
    return found


def rounded(dtype):
    """What a leaf becomes in 16 bits."""
    return lambda leaves, kept: (
        [x.astype(np.float32).astype(dtype).astype(np.float64) for x in leaves],
        kept,
    )


def in_8_bits(leaves, kept):
    found = []
    for x in leaves:
        scale = np.float32(np.max(np.abs(x), initial=0)) / np.float32(127)
        found.append(np.round(x.astype(np.float32) / (scale or 1)).astype(np.float64) * scale)
    return found, kept


def greatest(share):
    def encode(leaves, kept):
        found = []
        for x in leaves:
            k = min(x.size, max(1, int(np.floor(share * x.size + 0.5))))
            places = np.argsort(-np.abs(x).ravel(), kind="stable")[:k]
            flat = np.zeros(x.size)
            flat[places] = x.ravel()[places]
            found.append(flat.reshape(x.shape))
        return found, kept

    return encode


def factored(leaves, kept):
    """One power iteration of each matrix by itself; kept: the right factors, None for other leaves."""
    found, after = [], []
    for x, q in zip(leaves, kept, strict=True):
        if q is None:
            found.append(x)
            after.append(None)
            continue
        matrix = x.reshape(x.shape[0], -1)
        left = np.linalg.qr(matrix @ q)[0]
        found.append((left @ left.T @ matrix).reshape(x.shape))
        after.append(matrix.T @ left)
    return found, after


def target(leaves, residual, count):
    return [(x if count else np.zeros_like(x)) + e for x, e in zip(leaves, residual, strict=True)]


ENCODERS = {
    "bfloat16": rounded(ml_dtypes.bfloat16),
    "float16": rounded(np.float16),
    "int8": in_8_bits,
    "scale": lambda leaves, kept: (leaves, kept),
}


class Coded:
    """A codec before a combiner, with error feedback on each rank."""

    def __init__(self, encode, combine, size, shapes, kept=None):
        self.encode, self.combine = encode, combine
        self.residual = [[np.zeros(s) for s in shapes] for _ in range(size)]
        self.kept = [kept] * size

    def __call__(self, ranks, counts):
        sent = []
        for r, (leaves, n) in enumerate(zip(ranks, counts, strict=True)):
            owed = target(leaves, self.residual[r], n)
            decoded, kept = self.encode(owed, self.kept[r])
            sent.append(decoded)
            if n:
                self.residual[r] = [t - s for t, s in zip(owed, decoded, strict=True)]
                self.kept[r] = kept
        return self.combine(sent, counts)


class PowerMean:
    """PowerSGD with factors that are averaged: the mean, projected on what one power iteration finds."""

    def __init__(self, combine, size, shapes, kept):
        self.combine, self.kept = combine, kept
        self.residual = [[np.zeros(s) for s in shapes] for _ in range(size)]

    def __call__(self, ranks, counts):
        targets = [
            target(leaves, residual, n)
            for leaves, residual, n in zip(ranks, self.residual, counts, strict=True)
        ]
        found = self.combine(targets, counts)
        for i, q in enumerate(self.kept):
            if q is None:
                continue
            matrix = found[i].reshape(found[i].shape[0], -1)
            left = np.linalg.qr(matrix @ q)[0]
            project = left @ left.T
            for r, n in enumerate(counts):
                own = targets[r][i].reshape(matrix.shape)
                if n:
                    self.residual[r][i] = (own - project @ own).reshape(found[i].shape)
            self.kept[i] = matrix.T @ left
            found[i] = (project @ matrix).reshape(found[i].shape)
        return found


def make_reference(name, like, size):
    """Return the reference of a combiner, a function of (ranks, counts), with the residuals of its codecs."""
    shapes = [x.shape for x in jax.tree.leaves(like)]
    if name == "adasum:whole":
        return lambda ranks, counts: adasum(ranks, counts, [0] * len(shapes))
    *codecs, last = name.split("+")
    combine = {"mean": mean, "sum": summed, "adasum": adasum}[last]
    for codec in reversed(codecs):
        codec, _, argument = codec.partition(":")
        if codec != "power_sgd":
            encode = greatest(float(argument)) if codec == "top_k" else ENCODERS[codec]
            combine = Coded(encode, combine, size, shapes)
            continue
        init = make_combiner(name).init(like).codec
        kept = [None if q is None else np.asarray(q, np.float64) for q in init]
        if make_combiner(last).linear:
            return PowerMean(combine, size, shapes, kept)
        combine = Coded(factored, combine, size, shapes, kept)
    return combine


def on_ranks(kind, combine, size):
    """`combine(group, ...)` of one rank, as a compiled function of arrays with a first dim of ranks."""
    group = MeshGroup("data", size)
    if kind == "vmap":
        return jax.jit(jax.vmap(lambda *arguments: combine(group, *arguments), axis_name="data"))
    mesh = Mesh(np.array(jax.devices()[:size]), ("data",))

    def shard(*arguments):
        arguments = jax.tree.map(lambda x: x[0], arguments)
        return jax.tree.map(lambda x: x[None], combine(group, *arguments))

    spec = PartitionSpec("data")
    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


def stacked_state(combiner, tree, size):
    """The first state of each of `size` ranks."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (size, *x.shape)), combiner.init(tree))


@pytest.fixture(scope="session")
def references():
    """The references by name, and `of`, which makes those with codecs."""
    return SimpleNamespace(
        tree_of_pairs=tree_of_pairs,
        mean=mean,
        sum=summed,
        adasum=adasum,
        of=make_reference,
    )


@pytest.fixture(scope="session")
def ranks():
    """`ranks.run(kind, combine, size)` and `ranks.state(combiner, tree, size)`."""
    return SimpleNamespace(run=on_ranks, state=stacked_state)
