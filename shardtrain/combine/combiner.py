"""What a combiner is: a pair of pure functions over a `Group`; codecs come before it by `chain`.

A user's own combiner is any `Combiner`. Next: `mean.py`, the shortest; `adasum.py`; `codec.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardtrain.combine.group import Group
from shardtrain.errors.messages import problems_error

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
"""The dtypes that combiners take; all arithmetic is float32."""


class Combined(NamedTuple):
    """The result of a combiner on one rank.

    Attributes:
      value: like the tree that was combined, the same bits on all ranks.
      state: this rank's next state.
      metrics: name -> float32, the same on all ranks: scalars, or (L,) with one entry per leaf.
      lost: for codecs: a float32 tree that this rank would have to add to its tree in the next round to
        make good what was rounded off the value; None where nothing was rounded.
    """

    value: Any
    state: Any = ()
    metrics: dict[str, jax.Array] = {}
    lost: Any = None


@dataclass(frozen=True)
class Combiner:
    """A pair of pure functions that combine the trees of all ranks, called inside jit.

    tests/combine/test_contract.py holds every registered combiner against what is said here.

    Args:
      init: tree of arrays or shapes -> this rank's state, () if the combiner keeps none.
      combine: (tree, count, state, group) -> `Combined`. The tree is this rank's mean over its own
        `count` (float32 scalar) examples: leaves of any shape, float32, bfloat16 or float16. With count 0
        the rank contributes nothing, whatever its tree holds, NaN too, and its state stays, but for what
        all ranks have in common; where no rank has examples the value is zeros. A NaN or an infinity of
        a rank with examples leaves a value that is not finite on all ranks, and no trace in any state.
      linear: `combine` is a weighted sum, and keeps no state: a codec may combine factors instead of leaves.
      across_leaves: a leaf's result depends on other leaves: all must come in one call.

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


Codec = Callable[[Combiner], Combiner]
"""Sends less: makes of a combiner one that works on what the codec leaves of each rank's tree."""


def chain(*links: Codec | Combiner) -> Combiner:
    """Codecs, then the combiner that they feed: `chain(int8(), adasum())`.

    Args:
      links: any number of codecs, then one combiner.

    Raises:
      ValueError: names every link that stands in the wrong place.
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
        problems.append("no combiner stands last; end with one, such as mean()")
    if problems:
        raise problems_error("these links make no chain", problems)
    *codecs, combiner = links
    for codec in reversed(codecs):
        combiner = codec(combiner)  # type: ignore[operator]
    return combiner  # type: ignore[return-value]


def flatten(tree: Any) -> tuple[list[jax.Array], Any]:
    """The leaves of a tree, and its structure.

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


def contribution(x: jax.Array, count: jax.Array) -> jax.Array:
    """A leaf as the others see it: zeros from a rank without examples. A count of NaN hides nothing."""
    return jnp.where(count != 0, x, 0)
