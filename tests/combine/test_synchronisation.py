"""Every way to synchronise the replicas of a mesh gives the arithmetic of its replicas, in float64."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gossip import Gossip
from mesh_local_sgd import (
    ADAM,
    MESHES,
    MODEL,
    NESTEROV,
    SGD,
    STAGES,
    STEPS,
    batches,
    check_steps,
    same,
    steps,
)
from tiny_language_model import TinyConfig

from shardtrain.combine.adasum import adasum
from shardtrain.combine.fragments import group_by_path, make_fragments
from shardtrain.combine.synchronisation import PRESETS, Outer, Synchronisation, preset
from shardtrain.data import place
from shardtrain.functional.loss import next_token_loss
from shardtrain.functional.nnx_model import from_nnx
from shardtrain.models.decoder import DecoderConfig
from shardtrain.pipeline.stacking import Partition
from shardtrain.plan.island_exchange import MergeBytes
from shardtrain.report.traffic import synchronisation_text
from shardtrain.sharding.layout import Layout
from shardtrain.sharding.mesh import make_mesh
from shardtrain.train_step.placement import init_state, make_placement, state_specs
from shardtrain.train_step.state import split_fragments
from shardtrain.train_step.step import list_combined_labels, make_step
from shardtrain.trainer.config import describe
from shardtrain.trainer.prepared_run import _rows_digest
from shardtrain.trainer.strategy import Strategy

EIGHT = from_nnx(TinyConfig(vocab=16, embed=8, mlp=8, num_layers=8))
STAGES_OF_EIGHT = Partition(num_stages=2, num_chunks=2, placement="v", counts=(2, 2, 2, 2))
OUTERS = {"none": Outer(), "momentum": Outer(learning_rate=0.5, momentum=0.5), "nesterov": NESTEROV}
GRID = list(itertools.product(MESHES, (1, 2, 4), OUTERS))
QUICK = (("data+fsdp", 1, "none"), ("data+tensor", 4, "momentum"), ("data+pipeline", 2, "nesterov"))


@pytest.mark.parametrize(
    ("mesh", "every", "outer"),
    [pytest.param(*case, marks=[pytest.mark.full] * (case not in QUICK)) for case in GRID],
)
def test_local_steps_and_merges_are_those_of_each_replica(mesh, every, outer):
    check_steps(Synchronisation(on="deltas", every=every, outer=OUTERS[outer]), MESHES[mesh])


@pytest.mark.parametrize("mesh", ["data+fsdp", pytest.param("data", marks=pytest.mark.full)])
def test_a_way_of_somebody_else_is_one_value(mesh):
    """Gossip, which the package does not have, on a mesh; islands: programs/island_step.py."""
    states, _ = check_steps(Gossip(), MESHES[mesh], last_step=STEPS)
    # between the merges replicas differ, by less than without neighbours
    plain, _ = steps(Synchronisation(on="deltas", every=3), MESHES[mesh], last_step=STEPS)
    spread = [
        sum(np.var(x, 0).sum() for x in jax.tree.leaves(each[2].local.drift)) for each in (states, plain)
    ]
    assert 0 < spread[0] < spread[1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"distance": 1}, "Gossip has rounds of its own, and updates of waves"),
        ({"overlap": 1}, r"rounds combine the same part of the parameters \(0, 0\)"),
    ],
)
def test_what_a_way_of_somebody_else_cannot_be(given, text):
    with pytest.raises(ValueError, match=text):
        Gossip(**given)


def test_a_run_says_whose_way_it_is():
    plain, own = (describe(Strategy(synchronisation=way)) for way in (Synchronisation(), Gossip()))
    assert own.items() - plain.items() >= {("synchronisation.kind", "gossip:Gossip")}
    sent = MergeBytes(2, (8, 8, 8), every=3)
    assert synchronisation_text(Gossip(), sent).startswith("replicas: Gossip, deltas by mean, every 3 steps")


def test_fragments_are_merged_in_turn():
    synchronisation = Synchronisation(on="deltas", every=4, fragments=2, outer=NESTEROV)
    states, placement = check_steps(synchronisation, MESHES["data+pipeline"], last_step=STEPS)
    # nothing is left after the last step, which is in the middle of a round
    assert not any(x.any() for x in jax.tree.leaves(states[-1].local))
    # after two steps the layers of the first fragment have moved, and the others have not
    first, second = split_fragments(synchronisation, placement.specs)
    moved = (states[2].params["blocks"]["up"] != states[0].params["blocks"]["up"]).any((1, 2))
    assert moved[np.array(first.rows["blocks/up"])].any()
    assert not moved[np.array(second.rows["blocks/up"])].any()


@pytest.mark.parametrize(
    "synchronisation",
    [preset("adasum-deltas"), pytest.param(Synchronisation(by="adasum:whole"), marks=pytest.mark.full)],
    ids=str,
)
def test_stages_of_a_pipeline_combine_as_one_mesh_does(synchronisation):
    logged = {"data": [], "data+pipeline": []}
    found = {
        name: steps(synchronisation, {**MESHES[name], "data": 2}, 2, ADAM, logged=logged[name])
        for name in logged
    }
    (plain, whole), (staged, placement) = found["data"], found["data+pipeline"]
    for number in (1, 2):
        same(staged[number].params, group_by_path(plain[number].params), f"step {number}", placement.stages)
    # each layer has its number of the model, and what all stages have is there once
    assert list_combined_labels(placement) == list_combined_labels(whole)
    assert "blocks/up/2" in list_combined_labels(placement)
    for ours, theirs in zip(logged["data+pipeline"], logged["data"], strict=True):
        np.testing.assert_allclose(ours["orthogonality"], theirs["orthogonality"], 1e-4)
    # of each layer, or of one vector
    num_values = len(set(logged["data"][0]["orthogonality"].tolist()))
    assert num_values == 1 if synchronisation.by == "adasum:whole" else num_values > 3


def test_what_a_combiner_cannot_do_in_a_pipeline_is_refused():
    with pytest.raises(ValueError, match="needs all of them at once, by their names; use another combiner"):
        steps(Synchronisation(by=adasum(per=lambda path: path)), MESHES["data+pipeline"])
    layout = Layout(mesh={"data": 2, "pipeline": 2}, parameters={"layers": ()})
    sizes = {"data": 2, "fsdp": 1, "tensor": 1, "pipeline": 2}
    with pytest.raises(ValueError, match="give it the axis 'pipeline' alone"):
        state_specs(MODEL, SGD, layout, sizes, Synchronisation(by="adasum"), STAGES)


def test_islands_whose_rows_are_of_other_layers_have_other_facts():
    way = Synchronisation(on="deltas", every=3, fragments=3)
    run = SimpleNamespace(strategy=Strategy(synchronisation=way))

    def digest(stages, run=run):
        sizes = {"data": 1, "fsdp": 1, "tensor": 1, "pipeline": 1 if stages is None else stages.num_stages}
        specs = state_specs(EIGHT, SGD, Layout(mesh=sizes), sizes, stages=stages)
        setup = SimpleNamespace(stage_model=None, placement=SimpleNamespace(specs=specs))
        return _rows_digest(run, setup)  # type: ignore[arg-type]

    two, four = (Partition(num_stages=n, counts=(8 // n,) * n) for n in (2, 4))
    assert len({digest(None), digest(two), digest(four)}) == 3
    # sent together, layers in order are the same on any mesh
    together = SimpleNamespace(strategy=Strategy())
    assert {digest(stages, together) for stages in (None, two, four)} == {None}
    assert digest(STAGES_OF_EIGHT, together) is not None


OVERLAPPED = {
    "a whole round": Synchronisation(on="deltas", every=2, overlap=2),
    "fragments": Synchronisation(on="deltas", every=2, overlap=1, fragments=2, outer=NESTEROV),
}


@pytest.mark.parametrize("name", OVERLAPPED)
def test_a_merge_arrives_some_steps_after_it_was_sent(name):
    states, _ = check_steps(OVERLAPPED[name], MESHES["data"], last_step=STEPS)
    # after the last step nothing is under way or left to send
    local = states[-1].local
    assert not any(x.any() for x in jax.tree.leaves((local.drift, local.sent, local.count)))
    assert (local.sent_count == -1).all()


def test_a_skipped_step_combines_what_was_changed_before():
    synchronisation = Synchronisation(on="deltas", every=3)
    layout = Layout(mesh=MESHES["data"])
    mesh = make_mesh(layout, jax.devices()[:4])
    placement = make_placement(MODEL, SGD, layout, mesh, synchronisation=synchronisation)
    step = make_step(MODEL, next_token_loss, SGD, placement)
    state = init_state(MODEL, SGD, placement, 3)
    states = [jax.device_get(state)]
    for number, batch in enumerate(batches()[:3], 1):
        weights = batch["weights"] * (np.nan if number == 3 else 1)
        state, metrics = step(state, place({**batch, "weights": weights}, mesh, layout.batch_axes))
        assert metrics["skipped"] == (number == 3)
        states.append(jax.device_get(state))
    # step 3 adds nothing of its own, and the mean of what the replicas changed in the two before
    shares = states[2].local.count[:, 0] / states[2].local.count.sum()
    expected = jax.tree.map(
        lambda p, d: p + np.tensordot(shares, d, 1), states[2].params, states[2].local.drift
    )
    same(states[3].params, group_by_path(expected), "skipped")
    assert not any(x.any() for x in jax.tree.leaves(states[3].local))


SYNCHRONOUS_FIRST = {
    "nesterov": Synchronisation(on="deltas", every=2, outer=NESTEROV, synchronous_steps=2),
    "overlap": Synchronisation(on="deltas", every=2, overlap=1, fragments=2, synchronous_steps=1),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param("overlap", "data+fsdp", marks=pytest.mark.full),
        ("nesterov", "data+pipeline"),
    ],
)
def test_after_synchronous_steps_each_replica_goes_its_own_way(name, mesh):
    way = SYNCHRONOUS_FIRST[name]
    states, _ = check_steps(way, MESHES[mesh], last_step=STEPS)
    for number, state in enumerate(states[1:], 1):
        # in the synchronous steps all changes are common
        has_own = any(x.any() for x in jax.tree.leaves(state.local.drift))
        assert has_own == (way.synchronous_steps < number < STEPS and (number % 2 == 1 or way.overlap > 0))


@pytest.mark.full
def test_synchronous_steps_alone_are_the_plain_step():
    way = Synchronisation(by="adasum", on="deltas", synchronous_steps=STEPS, outer=NESTEROV)
    first, _ = steps(way, MESHES["data"], optimizer=ADAM, last_step=STEPS)
    plain, _ = steps(Synchronisation(), MESHES["data"], optimizer=ADAM)
    for a, b in zip(first, plain, strict=True):
        same(a.params, group_by_path(b.params), "plain")


@pytest.mark.parametrize(
    ("overlap", "synchronous_steps"), [pytest.param(0, 2, marks=pytest.mark.full), (1, 0)]
)
def test_a_state_between_merges_goes_on_with_the_same_bits(overlap, synchronous_steps):
    synchronisation = Synchronisation(
        by="int8+mean",
        on="deltas",
        every=4,
        fragments=2,
        overlap=overlap,
        outer=NESTEROV,
        synchronous_steps=synchronous_steps,
    )
    whole, _ = steps(synchronisation, MESHES["data"], optimizer=ADAM)
    for number in range(1, STEPS):
        state = jax.tree.map(jnp.asarray, whole[number])
        parts, _ = steps(synchronisation, MESHES["data"], optimizer=ADAM, state=state, first=number)
        jax.tree.map(np.testing.assert_array_equal, parts[-1], whole[-1])


def test_any_optax_transformation_is_an_outer_optimizer():
    synchronisation = Synchronisation(on="deltas", every=2, outer=optax.adam(1e-2))
    states, _ = steps(synchronisation, MESHES["data"], num_steps=2)
    change = jax.tree.map(lambda a, b: abs(a - b).max(), states[2].params, states[0].params)
    # the first step of Adam moves each weight by its rate
    assert all(abs(x - 1e-2) < 1e-4 for x in jax.tree.leaves(change))


def test_presets_are_found_by_name():
    assert Synchronisation.short("diloco") == PRESETS["diloco"]
    assert preset("streaming-diloco").fragments == 5
    assert Synchronisation.short("int8+adasum") == {"by": "int8+adasum"}
    assert len(PRESETS) == 7
    with pytest.raises(ValueError, match="did you mean 'diloco'"):
        preset("dilocco")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"fragments": 3, "every": 2, "on": "deltas"}, "use 2 fragments or fewer"),
        ({"outer": NESTEROV}, "use deltas (--combine-on deltas)"),
        ({"overlap": 3, "every": 2, "on": "deltas"}, "use 0 to 2"),
        ({"overlap": 1}, "overlap is 1, but gradients are combined in every step; use deltas"),
        ({"synchronous_steps": 3}, "synchronous_steps is 3, but gradients are combined in every step"),
        ({"synchronous_steps": -1, "on": "deltas"}, "synchronous_steps is -1; use 0 or more"),
        ({"when": "drift:0.1"}, "when is 'drift:0.1', but gradients are combined in every step"),
        ({"when": "drfit:0.1", "on": "deltas"}, "did you mean 'drift'"),
    ],
)
def test_what_does_not_fit_together_is_refused(given, text):
    with pytest.raises(ValueError) as error:
        Synchronisation(**given)
    assert text in str(error.value)


@pytest.mark.parametrize("given", [{"learning_rate": 0.0}, {"momentum": 1.0}, {"nesterov": True}])
def test_outer_optimizers_that_cannot_learn_are_refused(given):
    with pytest.raises(ValueError, match="this outer optimizer cannot be used"):
        Outer(**given)


def test_more_fragments_than_arrays_are_refused():
    with pytest.raises(ValueError, match="use --fragments 4 or fewer"):
        make_fragments({"up": jnp.ones((3, 8)), "table": jnp.ones(4)}, frozenset({"up"}), 5)


def decoder_fragments(num_layers, number):
    """The parameters of a decoder by path, the paths of its layers, and the fragments."""
    model = from_nnx(DecoderConfig(vocab=256, seq=64, embed=64, num_layers=num_layers, num_heads=4))
    params = group_by_path(jax.eval_shape(model.init, jax.random.key(0))[0])
    stacked = frozenset(path for path in params if path.startswith("blocks/"))
    return params, stacked, make_fragments(params, stacked, number)


@pytest.mark.parametrize(("num_layers", "number"), [(3, 2), (2, 5), (12, 6)])
def test_fragments_have_each_parameter_once_and_are_equally_large(num_layers, number):
    params, stacked, fragments = decoder_fragments(num_layers, number)
    for path, x in params.items():
        rows = [each.rows[path] for each in fragments if path in each.rows]
        layers = sorted(layer for dealt in rows for layer in dealt or ())
        assert layers == list(range(x.shape[0])) if path in stacked else rows == [None]
    largest = max(sum(x.size for x in each.take(params).values()) for each in fragments)
    assert largest < 1.1 / number * sum(x.size for x in params.values())


@pytest.mark.parametrize("num_layers", [1, 4])
def test_the_preset_sends_at_most_a_quarter_at_a_time(num_layers):
    number = PRESETS["streaming-diloco"].fragments
    params, _, fragments = decoder_fragments(num_layers, number)
    largest = max(sum(x.size for x in each.take(params).values()) for each in fragments)
    assert largest <= sum(x.size for x in params.values()) / 4


def test_waves_take_no_other_option_and_are_every_step_where_that_is_the_same():
    with pytest.raises(ValueError) as caught:
        Synchronisation(by="adasum", distance=-1, outer=Outer(momentum=0.5), every=4, fragments=2, overlap=1)
    text = str(caught.value)
    for part in (
        "distance is -1 waves; use 0 or more, or None",
        "use deltas (--combine-on deltas)",
        "by is 'adasum', and updates of waves (--clock-distance) are added whole",
        "outer is Outer(",
        "fragments is 2, and updates",
        "overlap is 1, and updates",
    ):
        assert part in text, text
    assert Synchronisation(on="deltas", distance=0).simplified == Synchronisation()
    for other in (
        Synchronisation(on="deltas", distance=1),
        Synchronisation(on="deltas", every=2, distance=0),
    ):
        assert other.simplified is other
