"""The sample at the end of a run: what `Run.sample` makes of the trained model."""

from dataclasses import dataclass
from typing import Any

import jax

from shardtrain.checkpoints.origins import in_order
from shardtrain.errors.user_code import user_code
from shardtrain.functional.auxiliary import plain
from shardtrain.functional.model import Model
from shardtrain.functional.rng import new_key
from shardtrain.train_step.state import State
from shardtrain.trainer.config import Run
from shardtrain.trainer.evaluation import make_select_params
from shardtrain.trainer.setup import RunSetup


def sample_text(run: Run, setup: RunSetup, state: State) -> str:
    """Return the text that `run.sample` makes of the parameters that the run evaluates.

    Raises:
      UserCodeFailed: it raised.
    """
    assert run.sample is not None
    params = in_order(setup.placement, make_select_params(run, setup)(state))
    with user_code(lambda error: "the sample"):
        return run.sample(jax.tree_util.Partial(_Apply(setup.model), params, state.model_state))


@dataclass(frozen=True)
class _Apply:
    """A model without dropout as a function of its parameters: hashable, so that it compiles once."""

    model: Model

    def __call__(self, params: Any, model_state: Any, *inputs: Any) -> Any:
        return plain(self.model.apply(params, model_state, new_key(0), False, *inputs)[0])

    def __hash__(self) -> int:
        return id(self.model)
