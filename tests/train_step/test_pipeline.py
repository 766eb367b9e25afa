"""The central law in a pipeline inside a mesh: any schedule, cut and mix of axes gives the plain step."""

import itertools
import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from allowed_chunks import list_allowed_chunks
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from unordered_collectives import find_unordered

from shardtrain.functional.cross_entropy import cross_entropy
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.model import BLOCKS
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.functional.remat_counts import RematCounts
from shardtrain.functional.rng import step_key
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.layers import peek_keys
from shardtrain.pipeline import mesh_tasks
from shardtrain.pipeline.partition import counts
from shardtrain.pipeline.schedule import (
    SCHEDULES,
    find_placement,
    make_table,
    read_table,
    write_table,
)
from shardtrain.pipeline.stacking import Partition
from shardtrain.plan.hlo.rendezvous import permutes_in_branches
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.step import make_evaluate, make_gradients, make_step

ROWS, SEQ, VOCAB, EMBED, MLP = 160, 4, 16, 8, 16
SIZES = {"vocab": VOCAB, "embed": EMBED, "mlp": MLP}


class Block(nnx.Module):
    """Stacked blocks, which a scan walks over."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs):
        def drawn(*dims: str) -> nnx.Param:
            shape = (num_layers, *(SIZES[dim] for dim in dims))
            values = 0.3 * jax.random.normal(rngs.params(), shape)
            return nnx.Param(values, out_sharding=("layers", *dims), eager_sharding=False)

        self.up, self.down, self.gain = drawn("embed", "mlp"), drawn("mlp", "embed"), drawn("embed")

    def __call__(self, stream):
        up, down, gain = (x[...].astype(stream["x"].dtype) for x in (self.up, self.down, self.gain))
        h = jnp.tanh(jnp.tensordot(stream["x"], up, 1))
        h = with_logical_constraint(h, ("batch", "seq", "mlp"))
        more = jnp.tensordot(h, down, 1) + gain * stream["start"]
        more = with_logical_constraint(more, ("batch", "seq", "embed"))
        return {**stream, "x": stream["x"] + jnp.where(stream["mask"][..., None] > 0, more, 0)}


class Words(nnx.Module):
    """Word scores. The stream is a dict: what changes, what all blocks see again, a mask of integers."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs, dtype: str = "float32"):
        self.dtype = dtype
        table = 0.5 * jax.random.normal(rngs.params(), (VOCAB, EMBED))
        self.table = nnx.Param(table, out_sharding=("vocab", "embed"), eager_sharding=False)
        self.blocks = Block(num_layers, rngs)

    def first(self, tokens, mask):
        x = self.table[...][tokens].astype(self.dtype)
        x = with_logical_constraint(x, ("batch", "seq", "embed"))
        return {"x": x, "mask": mask, "start": jnp.tanh(x)}

    def run(self, blocks, stream, keys):
        return jax.lax.scan(lambda stream, block: (block(stream), None), stream, blocks)[0]

    def last(self, stream):
        logits = jnp.tensordot(stream["x"], self.table[...].T.astype(self.dtype), 1).astype("float32")
        return with_logical_constraint(logits, ("batch", "seq", "vocab"))

    def __call__(self, *inputs):
        return self.last(self.run(self.blocks, self.first(*inputs), None))


def words_loss(apply, batch):
    targets = batch["tokens"][:, 1:]
    logits = apply(batch["tokens"][:, :-1], batch["mask"])
    weights = batch["weights"][:, None] * (batch["mask"] > 0)
    total, count = cross_entropy(logits, targets, weights)
    right = ((logits.argmax(-1) == targets) * weights).sum()
    return total, count, {"accuracy": (right, count)}


@cache
def words(num_layers=8):
    return from_nnx(partial(Words, num_layers))


@cache
def rows():
    random = np.random.default_rng(0)
    weights = np.ones(ROWS, np.float32)
    weights[-45:] = 0  # the last of 5 microbatches, and of 8 the last two, are all padding
    return {
        "tokens": random.integers(0, VOCAB, (ROWS, SEQ + 1), np.int32),
        "mask": random.integers(0, 3, (ROWS, SEQ), np.int32),
        "weights": weights,
    }


@cache
def initial(model):
    """The state before the first step, in the model's own order."""
    placement = placed(model, {"data": 1})
    return jax.tree.map(np.asarray, init_state(model, optax.identity(), placement, seed=7))


def cut_in(model, num_stages, schedule, by="equal") -> Partition | None:
    if num_stages == 1:
        return None
    if schedule in SCHEDULES:
        chunks = {"gpipe": 1}.get(schedule) or list_allowed_chunks(schedule)[0]
        placement = find_placement(schedule, chunks)
    else:
        found = read_table(schedule, lockstep=True)
        chunks, placement = found.num_chunks, found.placement
    found = counts(by, model.chain.num_blocks, num_stages * chunks)
    return Partition(num_stages=num_stages, num_chunks=chunks, placement=placement, counts=tuple(found))


def placed(model, mesh, *, schedule="1f1b", by="equal", optimizer=None, **layout):
    stages = cut_in(model, mesh.get("pipeline", 1), schedule, by)
    of = Layout(mesh=mesh, **layout)
    jax_mesh = make_mesh(of, jax.devices()[: math.prod(mesh.values())])
    optimizer = optimizer or optax.identity()
    return make_placement(model, optimizer, of, jax_mesh, stages=stages, schedule=schedule)


def on_mesh(batch, placement, microbatches):
    return {
        name: jax.device_put(x.reshape(microbatches, -1, *x.shape[1:]), placement.batch)
        for name, x in batch.items()
    }


def stored(placement, params):
    if placement.stages is not None:
        blocks = jax.tree.map(lambda x: np.asarray(placement.stages.store_blocks(x)), params[BLOCKS])
        params = {**params, BLOCKS: blocks}
    return jax.device_put(params, placement.state.params)


def gradients(model, mesh, microbatches=1, loss=words_loss, batch=None, **options) -> dict[str, Any]:
    """Loss, metrics and gradients through the toolkit, blocks in the model's own order."""
    placement = placed(model, mesh, **options)
    arguments = (
        stored(placement, initial(model).params),
        {},
        step_key(jnp.uint32(7), jnp.int32(0)),
        on_mesh(batch or rows(), placement, microbatches),
    )
    function = make_gradients(model, loss, placement)
    compiled = jax.jit(function, compiler_options=placement.compiler_options).lower(*arguments).compile()
    text = compiled.as_text() or ""
    assert (permutes_in_branches(text), find_unordered(text)) == ([], [])  # or it could wait for ever
    found = compiled(*arguments)
    grads = dict(found.grads)
    if placement.stages is not None:
        grads[BLOCKS] = jax.tree.map(placement.stages.restore_order, grads[BLOCKS])
    metrics = {name: total / count for name, (total, count) in found.metrics.items()}
    return jax.tree.map(
        np.asarray, {"loss": found.loss_sum / found.count, "count": found.count, **metrics, **grads}
    )


@cache
def plain(num_layers=8):
    """The same by plain jax and Flax, nothing of the toolkit but its initial parameters and the loss."""

    def loss(params):
        graph, state = nnx.split(Words(num_layers, nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, params)
        total, count, metrics = words_loss(nnx.merge(graph, state), jax.tree.map(jnp.asarray, rows()))
        return total / count, (count, metrics["accuracy"][0] / count)

    params = jax.tree.map(jnp.asarray, initial(words(num_layers)).params)
    (value, (count, accuracy)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return jax.tree.map(np.asarray, {"loss": value, "count": count, "accuracy": accuracy, **grads})


MIXES = {
    "tensor": {"tensor": 2},
    "data+tensor": {"data": 2, "tensor": 2},
    "data+fsdp": {"data": 2, "fsdp": 2},
}
MICROBATCHES = (1, 5, 8)
CASES = [
    (schedule, 2 if "+" in mix else 4, MICROBATCHES[(i + j) % 3], mix)
    for (i, schedule), (j, mix) in itertools.product(enumerate(SCHEDULES), enumerate(MIXES))
] + [("1f1b", 2, 5, "tensor")]


def test_the_cases_cover_every_pair():
    choices = (SCHEDULES, (2, 4), MICROBATCHES, MIXES)
    for a, b in itertools.combinations(range(4), 2):
        found = {(case[a], case[b]) for case in CASES}
        pairs = set(itertools.product(choices[a], choices[b]))
        # 4 stages and two more axes of 2 are 16 devices
        assert pairs - found == ({(4, mix) for mix in MIXES if "+" in mix} if (a, b) == (1, 3) else set())


def is_quick(schedule, stages, microbatches, mix):
    """Each schedule once, in one of the meshes in turn."""
    return mix == list(MIXES)[list(SCHEDULES).index(schedule) % 3]


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "mix"),
    [pytest.param(*case, marks=[pytest.mark.full] * (not is_quick(*case))) for case in CASES],
)
def test_every_pipeline_gives_the_plain_step(schedule, stages, microbatches, mix, assert_same):
    mesh = {"pipeline": stages, **MIXES[mix]}
    assert_same(gradients(words(), mesh, microbatches, schedule=schedule), plain())


# TestStep has as many blocks on two stages
@pytest.mark.full
@pytest.mark.parametrize(
    ("stages", "schedule", "by"), [(4, "zero_bubble", (1, 3, 1, 2)), (3, "zb_v", "equal")], ids=str
)
def test_layers_that_do_not_divide_give_the_plain_step(stages, schedule, by, assert_same):
    mesh = {"pipeline": stages, "tensor": 2}
    assert_same(gradients(words(7), mesh, 5, schedule=schedule, by=by), plain(7))


def test_blocks_with_two_remat_policies_give_the_plain_step(assert_same):
    config = DecoderConfig(
        vocab=VOCAB, seq=SEQ, embed=EMBED, num_layers=3, num_heads=2, mlp=MLP, remat="none"
    )
    batch = {name: rows()[name] for name in ("tokens", "weights")}
    expected = gradients(from_nnx(config), {"data": 1}, loss=next_token_loss, batch=batch)
    # the first stage has blocks of both
    mixed = from_nnx(replace(config, remat=RematCounts(full=1, none=2)))
    mesh = {"pipeline": 2, "tensor": 2}
    assert_same(gradients(mixed, mesh, 2, next_token_loss, batch, by=(2, 1)), expected)


def test_a_table_of_your_own_runs_in_a_mesh(tmp_path, assert_same):
    path = tmp_path / "mine.csv"
    write_table(make_table("zb_v", 3, 4, 2), path)  # one task a tick, as islands have it
    assert_same(gradients(words(), {"pipeline": 3}, 4, schedule=str(path)), plain())


def test_on_gpus_sums_are_stored_in_the_order_of_their_dims_and_stay_the_plain_ones(monkeypatch, assert_same):
    """At ZeRO stage 1."""
    mesh = {"pipeline": 2, "data": 2, "fsdp": 2}

    def num_constraints():
        placement = placed(words(), mesh, zero=1)
        params, key = stored(placement, initial(words()).params), step_key(jnp.uint32(7), jnp.int32(0))
        # a new function each time: jax keeps traces by function
        function = partial(make_gradients(words(), words_loss, placement))
        traced = jax.make_jaxpr(function)(params, {}, key, on_mesh(rows(), placement, 4))
        return str(traced).count("layout_constraint")

    assert num_constraints() == 0
    monkeypatch.setattr(mesh_tasks, "_is_on_gpus", lambda: True)
    assert num_constraints() > 0
    assert_same(gradients(words(), mesh, 4, zero=1), plain())


class Looking(Words):
    """Its blocks look up what tokens of the mask say, as a user writes it."""

    def run(self, blocks, stream, keys):
        def step(stream, block):
            return {**block(stream), "start": stream["start"] + block.down[...][stream["mask"]]}, None

        return jax.lax.scan(step, stream, blocks)[0]


def integer_loss(apply, batch):
    logits = jax.nn.log_softmax(apply(batch["tokens"][:, :-1], batch["mask"]))
    values = jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], 2)[..., 0]
    weights = batch["weights"][:, None] * (batch["mask"] > 0)
    return -(values * weights).sum(), weights.sum()


def test_a_loss_that_cuts_positions_out_of_the_batch_gives_the_plain_step(assert_same):
    """XLA cut them out of shards, by permutes."""
    mesh = {"pipeline": 2, "context": 2, "tensor": 2}
    assert_same(gradients(words(), mesh, 5, context_attention="all-gather"), plain())


@pytest.mark.parametrize(
    "others", [("context", "tensor"), pytest.param(("context", "fsdp"), marks=pytest.mark.full)]
)
def test_lookups_of_users_give_the_plain_step(others, assert_same):
    """XLA's partitioner ended the process, or looked up by permutes for which stages wait."""
    model = from_nnx(partial(Looking, 4))
    expected = gradients(model, {"data": 1}, 2, loss=integer_loss)
    mesh = {"pipeline": 2, **dict.fromkeys(others, 2)}
    assert_same(gradients(model, mesh, 2, loss=integer_loss, context_attention="all-gather"), expected)


class Noisy(Words):
    """It draws in evaluation too."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs):
        super().__init__(num_layers, rngs)
        self.rngs = rngs["dropout"].fork()

    def first(self, tokens, mask):
        stream = super().first(tokens, mask)
        noise = jax.random.normal(peek_keys(self.rngs, 1)[0], stream["x"].shape)
        return {**stream, "x": stream["x"] + noise}


def test_a_model_that_draws_evaluates_like_one_device():
    """Also in parts of a batch, as islands do; another batch has other draws."""
    model = from_nnx(partial(Noisy, 4))

    def made(mesh):
        placement = placed(model, mesh)
        state = init_state(model, optax.identity(), placement, seed=7)
        return placement, state, make_evaluate(model, words_loss, placement)

    def evaluated(made, microbatches=1, part=slice(None), number=3):
        placement, state, evaluate = made
        batch = {name: x[part] for name, x in rows().items()}
        found = evaluate(state, on_mesh(batch, placement, microbatches), number, part.start or 0)
        return jax.tree.map(np.asarray, found)

    expected = evaluated(one_device := made({"data": 1}))
    same = partial(np.testing.assert_allclose, rtol=1e-5)
    for mesh in ({"fsdp": 2}, {"pipeline": 2, "data": 2}):
        jax.tree.map(same, evaluated(made(mesh), 5), expected)
    parts = [evaluated(one_device, part=part) for part in (slice(0, 80), slice(80, ROWS))]
    jax.tree.map(lambda a, b, whole: same(a + b, whole), *parts, expected)
    assert abs(evaluated(one_device, number=4)["loss_sum"] - expected["loss_sum"]) > 0.1


def test_a_partition_for_another_placement_is_refused():
    stages = Partition(num_stages=2, num_chunks=2, counts=(2, 2, 2, 2))
    layout = Layout(mesh={"pipeline": 2})
    placement = make_placement(
        words(),
        optax.identity(),
        layout,
        make_mesh(layout, jax.devices()[:2]),
        stages=stages,
        schedule="zb_v",
    )
    with pytest.raises(ValueError, match="make the partition with placement='v'"):
        jax.eval_shape(
            make_gradients(words(), words_loss, placement),
            stored(placement, initial(words()).params),
            {},
            step_key(jnp.uint32(7), jnp.int32(0)),
            on_mesh(rows(), placement, 2),
        )


def test_it_computes_in_bfloat16():
    model = from_nnx(partial(Words, 2, dtype="bfloat16"))
    expected = gradients(model, {"data": 1})
    got = gradients(model, {"pipeline": 2, "tensor": 2}, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.1, atol=2e-3), got, expected)
    assert abs(expected["table"] - plain(2)["table"]).max() > 1e-5  # it did round


def in_order(placement, tree):
    """Parameters on the host, blocks in the model's own order."""
    if placement.stages is not None:
        tree = {**tree, BLOCKS: jax.tree.map(placement.stages.restore_order, tree[BLOCKS])}
    return jax.tree.map(np.asarray, tree)


class TestStep:
    """A whole step and an evaluation, of blocks that do not divide."""

    @pytest.fixture(scope="class")
    @classmethod
    def both(cls):
        """(on one device, in a pipeline): each a placement, a step, an evaluation and a state."""

        def made(mesh, **options):
            model, optimizer = words(7), optax.adamw(1e-2)
            placement = placed(model, mesh, optimizer=optimizer, **options)
            step = make_step(model, words_loss, optimizer, placement)
            state = init_state(model, optimizer, placement, seed=7)
            return placement, step, make_evaluate(model, words_loss, placement), state

        return made({"data": 1}), made({"pipeline": 2, "data": 2, "fsdp": 2}, schedule="zb_v")

    def test_it_begins_evaluates_and_steps_alike(self, both, assert_same):
        found = []
        for placement, step, evaluate, state in both:
            batch = on_mesh(rows(), placement, 4)
            before = in_order(placement, state.params)
            values = [evaluate(state, batch)]
            copy = jax.tree.map(jnp.copy, state)
            for _ in range(2):
                copy, metrics = step(copy, batch)
            values += [metrics, evaluate(copy, batch)]
            found.append((before, in_order(placement, copy.params), values))
        one_device, pipeline = found
        jax.tree.map(np.testing.assert_array_equal, pipeline[0], one_device[0])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), pipeline[2], one_device[2])
        # Adam divides by gradients: what rounds differently near 0 moves a weight by a part of the rate
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), pipeline[1], one_device[1])

    def test_nothing_can_wait_for_ever(self, both):
        _, (placement, step, evaluate, state) = both
        batch = on_mesh(rows(), placement, 4)
        for program in (step, jax.jit(evaluate)):
            text = program.lower(state, batch).compile().as_text() or ""
            assert (permutes_in_branches(text), find_unordered(text)) == ([], [])

    def test_a_gradient_that_is_not_finite_changes_nothing(self, both):
        _, (placement, step, _, state) = both
        batch = rows()
        old = jax.tree.map(np.asarray, state)
        wrong = {**batch, "weights": np.where(np.arange(ROWS) == 3, np.inf, batch["weights"])}
        new, metrics = step(jax.tree.map(jnp.copy, state), on_mesh(wrong, placement, 4))
        assert float(metrics["skipped"]) == 1
        assert int(new.step) == 1
        jax.tree.map(np.testing.assert_array_equal, new._replace(step=old.step), old)


def refused(model, loss=words_loss, mesh=None, **options):
    with pytest.raises(ValueError) as error:
        gradients(model, mesh or {"pipeline": 2}, 2, loss=loss, **options)
    return str(error.value)


class TestRefusals:
    def test_blocks_that_change_the_stream(self):
        class Growing(Words):
            def run(self, blocks, stream, keys):
                stream = super().run(blocks, stream, keys)
                return {**stream, "x": stream["x"].astype(jnp.bfloat16), "more": stream["mask"]}

        text = refused(from_nnx(partial(Growing, 2)))
        assert "['x']: float32[80, 4, 8] becomes bfloat16[80, 4, 8]" in text
        assert "['more']: nothing becomes int32[80, 4]" in text
        assert "use --across pipeline" in text

    def test_a_loss_that_calls_the_model_twice_or_never(self):
        def twice(apply, batch):
            words_loss(apply, batch)
            return words_loss(apply, batch)

        def never(apply, batch):
            return batch["weights"].sum(), batch["weights"].sum()

        assert "more than once" in refused(words(), twice)
        assert "without calling the model" in refused(words(), never)

    def test_a_ring_of_an_odd_number_of_devices(self):
        with pytest.raises(ValueError) as error:
            placed(words(), {"pipeline": 2, "context": 3})
        assert str(error.value).endswith(
            "so a ring sends keys between pairs of devices, and context=3 is odd; use context=2 or 4,"
            " --context-attention all-to-all or all-gather, or --across pipeline, where each island has a"
            " mesh of its own"
        )
        placed(words(), {"pipeline": 2, "context": 3}, context_attention="all-gather")

    def test_products_of_parts_of_a_sequence_on_an_odd_number_of_devices(self):
        options = {"sequence_sharded": True, "parameters": dict.fromkeys(("mlp", "vocab"), ())}
        with pytest.raises(ValueError) as error:
            placed(words(), {"pipeline": 2, "tensor": 3}, collective_matmul=True, **options)
        assert str(error.value).endswith(
            "so parts of a sequence are sent between pairs of devices, and tensor=3 is odd; use tensor=2 or"
            " 4, or no --collective-matmul"
        )
        placed(words(), {"pipeline": 2, "tensor": 3}, **options)

    def test_blocks_that_are_not_stacked_and_statistics(self):
        class Counting(nnx.Module):
            def __init__(self, rngs):
                self.blocks = nnx.List([nnx.BatchNorm(2, rngs=rngs) for _ in range(2)])

            def first(self, x):
                return x

            def run(self, blocks, stream, keys):
                for block in blocks:
                    stream = block(stream)
                return stream

            def last(self, stream):
                return stream

        with pytest.raises(ValueError) as error:
            placed(from_nnx(lambda rngs: Counting(rngs)), {"pipeline": 2}, unnamed="replicate")
        text = str(error.value)
        assert "stack them, or use --across pipeline" in text
        assert "blocks/0/mean" in text
