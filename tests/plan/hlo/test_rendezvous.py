"""Programs that can deadlock are found; that others are not, every mesh of `mesh_gradients.py` shows."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from unordered_collectives import find_unordered

from shardtrain.plan.hlo.rendezvous import permutes_in_branches

RING = [(0, 1), (1, 0)]


def text(body):
    """The compiled program of a function of each device's share (8, 8), on 2 stages x 2 devices."""
    mesh = jax.make_mesh((2, 2), ("stage", "tensor"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("stage", "tensor")
    run = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(run).lower(jnp.ones((16, 16))).compile().as_text() or ""


def on_first(yes, x):
    return lax.cond(lax.axis_index("stage") == 0, yes, lambda x: x, x)


def handed_on(x):
    return lax.ppermute(x, "stage", RING)


def summed(x):
    return lax.psum(jnp.sin(x), "tensor")


def in_rounds(body):
    return lambda x: lax.fori_loop(0, 3, lambda _, x: body(x), x)


class TestPermutes:
    @pytest.mark.parametrize(
        "body",
        [
            lambda x: on_first(handed_on, x),
            lambda x: on_first(in_rounds(handed_on), x),
            in_rounds(lambda x: on_first(handed_on, x)),
        ],
        ids=["branch", "loop in a branch", "branch in a loop"],
    )
    def test_in_a_branch_they_are_found(self, body):
        found = permutes_in_branches(text(body))
        assert len(found) == 1
        assert "ppermute" in found[0]


class TestOrder:
    def test_a_branch_before_a_permute_is_found(self):
        def body(x):
            here = on_first(summed, x)
            # XLA puts what ends last at the end
            return jnp.tanh(here), handed_on(jnp.tanh(jnp.cos(x) @ jnp.sin(x)))

        [(first, second)] = find_unordered(text(body))
        assert first.startswith("cond")
        assert "permute" in second

    def test_two_branches_are_found_in_a_loop_too(self):
        body = in_rounds(lambda x: on_first(summed, x) + on_first(lambda x: summed(2 * x), jnp.cos(x)))
        assert len(find_unordered(text(body))) == 1


def test_text_that_is_not_hlo_is_refused():
    for check in (permutes_in_branches, find_unordered):
        with pytest.raises(ValueError, match="no entry computation"):
            check("nothing")
