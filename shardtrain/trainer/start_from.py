"""What a run without a checkpoint of its own starts from. Next: `resume.py`, which reads it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error


@dataclass(frozen=True, kw_only=True)
class StartFrom:
    """The checkpoint with the first parameters of a run that has no checkpoint of its own.

    Args:
      checkpoint: checkpoint with the initial parameters and model state: a run's folder, its folder of
        checkpoints, the folder of a step, or a folder of Hugging Face; on the command line that sets the
        model and the tokenizer too. None: initialise them at random from the seed.
      adapter: low-rank adapters to start from, beside the parameters of a folder of Hugging Face: a folder of
        the PEFT library; on the command line it sets the option lora of the model too.
      upcycle: a decoder with experts (model.experts) starts from a dense checkpoint: each expert begins as a
        copy of its feed-forward, and routers at random.
      step: the step of that checkpoint to load; None: the newest; "best": the best by the metric that the run
        kept it for (checkpoints.best).

    Short form: the folder.

    Raises:
      ValueError: lists every value of a wrong type.
    """

    checkpoint: Path | None = None
    step: int | Literal["best"] | None = None
    adapter: Path | None = None
    upcycle: bool = False

    @staticmethod
    def short(value: Any) -> dict[str, Any] | None:
        """Return the fields that a bare value sets; None if it is not a short form."""
        return {"checkpoint": value} if isinstance(value, str | Path) else None

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        if self.step is not None and self.checkpoint is None:
            problems.append(f"step is {self.step} of no checkpoint; give the checkpoint too, a run's folder")
        if self.adapter is not None and self.checkpoint is None:
            problems.append(f"adapter is {self.adapter} of no model; give its folder as checkpoint too")
        if self.upcycle and self.checkpoint is None:
            problems.append("upcycle is of no model; give the dense one's folder as checkpoint too")
        if isinstance(self.step, int) and self.step < 0:
            problems.append(f"step is {self.step}; use 0 or more, or None for the newest")
        if problems:
            raise problems_error("a run cannot start from this", problems)
