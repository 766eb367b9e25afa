"""The options of how replicas are combined: by which combiner, on gradients or on deltas.

Next: `replicas.py`, which runs a combiner on a mesh; `train_step/island_combiner.py`, between islands.
"""

from dataclasses import dataclass
from typing import Any, Literal

from shardtrain.combine import Combiner, make_combiner
from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error


@dataclass(frozen=True, kw_only=True)
class Combine:
    """How the replicas of a run are combined.

    Replicas are the islands if there are several (each the mean or sum over its own devices), else the
    indices of the mesh's data axis.

    Args:
      by: a combiner by name, such as "mean", "adasum", "int8+adasum" (see `combine.make_combiner`), or
        any `combine.Combiner`.
      on: what is combined: "gradients", or "deltas", the parameter changes that each replica's own optimizer
        computes (Horovod's Adasum). Each replica then has its own optimizer state.
      local_steps: number of local steps of a replica before its delta is combined; more than 1 needs deltas.
      inside: how an island reduces its own devices' gradients before they are sent to other islands: to
        their mean, or to their sum, the mean times the number of its replicas.

    Short form: a value of `by`.

    Raises:
      ValueError: lists every value of a wrong type, and combinations that are not possible.
    """

    by: str | Combiner = "mean"
    on: Literal["gradients", "deltas"] = "gradients"
    local_steps: int = 1
    inside: Literal["mean", "sum"] = "mean"

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """Return the fields that a short form sets; None if the value is not a short form."""
        return {"by": value} if isinstance(value, str | Combiner) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.local_steps < 1:
            problems.append(f"local_steps is {self.local_steps}; use 1 or more")
        if self.local_steps > 1 and self.on == "gradients":
            problems.append(
                f"local_steps is {self.local_steps}, but gradients are combined in every step; use deltas"
            )
        if self.inside == "sum" and self.on == "deltas":
            problems.append("inside is 'sum', but deltas are of an island's own mean gradient; use mean")
        if problems:
            raise problems_error("replicas cannot be combined like this", problems)
        if isinstance(self.by, str):
            make_combiner(self.by)

    @property
    def combiner(self) -> Combiner:
        """The combiner itself."""
        return make_combiner(self.by) if isinstance(self.by, str) else self.by

    @property
    def is_mean(self) -> bool:
        """Whether this is ordinary data parallelism: one gradient, the mean over all examples."""
        return self.by == "mean" and self.on == "gradients"

    @property
    def on_deltas(self) -> bool:
        """Whether each replica has an optimizer of its own."""
        return self.on == "deltas"
