"""Groups: sums over blocks, exchanges, and what a whole leaf is."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardtrain.combine import MeshGroup, make_combiner


def test_a_group_of_one_needs_no_axis():
    assert MeshGroup("data", 1).index == 0


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
