"""Groups: a group of one, and what a whole leaf is of the values of its shards."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardtrain.combine import MeshGroup, make_combiner


def test_a_group_of_one_needs_no_axis():
    assert MeshGroup("data", 1).index == 0


def test_partial_values_of_shards_become_those_of_leaves():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "fsdp", "tensor"))
    group = MeshGroup("data", 2, [("fsdp", "tensor"), ("tensor",), ()], {"fsdp": 2, "tensor": 2})
    stack = MeshGroup("stack", group.size, outer=group)

    def shard(x):
        device = jax.lax.axis_index("fsdp") * 2.0 + jax.lax.axis_index("tensor")
        partial = jnp.stack([1 + device, 10 * (1 + jax.lax.axis_index("tensor")), 100.0]) * x[0]
        return group.whole(partial)[None], group.whole(partial, "max")[None], stack.whole(partial)[None]

    run = jax.shard_map(
        shard, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data"), check_vma=False
    )
    sums, greatest, of_stack = jax.jit(run)(jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(sums, [[10, 30, 100], [20, 60, 200]])
    np.testing.assert_array_equal(greatest, [[4, 20, 100], [8, 40, 200]])
    np.testing.assert_array_equal(of_stack, sums)


def test_int8_scales_shards_by_the_whole_leaf():
    combiner = make_combiner("int8+adasum")
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(2, 8, 6)) * np.array([1] * 4 + [30] * 4)[:, None], jnp.float32)

    def combined(axes, group, num_shards):
        def combine(x):
            return combiner.combine([x[0]], 1.0, combiner.init([x[0]]), group).value[0]

        mesh = Mesh(np.array(jax.devices()[: 2 * num_shards]).reshape(2, num_shards), ("data", "fsdp"))
        spec, out = PartitionSpec("data", *axes), PartitionSpec(*axes)
        return jax.jit(jax.shard_map(combine, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False))(x)

    sharded = combined(("fsdp",), MeshGroup("data", 2, [("fsdp",)], {"fsdp": 2}), 2)
    np.testing.assert_allclose(sharded, combined((), MeshGroup("data", 2), 1), rtol=1e-5, atol=1e-4)
