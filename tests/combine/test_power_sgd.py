"""PowerSGD's factors start from those of the round before, and its first round loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from shardtrain.combine import make_combiner

SIZE, RANK, ROWS, COLUMNS = 3, 2, 12, 10
SPECTRUM = np.array([8.0, 6.0, 2.0, 1.5, 1.0, 0.5])
"""Two large singular values of the mean, then a tail that two factors cannot hold."""
NUM_ROUNDS = 8
COUNTS = np.array([1.0, 2.0, 1.0])


def matrices():
    """A constant matrix of each rank; the singular values of their weighted mean are `SPECTRUM`."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.normal(size=(n, len(SPECTRUM))))[0] for n in (ROWS, COLUMNS))
    mean = left * SPECTRUM @ right.T
    noise = random.normal(size=(SIZE, ROWS, COLUMNS))
    noise -= np.average(noise, axis=0, weights=COUNTS)
    return mean, mean + noise


def rounds(ranks, own, *, feedback, warm=True):
    """The values and residuals of each round of the combiner.

    Args:
      feedback: keep the residual from round to round.
      warm: keep the right factors from round to round.
    """
    combiner = make_combiner(f"power_sgd:{RANK}+mean")
    first = ranks.state(combiner, [jnp.zeros((ROWS, COLUMNS))], SIZE)
    combine = ranks.run(
        "vmap", lambda group, tree, count, state: combiner.combine(tree, count, state, group)[:2], SIZE
    )
    state, values, residuals = first, [], []
    for _ in range(NUM_ROUNDS):
        (value,), state = combine([jnp.asarray(own, jnp.float32)], jnp.asarray(COUNTS, jnp.float32), state)
        values.append(np.asarray(value[0], np.float64))
        residuals.append(np.asarray(state.residual[0], np.float64))
        state = state if feedback else state._replace(residual=first.residual)
        state = state if warm else state._replace(codec=first.codec)
    return values, residuals


def power_iterations(mean, right):
    """The reference: each round one power iteration of the mean, from the right factors of the last."""
    for _ in range(NUM_ROUNDS):
        left = np.linalg.qr(mean @ right)[0]
        right = mean.T @ left
        yield left @ right.T


def test_a_warm_start_converges_to_the_best_factors_and_a_cold_one_does_not(ranks):
    mean, own = matrices()
    (first,) = make_combiner(f"power_sgd:{RANK}+mean").init([jnp.zeros((ROWS, COLUMNS))]).codec
    warm, _ = rounds(ranks, own, feedback=False)
    for number, (value, expected) in enumerate(
        zip(warm, power_iterations(mean, np.float64(first)), strict=True)
    ):
        np.testing.assert_allclose(value, expected, atol=2e-5, err_msg=f"round {number}")
    cold, _ = rounds(ranks, own, feedback=False, warm=False)
    # no two factors are nearer than the first two singular vectors
    best = np.sqrt((SPECTRUM[RANK:] ** 2).sum())
    errors = [np.linalg.norm(value - mean) for value in warm]
    assert errors[0] > 1.1 * best
    assert errors[-1] < 1.001 * best
    assert [np.linalg.norm(value - mean) for value in cold] == [errors[0]] * NUM_ROUNDS


def test_what_no_round_has_sent_is_in_the_residuals_from_the_first_on(ranks):
    mean, own = matrices()
    values, residuals = rounds(ranks, own, feedback=True)
    for number, residual in enumerate(residuals, 1):
        owed = np.average(residual, axis=0, weights=COUNTS)
        np.testing.assert_allclose(sum(values[:number]) + owed, number * mean, atol=1e-4)


def test_the_first_right_factors_are_orthonormal_random_and_the_same_everywhere():
    leaves = [jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)] * 2
    (one, two), again = (make_combiner(f"power_sgd:{RANK}+mean").init(leaves).codec for _ in range(2))
    np.testing.assert_allclose(one.T @ one, np.eye(RANK), atol=1e-6)
    assert not np.allclose(one, two)
    np.testing.assert_array_equal(one, again[0])
