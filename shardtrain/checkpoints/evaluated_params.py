"""Compute the parameters that a run evaluates from the arrays of its checkpoint. No jax.

As `optimizer_state.evaluated_params` has them while it runs. Next: `trainer/trained_model.py`.
"""

from collections.abc import Callable, Iterable

import numpy as np


def make_exported_params(
    how: str | None, paths: Iterable[str], read: Callable[..., np.ndarray]
) -> Callable[..., np.ndarray]:
    """path of a parameter -> the array to export: what the run evaluates.

    After the path may come numbers of its first dims, to read what is there alone.

    Args:
      how: `Run.evaluate_with` as the checkpoint describes it.
      paths: the paths of all arrays of the checkpoint.
      read: path -> array; or, with such numbers behind the path, what is there.

    Raises:
      ValueError: it is a function, which no checkpoint holds; or (when called) what it names is not there.
    """
    if how is None:
        return lambda path, *numbers: read(f"params/{path}", *numbers)
    if how not in ("ema", "schedule_free"):
        raise ValueError(
            f"the run evaluates with {how}, a function that a checkpoint does not hold; load what it trains"
            " with shardtrain.load(run_dir, model, evaluated=False), or train a step with evaluate_with None,"
            ' "ema" or "schedule_free"'
        )
    # the optimizer has what is evaluated beside each parameter, under a path that ends with the parameter's
    kept = "ema" if how == "ema" else "z"
    listed = [path for path in paths if path.startswith("opt_state/")]
    keeps_some = any(f"/{kept}/" in path for path in listed)

    def beside(path: str) -> str | None:
        found = [p for p in listed if p.endswith(f"/{kept}/{path}")]
        if keeps_some and not any(p.endswith(f"/{path}") for p in listed):
            return None  # a frozen parameter, of which the optimizer has nothing
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
