"""An island's programs: several give the steps of one and are sent in turn; sums inside; what is compared."""

import threading
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from tiny_language_model import TinyConfig

from shardtrain.combine.synchronisation import Synchronisation
from shardtrain.data import place
from shardtrain.functional.loss import classification_loss, next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.islands.agreement import program_hash
from shardtrain.islands.transfer import Transfer
from shardtrain.models.decoder import DecoderConfig
from shardtrain.models.mlp import MlpConfig
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.bucket_exchange import PACKED_BELOW, PackedGradients
from shardtrain.train_step.island_combiner import Channel
from shardtrain.train_step.island_compute import IslandCompute, Training
from shardtrain.train_step.placement import init_state, make_placement
from shardtrain.train_step.sync.local_steps import make_sync

RANDOM = np.random.default_rng(0)
TOKENS = {
    "tokens": RANDOM.integers(0, 16, (8, 5), np.int32),
    "weights": np.where(np.arange(8) < 7, 1, 0).astype(np.float32),
}
IMAGES = {
    "image": RANDOM.normal(size=(8, 4, 4)).astype(np.float32),
    "label": RANDOM.integers(0, 8, 8, np.int32),
    "weights": TOKENS["weights"],
}
STACKED = from_nnx(TinyConfig(vocab=16, seq=4, num_layers=7, dropout=0.2))
DECODER = from_nnx(DecoderConfig(vocab=16, seq=4, embed=8, num_layers=3, num_heads=2))
UNROLLED = from_nnx(MlpConfig(features=16, mlp=8, num_layers=3, classes=8, dropout=0.3))


class Alone:
    """A group of one island, without MPI."""

    size, index, traced_bytes = 1, 0, 0

    def all_reduce(self, x, span=None):
        return x


def island_step(
    model, loss, optimizer, batch, sizes, microbatches=1, placed=(), num_parts=1, **options
) -> Any:
    """(the step of an island without others, its first state, its batch, the transfer)."""
    layout = Layout(mesh=sizes, unnamed="replicate")
    mesh = make_mesh(layout, jax.devices()[: int(np.prod(list(sizes.values())))])
    placement = make_placement(model, optimizer, layout, mesh, **dict(placed))
    transfer = Transfer(mesh, cast(Any, [Alone()]))
    batch = place(batch, mesh, layout.batch_axes, microbatches)
    training, channel = Training(model, loss, optimizer), Channel(transfer, num_parts=num_parts)
    compute = IslandCompute(training, placement, channel, batch=batch, **options)
    step = make_sync(compute, options.get("synchronisation", Synchronisation()))
    return step, step.begin(init_state(model, optimizer, placement, 0), batch), batch, transfer


def steps_of(model, loss, batch, sizes, num_parts, microbatches=1, before_last=lambda: None, **options):
    """The state after two steps, the metrics of the last, and the bytes that each part sends."""
    step, state, batch, transfer = island_step(
        model, loss, optax.sgd(0.5), batch, sizes, microbatches, options, num_parts=num_parts
    )
    state, _ = step(state, batch)
    before_last()
    state, metrics = step(state, batch)
    transfer.close()
    part_bytes = [each.num_bytes for each in step.compute.exchange.combiners]
    return jax.device_get(state), jax.device_get(metrics), part_bytes


CASES = {
    "7 layers in 3 pieces": (STACKED, next_token_loss, TOKENS, {"data": 2, "fsdp": 2}, 3, 2),
    "a decoder": (DECODER, next_token_loss, TOKENS, {"data": 1}, 2, 1),
    "layers one by one": (UNROLLED, classification_loss, IMAGES, {"data": 2}, 3, 1),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.full] * (case != "7 layers in 3 pieces")) for case in CASES],
)
def test_several_programs_give_the_steps_of_one(case):
    model, loss, batch, sizes, num_parts, microbatches = CASES[case]
    options = {"scales_loss": True, "measures_noise": True} if microbatches > 1 else {}
    whole, parts = (
        steps_of(model, loss, batch, sizes, number, microbatches, **options) for number in (1, num_parts)
    )
    assert len(parts[2]) == num_parts
    # each part sends something, and together all of it
    assert min(parts[2]) > 0
    assert sum(parts[2]) == sum(whole[2])
    for a, b in zip(jax.tree.leaves(parts[:2]), jax.tree.leaves(whole[:2]), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


class Product(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(rngs.normal((16, 8)))

    def __call__(self, x):
        return x.reshape(len(x), -1) @ self.kernel


def test_a_model_of_one_parameter_stays_one_program():
    state, _, part_bytes = steps_of(from_nnx(Product), classification_loss, IMAGES, {"data": 1}, 3)
    whole, _, _ = steps_of(from_nnx(Product), classification_loss, IMAGES, {"data": 1}, 1)
    assert part_bytes == [4 * 16 * 8]
    jax.tree.map(np.testing.assert_array_equal, state, whole)


IS_SENT = threading.Event()


def wait_until_sent(x):
    """In the backward pass: ones if the last layer's gradient has been sent, else NaN."""
    return np.full(x.shape, 1 if IS_SENT.wait(60) else np.nan, np.float32)


@jax.custom_vjp
def hold(x):
    return x


def held_back(_, cotangent):
    shape = jax.ShapeDtypeStruct(cotangent.shape, jnp.float32)
    return (cotangent * jax.pure_callback(wait_until_sent, shape, cotangent, vmap_method="broadcast_all"),)


hold.defvjp(lambda x: (x, None), held_back)


class Held(nnx.Module):
    """Two layers: the gradient of the first waits until that of the last has been sent.

    The forward pass takes so long that the second program is started before the first has run: jax would run
    a program with a callback at once if all of its inputs were there.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.last = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x):
        slow = jnp.full((256, 256), lax.stop_gradient(x).mean())
        slow = lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), slow)
        return self.last(hold(self.first(x.reshape(len(x), -1)))) + 1e-9 * slow.mean()


def test_the_first_part_is_sent_before_the_second_has_run(monkeypatch):
    start = Transfer.start

    def started(self, number, *arguments, **options):
        future = start(self, number, *arguments, **options)
        # the program of the bucket has run, on the device whose next program waits for this
        future.add_done_callback(lambda _: IS_SENT.set())
        return future

    def compiled() -> None:
        monkeypatch.setattr(Transfer, "start", started)
        IS_SENT.clear()

    # the first step compiles both programs, and waits for nothing
    IS_SENT.set()
    state, metrics, part_bytes = steps_of(
        from_nnx(Held), classification_loss, IMAGES, {"data": 1}, 2, before_last=compiled
    )
    assert part_bytes == [4 * (4 * 8 + 8), 4 * 16 * 4]
    assert metrics["skipped"] == 0
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


def test_the_sum_inside_is_the_mean_times_the_islands_own_replicas():
    def change(inside):
        """What a step of SGD adds to the parameters: the combined gradient, negative."""
        state, before = first_step(Synchronisation(inside=inside))
        return jax.tree.map(lambda a, b: a - b, state.params, before.params)

    def first_step(synchronisation):
        model, optimizer = from_nnx(TinyConfig(vocab=16, embed=8, mlp=8)), optax.sgd(1.0)
        step, state, batch, transfer = island_step(
            model, next_token_loss, optimizer, TOKENS, {"data": 2, "fsdp": 4}, synchronisation=synchronisation
        )
        before = jax.device_get(state)
        after = jax.device_get(step(state, batch)[0])
        transfer.close()
        return after, before

    mean, total = change("mean"), change("sum")
    assert any(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(mean))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, 8 * a, 1e-4, 1e-6), mean, total)


WAYS: dict[str, dict[str, Any]] = {
    "sums of gradients": {},
    "in two programs": {"num_parts": 2},
    "Adasum": {"synchronisation": Synchronisation(by="adasum")},
    "deltas": {"synchronisation": Synchronisation(on="deltas", every=2)},
}


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.full] * (way in ("in two programs", "Adasum"))) for way in WAYS],
)
def test_programs_that_islands_compare_are_traced_once_and_differ_by_loss_and_optimizer(way):
    traced = []

    def program(rate=0.1, factor=1.0, starts=False):
        """The hash of the programs of a step; and what is traced when it starts."""

        def loss(apply, batch):
            traced.append("loss")
            total, *others = next_token_loss(apply, batch)
            return factor * total, *others

        def update(grads, state, params=None):
            traced.append("update")
            return jax.tree.map(lambda g: -rate * g, grads), state

        optimizer: Any = optax.GradientTransformation(lambda params: (), update)  # type: ignore[arg-type]
        model = from_nnx(TinyConfig(vocab=16, num_layers=2))
        step, state, batch, transfer = island_step(model, loss, optimizer, TOKENS, {"data": 2}, **WAYS[way])
        found = program_hash("\n".join(each.as_text() for each in step.compute.lowered(state, batch)))
        assert {"loss", "update"} <= set(traced)
        if starts:
            traced.clear()
            step(state, batch)
        transfer.close()
        return found

    whole = program(starts=True)
    assert traced == []
    assert program() == whole
    assert len({whole, program(rate=0.2), program(factor=2.0)}) == 3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_gradients_come_back_bit_by_bit_and_are_zeros_of_no_examples(dtype):
    shapes = {"bias": (3,), "kernel": (4, 8), "table": (PACKED_BELOW // 8, 8), "scale": ()}
    grads = {path: jnp.asarray(RANDOM.normal(size=shape), dtype) for path, shape in shapes.items()}
    buckets = [("kernel", "bias"), ("table", "scale"), ()]
    packing = PackedGradients([{path: jax.typeof(grads[path]) for path in bucket} for bucket in buckets])
    assert [{x.shape for x in bucket.values()} for bucket in packing.buckets] == [
        {(35,)}, {shapes["table"], (1,)}, set(),
    ]  # fmt: skip
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pack = jax.jit(lambda grads, count: packing.pack(grads, count, whole))
    jax.tree.map(np.testing.assert_array_equal, packing.unpack(pack(grads, 3.0)), grads)
    # whatever the gradients are
    nan = {path: x * jnp.nan for path, x in grads.items()}
    assert not any(x.any() for x in pack(nan, 0.0).values())
    assert all(jnp.isnan(x).all() for x in pack(nan, 1.0).values())
