"""What a run traces a model for, beside the rules of its constraints, and the operations that it gives to it.

`activation_rules.py` sets it. Next: `models/ops/`.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
from flax import nnx

from shardtrain.models.ops import Ops, WithOps, find_ops, set_ops


@dataclass(frozen=True, kw_only=True)
class RunTrace:
    """The trace of a model by a run or a plan.

    Args:
      unnamed: what a layout does with dims without a rule.
      is_one_device: whether the program is for a mesh of one device.
      any_mesh: whether it is for meshes that are not chosen yet, though this one has one device.
      ops: name -> value, the fields of `Ops` that are not those of the devices.
      note: receives lines about what is traced. None disables it.
    """

    unnamed: str
    is_one_device: bool
    any_mesh: bool
    ops: Mapping[str, Any]
    note: Callable[[str], None] | None


TRACE: ContextVar[RunTrace | None] = ContextVar("trace", default=None)
"""The trace of which the current code is part; None outside of a run."""


def note(text: str) -> None:
    """Log a line about what is traced, if it is traced by a run."""
    trace = TRACE.get()
    if trace is not None and trace.note is not None:
        trace.note(text)


def find_model_ops() -> Ops:
    """Return the operations of models in the current trace; outside of a run, for all devices here."""
    trace = TRACE.get()
    return find_ops() if trace is None else find_ops(any_mesh=trace.any_mesh, note=trace.note, **trace.ops)


def give_ops(module: Any) -> Any:
    """Return a module of this project's models with the operations of the current trace; others unchanged."""
    if isinstance(module, nn.Module):
        has_ops = isinstance(getattr(module, "ops", None), Ops)
        return module.clone(ops=find_model_ops()) if has_ops else module
    # the search for devices would start jax for models that do not ask
    has_ops = any(isinstance(each, WithOps) for _, each in nnx.iter_modules(module))
    return set_ops(module, find_model_ops()) if has_ops else module
