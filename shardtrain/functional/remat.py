"""Make the backward pass of any model recompute activations, instead of keeping them.

Next: `nnx_model.py`; `models/transformer.py`, whose blocks have the option themselves.
"""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import jax
import numpy as np

from shardtrain.errors.field_types import fits, list_hints
from shardtrain.functional.model import Model, wrap_functions
from shardtrain.functional.nnx_model import convert_model
from shardtrain.functional.remat_counts import RematCounts
from shardtrain.functional.remat_policies import REMAT_POLICIES

OF_ANY_MODEL = ("none", "weights", "dots")
"""Values that apply to any model; the others need a model that recomputes its blocks."""


def apply_remat(model: Any, remat: str | RematCounts | None) -> Any:
    """Return a model whose backward pass recomputes activations by a policy.

    Args:
      model: see `convert_model`. A dataclass with a field `remat` gets the value; the forward pass of any
        other model is wrapped as a whole.
      remat: none, one of `REMAT_POLICIES`, or the number of blocks with each; None leaves the model as it is.

    Raises:
      ValueError: the model cannot be recomputed like that.
    """
    if remat is None:
        return model
    if is_dataclass(model) and not isinstance(model, Model | type) and hasattr(model, "remat"):
        own = getattr(model, "remat")  # noqa: B009
        if isinstance(remat, RematCounts) and not fits(remat, list_hints(type(model)).get("remat", Any)):
            raise ValueError(
                f"remat is '{remat}', and this model has one policy for all its blocks; use none or full, or"
                " give its field remat the type RematCounts (docs/models.md)"
            )
        if not isinstance(own, bool):
            return replace(model, remat=remat)  # type: ignore[type-var]
        if remat not in ("none", "full"):
            raise ValueError(f"remat is '{remat}', and that of this model is on or off; use none or full")
        return replace(model, remat=remat == "full")  # type: ignore[type-var]
    if remat not in OF_ANY_MODEL:
        raise ValueError(
            f"remat is {str(remat)!r}, and this model has no field remat to recompute its blocks by; use"
            f" {', '.join(OF_ANY_MODEL)}, or jax.checkpoint (nnx.remat, nn.remat) around its blocks"
        )
    pure = convert_model(model)
    if remat == "none":
        return pure
    policy = REMAT_POLICIES[str(remat)]
    return wrap_functions(pure, lambda function, _: _recompute(policy, function))


def _recompute(policy: Callable[..., bool], apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of a `Model` or `Chain`; evaluation has no backward pass."""

    def call(params: Any, model_state: Any, rng: jax.Array, train: bool, *rest: Any) -> Any:
        if not train:
            return apply(params, model_state, rng, train, *rest)
        # an input that is no array, such as a flag of the call, stays what it is
        leaves, structure = jax.tree.flatten((params, model_state, rng, rest))
        is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]

        def forward(arrays: list[Any]) -> Any:
            given = iter(arrays)
            all_leaves = [
                next(given) if known else leaf for leaf, known in zip(leaves, is_array, strict=True)
            ]
            params, model_state, rng, rest = jax.tree.unflatten(structure, all_leaves)
            return apply(params, model_state, rng, True, *rest)

        arrays = [leaf for leaf, known in zip(leaves, is_array, strict=True) if known]
        return jax.checkpoint(forward, policy=policy)(arrays)

    return call
