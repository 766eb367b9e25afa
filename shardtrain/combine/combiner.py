"""The interface of combiners, pairs of pure functions over a `Group`; `chain` puts codecs before them.

Users may write their own `Combiner`. Next: `mean.py`, the shortest; `adasum.py`; `codec.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.combine.group import Group
from shardtrain.errors.messages import problems_error, refuse

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
"""The dtypes that combiners take; all arithmetic is float32."""


class Combined(NamedTuple):
    """The result of a combiner on one rank.

    Attributes:
      value: like the tree that was combined, the same bits on all ranks (see `Combiner.is_common`).
      state: this rank's next state.
      metrics: name -> float32, the same on all ranks: scalars, or (L,) with one entry per leaf.
      residual: float32, like the tree: the rounding error that this rank made. A codec adds it to this rank's
        tree in the next round. None if nothing was rounded.
    """

    value: Any
    state: Any = ()
    metrics: dict[str, jax.Array] = {}
    residual: Any = None


@dataclass(frozen=True)
class Combiner:
    """A pair of pure functions that combine the trees of all ranks, called inside jit.

    tests/combine/test_contract.py checks this contract for every registered combiner.

    Args:
      init: tree of arrays or shapes -> this rank's state, () if the combiner has no state.
      combine: (tree, count, state, group) -> `Combined`. The tree is this rank's mean over its own
        `count` (float32 scalar) examples: leaves of any shape, float32, bfloat16 or float16. A rank with
        count 0 contributes nothing, even if its tree holds NaN, and its state does not change, except for
        parts that are equal on all ranks; without examples on any rank the value is zeros. A NaN or an
        infinity of a rank with examples makes the value not finite on all ranks, and changes no state.
      linear: whether `combine` is a weighted sum without state, so that a codec may combine factors of
        leaves.
      across_leaves: whether a leaf's result depends on other leaves, so that all must be in one call.
      is_common: whether the value has the same bits on all ranks; otherwise each rank continues from its own,
        as in gossip.
      is_one_vector: whether all leaves count as one vector, whatever their names, so that the stages of a
        pipeline in a mesh can combine them together, by `Group.whole` with `stages`.

    >>> def largest(tree, count, state, group):
    ...     ranks = jax.tree.map(lambda x: group.all_gather(jnp.where(count > 0, x, 0)), tree)
    ...     return Combined(jax.tree.map(lambda x: x.max(0), ranks))
    >>> Combiner(lambda tree: (), largest).linear
    False
    """

    init: Callable[[Any], Any]
    combine: Callable[[Any, Any, Any, Group], Combined]
    linear: bool = False
    across_leaves: bool = False
    is_one_vector: bool = False
    is_common: bool = True


Codec = Callable[[Combiner], Combiner]
"""Wraps a combiner into one that compresses each rank's tree before it is sent."""


def chain(*links: Codec | Combiner) -> Combiner:
    """Put codecs before a combiner: `chain(int8(), adasum())`.

    Args:
      links: any number of codecs, then one combiner.

    Raises:
      ValueError: lists every link that is in the wrong place.
    """
    problems = [
        f"link {i} of {len(links)} is a combiner; only the last may be: put the codecs first, and choose one"
        for i, link in enumerate(links[:-1], 1)
        if isinstance(link, Combiner)
    ]
    problems += [
        f"link {i} of {len(links)} is {link!r}; call a factory, such as int8()"
        for i, link in enumerate(links, 1)
        if not callable(link) and not isinstance(link, Combiner)
    ]
    if not links or not isinstance(links[-1], Combiner):
        problems.append("the last link is not a combiner; end with one, such as mean()")
    refuse("these links make no chain", problems)
    *codecs, combiner = links
    for codec in reversed(codecs):
        combiner = codec(combiner)  # type: ignore[operator]
    return combiner  # type: ignore[return-value]


def flatten(tree: Any) -> tuple[list[jax.Array], Any]:
    """Return the leaves of a tree, and its structure.

    Raises:
      ValueError: lists every leaf of a dtype that combiners do not take.
    """
    with_paths, structure = jax.tree.flatten_with_path(tree)
    problems = [
        f"leaf {jax.tree_util.keystr(path, simple=True, separator='/') or 'root'} is {leaf.dtype}; "
        "use .astype('float32')"
        for path, leaf in with_paths
        if leaf.dtype not in FLOATS
    ]
    if problems:
        allowed = ", ".join(jnp.dtype(dtype).name for dtype in FLOATS)
        raise problems_error(f"combiners take leaves of {allowed}", problems)
    return [leaf for _, leaf in with_paths], structure


def mask_without_examples(x: jax.Array, count: jax.Array) -> jax.Array:
    """Replace a leaf by zeros if this rank has no examples; a NaN count does not change it."""
    return jnp.where(count != 0, x, 0)
