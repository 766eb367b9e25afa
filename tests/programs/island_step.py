"""One island of several: the island step gives loss and gradients of the plain one-device step.

Arguments: "full" for every way of summing and every way of local steps, whatever the number of islands.
"""

import dataclasses
import functools
import itertools
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from gossip import Gossip
from local_sgd import local_sgd
from step_parts import AS_STATE, initial_values, mean_gradient, place_alone
from tiny_language_model import TinyConfig

from shardtrain.combine import CODECS, COMBINERS, make_combiner, mean
from shardtrain.combine.fragments import group_by_path
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.data import place
from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.functional.model import path_text
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.rng import step_key
from shardtrain.islands.bridge import Control, MpiGroup, world
from shardtrain.islands.options import REDUCE
from shardtrain.islands.transfer import Transfer
from shardtrain.models.mlp import MlpConfig
from shardtrain.plan.island_exchange import island_merges
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.gradients import make_gradients
from shardtrain.train_step.island_combiner import Channel, IslandCombiner
from shardtrain.train_step.island_compute import IslandCompute, Training
from shardtrain.train_step.placement import make_placement, restorable_state
from shardtrain.train_step.state import split_fragments
from shardtrain.train_step.step import make_step
from shardtrain.train_step.sync.local_steps import make_sync

FULL = "full" in sys.argv[1:]


def make_island_step(
    training, placement, channel, synchronisation=Synchronisation(), *, start_row=0, last_step=-1
):
    compute = IslandCompute(training, placement, channel, synchronisation, start_row)
    return make_sync(compute, synchronisation, last_step)


ROWS = 12
MODEL = from_nnx(MlpConfig(features=16, mlp=32, num_layers=1, classes=8, dropout=0.3))
RANDOM = np.random.default_rng(0)
BATCH = {
    "image": RANDOM.normal(size=(ROWS, 4, 4)).astype(np.float32),
    "label": RANDOM.integers(0, 8, ROWS, np.int32),
    "weights": np.where(np.arange(ROWS) < 10, 1, 0).astype(np.float32),
}


def one_device():
    """Loss and gradients of the whole batch, on one device."""
    placement = place_alone(MODEL)
    state = first_state(MODEL, AS_STATE, placement)
    batch = place(BATCH, placement.mesh, ("data",))
    state, metrics = make_step(MODEL, classification_loss, AS_STATE, placement)(state, batch)
    return jax.device_get((metrics["loss_sum"], metrics["count"], state.opt_state))


def rows_of(shares, island, unit):
    """This island's rows, filled up with rows of weight 0 to a multiple of `unit`."""
    start, number = sum(shares[:island]), shares[island]
    rows = np.arange(start, start + number)
    padded = np.resize(rows if number else [0], max(-(-number // unit), 1) * unit)
    batch = {name: value[padded] for name, value in BATCH.items()}
    return {**batch, "weights": np.where(np.arange(len(padded)) < number, batch["weights"], 0)}, start


def noise_of_parts(shares, unit, num_parts):
    """The estimates of the gradient noise from the gradients of every island's parts, on one device."""
    placement = place_alone(MODEL)
    state = first_state(MODEL, AS_STATE, placement)
    gradients = jax.jit(make_gradients(MODEL, classification_loss, placement, mean=False))
    norms, counts, whole = [], [], 0.0
    for island in range(len(shares)):
        rows, start = rows_of(shares, island, unit)
        size = len(rows["label"]) // num_parts
        for part in range(num_parts):
            of_part = {name: value[part * size :][:size] for name, value in rows.items()}
            batch = place(of_part, placement.mesh, ("data",))
            key = step_key(state.seed, jnp.int32(0))
            found = gradients(state.params, state.model_state, key, batch, start + part * size)
            grads = np.concatenate([np.ravel(x) for x in jax.tree.leaves(found.grads)]).astype(np.float64)
            norms.append(np.square(grads).sum())
            counts.append(float(found.count))
            whole = whole + grads
    count = sum(counts)
    if max(counts) == count:
        return [(0.0, 0.0)] * 3
    system = [[np.square(counts).sum(), count], [count**2, count]]
    square, trace = np.linalg.solve(system, [sum(norms), np.square(whole).sum()])
    return [(square, 1.0), (trace, 1.0), (count, 1.0)]


def first_state(model, optimizer, placement):
    return jax.device_put(initial_values(model, optimizer), placement.state)


def check(comm, got, expected, case) -> None:
    """The plain step's numbers, and the same bits on every island."""
    got = jax.device_get(got)
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6, err_msg=f"{case}: {jax.tree_util.keystr(path)}")
    digests = Control(comm).all_gather("bits", [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(got)])
    assert all(digest == digests[0] for digest in digests), case


def main() -> None:
    comm = world()
    island, num_islands = comm.rank, comm.size
    equal = [ROWS // num_islands] * num_islands
    unequal = {1: [12], 2: [12, 0], 3: [5, 0, 7], 4: [7, 1, 0, 4]}[num_islands]
    hosts = ["a", "b", "a", "a"][:num_islands]
    expected = comm.bcast(None if island else one_device())  # one rank compiles it for all
    devices = jax.local_devices()
    cases = [({"data": len(devices)}, unequal, 1)]
    if len(devices) == 1:
        cases += [({"data": 1}, equal, 2)]
    else:
        # an island that is alone sends nothing: it has every axis in the central tests
        cases += [({"fsdp": 2}, equal, 2), ({"tensor": 2}, unequal, 1)][: 1 if num_islands == 1 else 2]
    groups = {reduce: [MpiGroup(comm, reduce, hosts) for _ in devices] for reduce in REDUCE}
    for sizes, shares, microbatches in cases:
        layout = Layout(mesh=sizes)
        mesh = make_mesh(layout, devices)
        placement = make_placement(MODEL, AS_STATE, layout, mesh, measures_noise=True)
        rows, start = rows_of(shares, island, len(devices) * microbatches)
        batch = place(rows, mesh, layout.batch_axes, microbatches)
        transfer = Transfer(mesh, groups["all_reduce"], 3000, 1000)
        step = make_island_step(
            Training(MODEL, classification_loss, AS_STATE), placement, Channel(transfer), start_row=start
        )
        state = first_state(MODEL, AS_STATE, placement)
        state = step.begin(state, batch)
        state, metrics = step(state, batch)
        got = (metrics["loss_sum"], metrics["count"], state.opt_state)
        check(comm, got, expected, f"{sizes} {shares} {microbatches}")
        if num_islands == 2:
            noise = [metrics[f"gradient_{name}"] for name in ("square", "trace", "batch")]
            unit = len(devices) * microbatches
            num_parts = microbatches * math.prod(mesh.shape[axis] for axis in placement.layout.replica_axes)
            check(comm, noise, noise_of_parts(shares, unit, num_parts), f"noise of {sizes} {shares}")
    # the last case's gradients by every way of summing, in buckets of every kind
    key = step_key(state.seed, jnp.int32(0))
    gradients = jax.jit(make_gradients(MODEL, classification_loss, placement))
    found = gradients(state.params, state.model_state, key, batch, start)
    tree = {path_text(path): x for path, x in jax.tree.leaves_with_path(found.grads)}
    caps = [0, 2000, 25 << 20]
    pairs = itertools.product(REDUCE, caps)
    if not FULL:  # each value once
        pairs = [(reduce, caps[(i + num_islands) % 3]) for i, reduce in enumerate(REDUCE)]
    for reduce, cap in pairs:
        combiner = IslandCombiner(mean(), placement, Transfer(mesh, groups[reduce], cap, min(cap, 1000)))
        combined = combiner.finish(tree, combiner.start(tree, found.count, combiner.init()))
        got = [combined.value[path] for path in tree]
        check(comm, got, jax.tree.leaves(expected[2]), f"{reduce} {cap}")
    if num_islands == 2:
        sent_bytes(Transfer(mesh, groups["all_reduce"]), placement, tree, found.count)
        one_bad_island(comm, Transfer(mesh, groups["all_reduce"]), placement, batch, start)
        an_empty_island(comm, Transfer(mesh, groups["all_reduce"]), layout, mesh, batch, start)
        own_statistics(comm, Transfer(mesh, groups["all_reduce"]), layout, mesh, batch, start)
    if num_islands in (2, 3):
        local_steps(comm, Transfer(mesh, groups["all_reduce"], 3000, 1000), layout, mesh)
    sys.stdout.write("done\n")


def sent_bytes(transfer, placement, tree, count) -> None:
    """Of every combiner and codec, `inspect` prints the bytes that metrics count."""
    smallest = {"power_sgd": "power_sgd:1"}
    for name in [*COMBINERS, *(f"{smallest.get(codec, codec)}+mean" for codec in CODECS)]:
        before = transfer.num_bytes
        combiner = IslandCombiner(make_combiner(name), placement, transfer)
        combiner.finish(tree, combiner.start(tree, count, combiner.init()))
        way = Synchronisation(by=name, on="deltas")
        assert (transfer.num_bytes - before,) == island_merges(way, placement.specs, 2).merges, name


def one_bad_island(comm, transfer, placement, batch, start) -> None:
    """A gradient that is not finite on one island changes nothing on any, what a codec keeps included."""
    synchronisation = Synchronisation(by="int8+adasum")
    arguments = (Training(MODEL, classification_loss, AS_STATE), placement, Channel(transfer))
    step = make_island_step(*arguments, synchronisation=synchronisation, start_row=start)
    state = first_state(MODEL, AS_STATE, placement)
    state, metrics = step(step.begin(state, batch), batch)
    assert metrics["skipped"] == 0
    assert comm.rank or any(jnp.any(x) for x in jax.tree.leaves(state.combine_state))
    before = jax.device_get(state)
    bad = {**batch, "image": batch["image"] * (jnp.nan if comm.rank == 0 else 1)}
    state, metrics = step(state, bad)
    assert metrics["skipped"] == 1
    assert state.step == before.step + 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state)._replace(step=before.step), before)


def an_empty_island(comm, transfer, layout, mesh, batch, start) -> None:
    """An island without rows takes no step of its own, and a delta is of the parameters that were given."""
    optimizer = optax.adam(1e-2)
    placement = make_placement(MODEL, optimizer, layout, mesh)
    batch = {**batch, "weights": batch["weights"] * (comm.rank == 0)}
    arguments = (Training(MODEL, classification_loss, optimizer), placement, Channel(transfer))
    step = make_island_step(
        *arguments, synchronisation=Synchronisation(by="adasum", on="deltas"), start_row=start
    )
    state = step.begin(first_state(MODEL, optimizer, placement), batch)
    first = jax.device_get(state.params)
    state, _ = step(state, batch)
    assert state.opt_state[0].count == (1 if comm.rank == 0 else 0)
    change = jax.tree.map(lambda a, b: a - b, jax.device_get(state.params), first)
    assert max(np.abs(x).max() for x in jax.tree.leaves(change)) > 5e-3
    # other parameters than those it returned: the next delta is of these
    doubled = jax.device_put(
        jax.tree.map(lambda x: 2 * x, jax.device_get(state.params)), placement.state.params
    )
    before = jax.device_get(doubled)
    state, _ = step(state._replace(params=doubled), batch)
    change = jax.tree.map(lambda a, b: a - b, jax.device_get(state.params), before)
    assert max(np.abs(x).max() for x in jax.tree.leaves(change)) < 2e-2
    bits = [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(jax.device_get(state.params))]
    assert Control(comm).all_gather("bits", bits) == [bits] * comm.size


class Normed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(16, momentum=0.75, rngs=rngs)
        self.head = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(x.reshape(len(x), -1)))


def own_statistics(comm, transfer, layout, mesh, batch, start) -> None:
    """Between merges each island has running statistics of its own; a merge averages them by examples."""
    model, optimizer = from_nnx(Normed), optax.sgd(0.1)
    layout = dataclasses.replace(layout, unnamed="replicate")
    placement = make_placement(model, optimizer, layout, mesh)
    found = {}
    for every in (2, 4):
        way = Synchronisation(on="deltas", every=every)
        training = Training(model, classification_loss, optimizer)
        step = make_island_step(training, placement, Channel(transfer), way, start_row=start)
        state = step.begin(first_state(model, optimizer, placement), batch)
        before = jax.device_get(state.model_state)
        state, _ = step(state, batch)
        # what is saved and evaluated is still that of the last merge
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.model_state), before)
        state, _ = step(state, batch)
        found[every] = jax.device_get(state)
    own = found[4].local.model_state
    by_island = comm.allgather((own, float(batch["weights"].sum())))
    assert any((a != b).any() for a, b in zip(*(jax.tree.leaves(x) for x, _ in by_island), strict=True))
    counts = np.array([count for _, count in by_island])
    expected = jax.tree.map(
        lambda *x: np.tensordot(counts / counts.sum(), np.stack(x), 1), *(x for x, _ in by_island)
    )
    for got in (found[2].model_state, found[2].local.model_state):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-6), got, expected)


WAYS = {
    "every step, momentum": Synchronisation(on="deltas", outer=Outer(learning_rate=0.5, momentum=0.5)),
    "nesterov, fragments": Synchronisation(
        on="deltas",
        every=4,
        fragments=2,
        outer=Outer(learning_rate=0.7, momentum=0.9, nesterov=True),
        synchronous_steps=1,
    ),
    "overlap": Synchronisation(
        on="deltas", every=2, overlap=1, fragments=2, outer=Outer(learning_rate=0.5), synchronous_steps=2
    ),
    "rule": Synchronisation(on="deltas", when="drift:0.03"),
    "gossip": Gossip(),
}
OF_NUM_ISLANDS = {2: ("overlap", "rule"), 3: ("every step, momentum", "nesterov, fragments", "gossip")}
"""Of two islands of two devices, and of three, one of them without rows; with "full" both have every way."""


def synchronises_at(part):
    """The rule "moved", in float64."""

    def synchronises(deltas, common):
        far = np.sqrt(sum((np.stack(x) ** 2).reshape(len(x), -1).sum(1) for x in deltas.values())).max()
        return far > part * np.sqrt(sum((x**2).sum() for x in common.values()))

    return synchronises


def local_steps(comm, transfer, layout, mesh) -> None:
    """Local steps and merges are those of each island in float64; the state alone says what comes next."""
    model = from_nnx(TinyConfig(vocab=16, embed=8, mlp=8, num_layers=3))
    random, rate, num_steps = np.random.default_rng(2), 0.5, 5
    units, shares = mesh.size, {2: [4, 8], 3: [4, 0, 8]}[comm.size]
    tokens = random.integers(0, 16, (num_steps, sum(shares), 5), np.int32)
    first = sum(shares[: comm.rank])
    rows = np.resize(np.arange(first, first + shares[comm.rank]), max(shares[comm.rank], units))
    weights = np.full(len(rows), min(shares[comm.rank], 1), np.float32)
    optimizer = optax.sgd(rate)
    placement = make_placement(model, optimizer, layout, mesh)
    batches = [place({"tokens": each[rows], "weights": weights}, mesh, layout.batch_axes) for each in tokens]
    gradient = mean_gradient(model, next_token_loss)

    def plain(params, replica, step):
        start, number = sum(shares[:replica]), shares[replica]
        rows = {"tokens": tokens[step - 1, start : start + number], "weights": np.ones(number, np.float32)}
        return gradient(params, rows)

    gather = Control(comm).all_gather
    arguments = (Training(model, next_token_loss, optimizer), placement, Channel(transfer, gather))
    rows_and_end: Any = {"start_row": first, "last_step": num_steps}
    for name in WAYS if FULL else OF_NUM_ISLANDS[comm.size]:
        way = WAYS[name]
        moved_3_percent = synchronises_at(0.03) if way.when != "always" else lambda deltas, common: True
        step = make_island_step(*arguments, way, **rows_and_end)
        state = step.begin(first_state(model, optimizer, placement), batches[0])
        fragments = split_fragments(way, placement.specs)
        params = jax.tree.map(jnp.asarray, jax.device_get(state.params))
        reference = functools.partial(
            local_sgd, plain, params, shares, num_steps, way, rate, fragments, synchronises=moved_3_percent
        )
        # one rank compiles and computes it for all
        expected = comm.bcast(None if comm.rank else reference(last_step=num_steps))
        saved, counted = [], 0.0
        for number, batch in enumerate(batches):
            saved.append(jax.device_get(state))
            state, metrics = step(state, batch)
            counted += float(metrics["count"])
            for path, x in group_by_path(jax.device_get(state.params)).items():
                case = f"{name}, step {number + 1}: {path}"
                np.testing.assert_allclose(x, expected[number][path], 1e-5, 2e-6, err_msg=case)
        # the loss of a step is told once, with the merge that ends its round
        assert counted == sum(shares) * 4 * num_steps, (name, counted)
        if not way.overlap:
            continue
        # another step that gets a state from between two merges goes on with the same bits
        again = make_island_step(*arguments, way, **rows_and_end)
        wanted = again.wanted(restorable_state(placement), batches[0])
        for start in (1, 3):  # between synchronous steps too
            other = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), saved[start], wanted)
            for batch in batches[start:]:
                other, _ = again(other, batch)
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(other), jax.device_get(state))


main()
