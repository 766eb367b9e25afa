"""PowerSGD's first factors; rounds are those of its reference in `test_contract.py`."""

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.combine import make_combiner

RANK, ROWS, COLUMNS = 2, 12, 10


def test_the_first_right_factors_are_orthonormal_random_and_the_same_everywhere():
    leaves = [jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)] * 2
    (one, two), again = (make_combiner(f"power_sgd:{RANK}+mean").init(leaves).codec for _ in range(2))
    np.testing.assert_allclose(one.T @ one, np.eye(RANK), atol=1e-6)
    assert not np.allclose(one, two)
    np.testing.assert_array_equal(one, again[0])
