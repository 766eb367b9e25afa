"""One stage of a pipeline across islands: its loss and its gradients are those of the plain one-device step.

Arguments: how many islands make one pipeline; "full" for more models, with the same pairs of choices.
"""

import sys
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from local_sgd import local_sgd
from step_parts import AS_STATE, initial_values, make_stage_compute, mean_gradient, place_alone
from tiny_language_model import TinyConfig

import shardtrain as st
from shardtrain.combine.fragments import Fragment, group_by_path, restore_paths
from shardtrain.combine.synchronisation import Outer, Synchronisation
from shardtrain.functional.model import path_text
from shardtrain.islands.bridge import MPI, MpiGroup, world
from shardtrain.islands.transfer import Transfer
from shardtrain.models.encoder_decoder import EncoderDecoderConfig
from shardtrain.models.resnet import ResNetConfig
from shardtrain.pipeline.cuts import make_partitions, trace_parts
from shardtrain.pipeline.schedule import make_table
from shardtrain.pipeline.stacking import owner_groups
from shardtrain.pipeline.stage_model import StageModel
from shardtrain.train_step.stage_compute import StageExecutor
from shardtrain.train_step.stage_links import PipelineGrid
from shardtrain.train_step.stage_programs import StageUpdate
from shardtrain.train_step.state import split_fragments
from shardtrain.train_step.sync.local_steps import make_sync

FULL = "full" in sys.argv[2:]
ROWS, SEQ, VOCAB = 40, 16, 32
LAYOUTS = [({"data": 1}, 1), ({"data": 2}, 3), ({"tensor": 2}, 3)]
"""Of each stage, and by which ZeRO stage: islands are unequal."""


class Skips(nnx.Module):
    """Blocks of different shapes; `early` skips to the last two, `mask` has no error."""

    class Block(nnx.Module):
        def __init__(self, number, width, before, last, rngs):
            self.linear = nnx.Linear(before, width, kernel_init=names("embed", "mlp"), rngs=rngs)
            assert self.linear.bias is not None
            self.linear.bias.set_metadata(out_sharding=("mlp",))
            self.norm = nnx.BatchNorm(width, use_bias=False, use_scale=False, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)
            self.number, self.last = number, last

        def __call__(self, stream):
            x = self.drop(jnp.tanh(self.norm(self.linear(stream["x"]))))
            if self.number == 0:
                return {"x": x, "early": x * 2, "mask": stream["mask"]}
            if self.last:
                return {"x": x + jnp.where(stream["mask"], stream["early"], 0).sum(-1, keepdims=True)}
            if self.number == 4:
                x += stream["early"].sum(-1, keepdims=True)
            return {**stream, "x": x}

    def __init__(self, rngs):
        widths = [16, 6, 10, 8, 4, 8, 12]
        last = len(widths) - 2
        self.blocks = nnx.List(
            [self.Block(i, widths[i + 1], widths[i], i == last, rngs) for i in range(last + 1)]
        )
        # not all equal: a softmax does not see what the last block adds to all logits alike
        self.scale = nnx.Param(jnp.linspace(0.5, 2, 16), out_sharding=("embed",))

    def first(self, image):
        x = image.reshape(len(image), -1) * self.scale
        return {"x": x, "mask": x[:, :6] > 0}

    def run(self, blocks, stream, keys):
        for block in blocks:
            stream = block(stream)
        return stream

    def last(self, stream):
        # the first piece's parameter again: it is borrowed
        return stream["x"][:, :8] * self.scale[:8]

    def __call__(self, image):
        return self.last(self.run(self.blocks, self.first(image), None))


class Unblocked(nnx.Module):
    """It says no blocks: a skip, dropout, integers that follow from activations, and a tied table."""

    def __init__(self, rngs):
        self.table = nnx.Param(
            0.3 * jax.random.normal(rngs.params(), (VOCAB, 32)), out_sharding=("vocab", None)
        )
        self.layers = nnx.List(
            [nnx.Linear(32, 32, kernel_init=names("embed", "mlp"), rngs=rngs) for _ in range(5)]
        )
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, tokens):
        early = x = self.table[...][tokens]
        for number, layer in enumerate(self.layers):
            x = x + self.drop(nnx.gelu(layer(x)))
            if number == 2:
                best = jnp.argmax(x[..., :4], -1)
        x = jnp.where(best[..., None] > 1, x, early)
        return x @ self.table[...].T


def names(*dims):
    return nnx.with_metadata(nnx.initializers.normal(0.3), out_sharding=dims)


@cache
def model(name):
    if name == "translation":
        # the encoded source, its mask and distances go to every decoder block, from stage to later stages
        return st.from_nnx(
            EncoderDecoderConfig(
                vocab=VOCAB,
                seq=SEQ,
                embed=32,
                num_encoder_layers=1,
                num_decoder_layers=2,
                num_heads=2,
                mlp=32,
                positions="relative",
                relative_buckets=4,
                relative_distance=4,
                dropout=0.3,
                remat="none",
            )
        )
    if name == "stacks":
        # six blocks for a cut, three of them of two
        return st.from_nnx(
            ResNetConfig(depth=29, filters=2, num_groups=1, height=4, width=4, colours=1, classes=8, stack=2)
        )
    dropout = 0.0 if name == "plain" else 0.3
    tiny = TinyConfig(vocab=VOCAB, embed=32, num_layers=7, mlp=64, dropout=dropout, tied=name == "tied")
    return st.from_nnx({"skips": Skips, "traced": Unblocked}.get(name, tiny))


@cache
def data(name):
    random = np.random.default_rng(0)
    weights = np.where(np.arange(ROWS) < ROWS - 3, 1, 0).astype(np.float32)
    if name in ("skips", "stacks"):
        shape = (ROWS, 4, 4) if name == "skips" else (ROWS, 4, 4, 1)
        return st.classification_loss, {
            "image": random.normal(size=shape).astype(np.float32),
            "label": random.integers(0, 8, ROWS, np.int32),
            "weights": weights,
        }
    if name == "translation":
        tokens = random.integers(0, VOCAB, (2, ROWS, SEQ + 1), np.int32)
        mask = (np.arange(SEQ) < random.integers(1, SEQ + 1, (ROWS, 1))).astype(np.int32)
        batch = {"source": tokens[0, :, 1:], "target": tokens[1], "weights": weights}
        return st.translation_loss, {**batch, "source_mask": mask}
    return st.next_token_loss, {
        "tokens": random.integers(0, VOCAB, (ROWS, SEQ + 1), np.int32),
        "weights": weights,
    }


def one_device(name, microbatches):
    """Metrics, gradients, model state and held-out metrics of the whole batch, on one device."""
    step, state, batch, placement = make_alone(name, 0, ROWS, microbatches)
    heldout = st.make_evaluate(model(name), data(name)[0], placement)(state, batch)
    state, metrics = step(state, batch)
    return jax.device_get((metrics, state.opt_state, state.model_state, heldout))


def make(
    comm,
    num_stages,
    name,
    schedule,
    chunks,
    microbatches,
    synchronisation=Synchronisation(),
    shares=None,
    optimizer=AS_STATE,
    last_step=-1,
    cuts="params",
):
    """(step, state, batch) of this rank."""
    grid = PipelineGrid(num_islands=comm.size, num_stages=num_stages, island=comm.rank)
    sizes, zero = LAYOUTS[grid.stage]
    if name == "skips" and "data" in sizes:
        sizes = {"tensor": grid.stage + 1}  # a batch norm is of the rows of each replica of an island
    layout = st.Layout(mesh=sizes, zero=zero, unnamed="replicate")
    mesh = st.make_mesh(layout, jax.local_devices()[: max(sizes.values())])
    loss, rows = data(name)
    shares = shares or [ROWS // grid.num_replicas] * grid.num_replicas
    start, number = sum(shares[: grid.replica]), shares[grid.replica]
    unit = microbatches if name == "skips" else 2 * microbatches
    padded = -(-number // unit) * unit
    mine = np.resize(np.arange(start, start + number), padded)
    rows = {key: value[mine] for key, value in rows.items()}
    rows["weights"] = np.where(np.arange(padded) < number, rows["weights"], 0).astype(np.float32)
    microbatch = {key: value[: padded // microbatches] for key, value in rows.items()}
    pipeline = st.Pipeline(schedule=schedule, virtual_stages=chunks, stages=cuts)
    traced = trace_parts(model(name), loss, microbatch)
    partitions = make_partitions(traced, pipeline, num_stages, grid.num_replicas)
    stages = partitions[grid.replica]
    stage_model = StageModel(model=model(name), stages=stages, traced=traced, stage=grid.stage)
    placement = st.make_placement(stage_model.make_stage_model(), optimizer, layout, mesh)
    owned = []
    for group in owner_groups(partitions):
        joins = group.stages[grid.replica] == grid.stage
        owners = comm.Split(0 if joins else MPI.UNDEFINED, comm.rank)
        owned += [(group, Transfer(mesh, [MpiGroup(owners)]))] if joins else []
    how, update = (schedule, microbatches), StageUpdate(optimizer)
    compute = make_stage_compute(
        comm, grid, stage_model, placement, *how, update, owned, synchronisation, start
    )
    step: Any = make_sync(compute, synchronisation, last_step)
    state = st.init_state(stage_model.make_stage_model(), optimizer, placement, 7)
    batch = st.place(rows, mesh, layout.batch_axes, microbatches)
    return step, step.begin(state, batch), batch


TASKS = {"jit(forward)", "jit(backward)", "jit(initial_sums)"}


@cache
def compiled_in_tasks():
    """Return a list to which the tasks of every step from now on add the names of what they compile."""
    found, in_tasks, plain = [], [], StageExecutor.run

    def run(self, programs, kind=None):
        in_tasks.append(1)
        try:
            plain(self, programs, kind)
        finally:
            in_tasks.pop()

    def heard(event, duration_secs, **about):
        if in_tasks and event.endswith("backend_compile_duration"):
            found.append(about["fun_name"])

    StageExecutor.run = run
    jax.monitoring.register_event_duration_secs_listener(heard)
    return found


def close(got, expected, case):
    got, expected = (
        {path_text(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)} for tree in (got, expected)
    )
    assert got.keys() == expected.keys(), (case, got.keys() ^ expected.keys())
    for path in expected:
        np.testing.assert_allclose(got[path], expected[path], 1e-5, 1e-6, err_msg=f"{case}: {path}")


def the_plain_step(comm, num_stages, name, chunks, microbatches, schedules, shares) -> None:
    """One set of compiled parts, and every table that fits it."""
    # two pipelines cut the model differently, and stages have other meshes too
    cuts = {2: "3,4;5,2", 3: "1,2,4;3,2,2"}[num_stages] if shares else "params"
    if name == "traced":
        cuts = "equal"
    step, state, batch = make(
        comm, num_stages, name, schedules[0], chunks, microbatches, shares=shares, cuts=cuts
    )
    expected = None if comm.rank else one_device(name, microbatches)  # one rank compiles it for all
    metrics, grads, model_state, heldout = comm.bcast(expected)
    for schedule in schedules:
        case = f"{name} {schedule} {num_stages} stages, {chunks} chunks, {microbatches} microbatches"
        step.compute.follow(make_table(schedule, num_stages, microbatches, chunks))
        compiled_in_tasks().clear()
        before = (step.compute.mailbox.num_messages, step.compute.mailbox.num_bytes)
        after, found = step(jax.tree.map(jnp.copy, state), batch)
        sent = (step.compute.mailbox.num_messages - before[0], step.compute.mailbox.num_bytes - before[1])
        close(jax.device_get(found), metrics, case)
        close(jax.device_get(after.opt_state), step.compute.stage_model.own(grads), case)
        close(
            jax.device_get(after.model_state), step.compute.stage_model.own(model_state, "model_state/"), case
        )
        if name in ("tied", "untied"):
            traffic(step, sent, microbatches, case)
        if name in ("traced", "stacks", "untied") and schedule == schedules[0]:
            # all stages compile before any of them waits for another
            assert not TASKS & {*compiled_in_tasks()}, (case, compiled_in_tasks())
    if name in ("skips", "traced") or schedules[0] in ("1f1b", "zb_v"):
        close(step.compute.evaluate(state, batch), heldout, f"{case}, held-out")
    if name == "skips":
        a_bad_gradient(step, state, batch)
    step.close()


def traffic(step, sent, microbatches, case) -> None:
    """Activations x microbatches x boundaries, each way; and what is borrowed goes there and back."""
    stage_model, grid = step.compute.stage_model, step.compute.grid
    placement = stage_model.stages.part_placement
    others = [
        part + by for part in stage_model.parts for by in (-1, 1) if 0 <= part + by <= stage_model.last_part
    ]
    boundaries = sum(placement.stage(part) != stage_model.stage for part in others)
    rows = step.compute.stage_model.traced.batch["tokens"].shape[0]
    table = VOCAB * 32 * 4
    borrows = (grid.stage in (0, grid.num_stages - 1)) and bool(stage_model.lent or stage_model.borrowed)
    expected = (
        boundaries * microbatches + borrows,
        boundaries * microbatches * rows * SEQ * 32 * 4 + borrows * table,
    )
    assert sent == expected, (case, sent, expected)


def adasum_of_pipelines(comm, num_stages) -> None:
    """Pipelines combined by Adasum, stage by stage: each its own mean gradient, combined leaf by leaf."""
    shares = [24, 16]
    way = Synchronisation(by="adasum")
    step, state, batch = make(comm, num_stages, "tied", "interleaved", 2, 2, way, shares)
    state, _ = step(state, batch)
    alone = None
    if comm.rank < 2:
        plain, own, rows, _ = make_alone("tied", sum(shares[: comm.rank]), shares[comm.rank])
        alone = jax.device_get(plain(own, rows)[0].opt_state)
    means = comm.allgather(alone)[:2]
    for path, leaf in jax.tree.leaves_with_path(jax.device_get(state.opt_state)):
        a, b = (
            np.asarray(group_by_path(step.compute.stage_model.own(mean))[path_text(path)]) for mean in means
        )
        layers = zip(a, b, leaf, strict=True) if path_text(path).startswith("blocks/") else [(a, b, leaf)]
        for x, y, got in layers:
            dot, xx, yy = (float((p.astype(np.float64) * q).sum()) for p, q in ((x, y), (x, x), (y, y)))
            expected = (1 - dot / (2 * xx)) * x + (1 - dot / (2 * yy)) * y if xx and yy else x + y
            np.testing.assert_allclose(got, expected, 2e-5, 1e-6, err_msg=path_text(path))
    step.close()


def whole_fragments(comm, step, way):
    """The fragments of all stages, as rows of the whole model's arrays."""
    blocks = np.array(step.compute.stage_model.block_numbers)
    own = [
        {path: rows if rows is None else tuple(blocks[list(rows)]) for path, rows in each.rows.items()}
        for each in split_fragments(way, step.compute.placement.specs)
    ]
    by_rank = comm.allgather(own)[: step.compute.grid.num_stages]
    found = []
    for number in range(way.fragments):
        whole = {}
        for stage in by_rank:
            for path, rows in stage[number].items():
                whole[path] = rows if rows is None else (*whole.get(path, ()), *rows)
        found.append(Fragment(whole))
    return found


def local_steps_of_pipelines(comm, num_stages) -> None:
    """Pipelines with two local steps: what each changes alone, in float64, merged stage by stage."""
    shares, rate = [24, 16], 0.5
    outer = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)
    way = Synchronisation(on="deltas", every=2, fragments=2, overlap=1, outer=outer, synchronous_steps=1)
    step, state, batch = make(comm, num_stages, "plain", "1f1b", 1, 2, way, shares, optax.sgd(rate), 4)
    loss, rows = data("plain")
    gradient = mean_gradient(model("plain"), loss)

    def plain(params, replica, number):
        start = sum(shares[:replica])
        return gradient(params, {name: x[start : start + shares[replica]] for name, x in rows.items()})

    counts = [rows["weights"][:24].sum(), rows["weights"][24:].sum()]
    fragments = whole_fragments(comm, step, way)
    found = None
    if not comm.rank:  # one rank compiles and computes it for all
        whole = initial_values(model("plain")).params
        found = local_sgd(plain, whole, counts, 4, way, rate, fragments, last_step=4)
        found = [restore_paths(whole, params) for params in found]
    expected = comm.bcast(found)
    seen = 0
    for number in range(4):
        state, metrics = step(state, batch)
        seen += metrics["count"]
        reference = group_by_path(step.compute.stage_model.own(expected[number]))
        for path, x in group_by_path(jax.device_get(state.params)).items():
            np.testing.assert_allclose(x, reference[path], 2e-5, 5e-6, err_msg=f"step {number + 1}: {path}")
    # every example of both pipelines once, in the merges that end a round
    assert seen == 4 * sum(counts) * SEQ
    step.close()


def make_alone(name, start, number, microbatches=2):
    """(step, state, batch, placement) of rows on one device."""
    loss, rows = data(name)
    placement = place_alone(model(name))
    step = st.make_step(model(name), loss, AS_STATE, placement, start_row=start)
    batch = {key: value[start : start + number] for key, value in rows.items()}
    state = jax.device_put(initial_values(model(name)), placement.state)
    return step, state, st.place(batch, placement.mesh, ("data",), microbatches), placement


def a_bad_gradient(step, state, batch) -> None:
    """A loss that is not finite changes nothing on any stage."""
    state, metrics = step(state, batch)
    assert metrics["skipped"] == 0
    before = jax.device_get(state)
    state, metrics = step(state, {**batch, "image": batch["image"] * jnp.nan})
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state)._replace(step=before.step), before)


SKIPS_ON_TWO = ((1, "1f1b"), (2, "interleaved"))


def main() -> None:
    comm, num_stages = world(), int(sys.argv[1])
    unequal = {1: [40], 2: [24, 16]}[comm.size // num_stages]
    plain = ["1f1b", "gpipe", "zero_bubble"]
    cases = {
        (2, 1): [
            ("tied", 1, 5, plain, None),
            ("traced", 2, 2, ["interleaved"], None),
            ("stacks", 1, 2, ["1f1b"], None),
        ],
        (3, 1): [("skips", 2, 4, ["interleaved"], None), ("tied", 2, 5, ["zb_v"], None)],
        # statistics of a batch norm are of one pipeline's rows, so that only one can be compared
        (2, 2): [("untied", 1, 2, plain, unequal)],
        (3, 2): [("tied", 1, 1, plain, unequal)],
    }
    if FULL:
        cases[2, 1] += [("skips", chunks, 2, [name, "gpipe"], None) for chunks, name in SKIPS_ON_TWO]
        cases[3, 1] += [("translation", 1, 2, ["zero_bubble"], None), ("skips", 2, 8, ["interleaved"], None)]
        cases[2, 2] += [("tied", 2, 1, ["interleaved"], None), ("traced", 1, 2, plain, unequal)]
        cases[3, 1] += [("traced", 1, 2, ["zero_bubble"], None)]
    for case in cases[num_stages, comm.size // num_stages]:
        the_plain_step(comm, num_stages, *case)
    if comm.size == 4:
        adasum_of_pipelines(comm, num_stages)
        local_steps_of_pipelines(comm, num_stages)
    sys.stdout.write("done\n")


main()
