"""A combiner of one's own: the median of the replicas' gradients, which one bad replica cannot spoil.

shardtrain train examples/gpt_text.py --cpu-devices 4 --combine examples/own_combiner.py:median
shardtrain launch --islands 3 -- train examples/gpt_text.py --combine examples/own_combiner.py:median
"""

import jax
import jax.numpy as jnp

from shardtrain.combine import Combined, Combiner, Group


def _median(tree, count, state, group: Group) -> Combined:
    """Each number's median over the replicas that have examples (zeros where none has)."""
    has_examples = group.all_gather(jnp.asarray(count)) > 0

    def of(x: jax.Array) -> jax.Array:
        ranks = group.all_gather(x)
        mask = has_examples.reshape(-1, *[1] * x.ndim)
        middle = jnp.nanmedian(jnp.where(mask, ranks, jnp.nan), axis=0)
        middle = jnp.where(has_examples.any(), middle, 0)
        # a number that is not finite must not vanish: the step is skipped then
        finite = jnp.isfinite(jnp.where(mask, ranks, 0)).all()
        return jnp.where(finite, middle, jnp.nan)

    return Combined(jax.tree.map(of, tree))


median = Combiner(init=lambda tree: (), combine=_median)
