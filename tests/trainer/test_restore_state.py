"""What islands changed since their last merge is taken up by all of them, or by none."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from shardtrain.train_step.state import Local, State
from shardtrain.trainer.restore_state import restart_round


@pytest.mark.parametrize(
    ("others", "own", "dropped", "noted"),
    [
        (True, True, False, False),
        (False, True, True, True),
        (True, False, True, True),
        (False, False, True, False),
    ],
)
def test_islands_begin_a_round_anew_unless_each_has_read_its_own(others, own, dropped, noted):
    local = Local(
        drift={"w": jnp.ones(2)},
        count=jnp.ones(1),
        sums={"count": jnp.float32(3)},
        sent={"w": jnp.ones(2)},
        sent_count=jnp.ones(1),
        model_state={"mean": jnp.zeros(2)},
    )
    state = State(jnp.int32(4), jnp.uint32(0), {}, {"mean": jnp.full(2, 7.0)}, (), local=local)
    notes = []
    coordination = SimpleNamespace(transfer=object(), all_gather=lambda name, value: [value, others])
    checkpoints = SimpleNamespace(coordination=coordination, note=notes.append)
    arrays = {"params/w": jnp.ones(2), **({"local/drift/w": jnp.ones(2)} if own else {})}
    found = restart_round(checkpoints, state, arrays).local  # pyright: ignore[reportArgumentType]
    assert bool(notes) == noted
    if not dropped:
        assert found is local
        return
    # nothing is changed or under way, and the model's state is the common one that was restored
    assert not any(x.any() for x in (found.drift["w"], found.count, found.sums["count"], found.sent["w"]))
    assert found.sent_count == -1
    np.testing.assert_array_equal(found.model_state["mean"], 7)
