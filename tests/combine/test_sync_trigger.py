"""Replicas with local steps synchronise where a trigger says so; each registered one keeps its contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_local_sgd import MESHES, NESTEROV, STEPS, check_steps

from shardtrain.combine.sync_trigger import SYNC_TRIGGERS, make_sync_trigger
from shardtrain.combine.synchronisation import Synchronisation


@pytest.mark.parametrize("name", SYNC_TRIGGERS)
def test_a_rule_finds_a_finite_number_also_without_changes_and_parameters(name):
    rule = make_sync_trigger(f"{name}:0.5")
    assert rule is not None
    for deltas, params in ((0.0, 0.0), (0.0, 1.0), (2.0, 0.0)):
        found = jax.jit(rule.measure)({"a": jnp.full(3, deltas)}, {"a": jnp.full(3, params)})
        assert found.shape == ()
        assert jnp.isfinite(found)
        assert jax.jit(rule.is_due)(found[None]).dtype == bool
    assert jax.jit(rule.is_due)(jnp.array([0.0, jnp.nan]))


@pytest.mark.parametrize("overlap", [0, 1])
def test_replicas_synchronise_when_one_has_drifted_far_enough(overlap):
    synchronisation = Synchronisation(
        on="deltas", every=1, overlap=overlap, when="drift:0.03", outer=NESTEROV
    )
    synced = []

    def synchronises(deltas, common):
        whole = np.sqrt(sum((x**2).sum() for x in common.values()))
        far = max(np.sqrt(sum((x[r] ** 2).sum() for x in deltas.values())) for r in range(4))
        synced.append(far > 0.03 * whole)
        return synced[-1]

    check_steps(synchronisation, MESHES["data"], last_step=STEPS, synchronises=synchronises)
    # at some steps, not at all
    assert 0 < sum(synced) < len(synced)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drift", "write a number after a colon, such as 'drift:0.01'"),
        ("drift:far", "write a number after a colon"),
        ("drift:-1", "drift has the number -1.0; use a fraction of the norm, 0 or more"),
        ("drift:nan", "use a fraction of the norm"),
        ("moved:0.1", "write 'drift:0.1'"),
        ("never", "known: always, drift"),
    ],
)
def test_rules_that_are_not_there_or_cannot_use_their_number_are_refused(text, expected):
    with pytest.raises(ValueError) as error:
        make_sync_trigger(text)
    assert expected in str(error.value)


def test_always_asks_nothing():
    assert make_sync_trigger("always") is None
