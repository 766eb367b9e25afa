"""Compute the parameters that a run evaluates from the arrays of its checkpoint. No jax.

They equal the result of `optimizer_state.find_evaluated_params`. Next: `trainer/trained_model.py`.
"""

from collections.abc import Callable, Iterable

import numpy as np


def make_exported_params(
    how: str | None, paths: Iterable[str], read: Callable[..., np.ndarray]
) -> Callable[..., np.ndarray]:
    """Make a function that reads an exported parameter: (path, indices of its first dims) -> array.

    Args:
      how: `Run.evaluate_with` in the description of the run.
      paths: the paths of all arrays of the checkpoint.
      read: (path, indices of the first dims) -> array.

    Raises:
      ValueError: `how` is a function, which no checkpoint holds; or (when called) its arrays are missing.
    """
    if how is None:
        return lambda path, *numbers: read(f"params/{path}", *numbers)
    if how not in ("ema", "schedule_free"):
        raise ValueError(
            f"the run evaluates with {how}, a function that a checkpoint does not hold; load the trained"
            " parameters with shardtrain.load(run_dir, model, evaluated=False), or train a step with"
            ' evaluate_with None, "ema" or "schedule_free"'
        )
    # the optimizer keeps evaluated parameters under paths that end with the parameters' own
    kept = "ema" if how == "ema" else "z"
    listed = [path for path in paths if path.startswith("opt_state/")]
    keeps_some = any(f"/{kept}/" in path for path in listed)

    def beside(path: str) -> str | None:
        found = [p for p in listed if p.endswith(f"/{kept}/{path}")]
        if keeps_some and not any(p.endswith(f"/{path}") for p in listed):
            return None  # a frozen parameter has no optimizer state
        if len(found) != 1:
            raise ValueError(
                f"the checkpoint has {len(found)} arrays {kept}/{path} in its optimizer; needed is 1"
            )
        return found[0]

    def export_array(path: str, *numbers: tuple[int, ...]) -> np.ndarray:
        own, place = read(f"params/{path}", *numbers), beside(path)
        if place is None:
            return own
        other = read(place, *numbers)
        if how == "schedule_free":
            # as optax.contrib.schedule_free_eval_params
            b1 = read(place.removesuffix(f"z/{path}") + "b1")
            other = (own.astype(np.float32) - (1 - b1) * other) / b1
        return other.astype(own.dtype)

    return export_array
