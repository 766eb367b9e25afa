"""The random draws of a run's model: the same in any layout, or refused. Next: `functional/row_draws.py`."""

import math
from collections.abc import Sequence
from dataclasses import replace

from jax.sharding import Mesh

from shardtrain.data import Batch
from shardtrain.errors.messages import problems_error
from shardtrain.functional.draw_record import FOREIGN
from shardtrain.functional.model import Model
from shardtrain.functional.row_draws import find_draws
from shardtrain.trainer.config import Run


def num_parts(run: Run, mesh: Mesh, num_islands: int) -> int:
    """Return the number of parts into which the rows of a batch are split, each with a loss of its own."""
    num_replicas = math.prod(mesh.shape[axis] for axis in run.strategy.layout.replica_axes)
    return num_replicas * num_islands * run.strategy.accumulate


def with_draws(run: Run, model: Model, shapes: Sequence[Batch], mesh: Mesh, num_islands: int) -> Model:
    """Return the model with its random draws, found in its losses of training and of held-out data.

    Args:
      run: the run.
      model: the whole model.
      shapes: batches as the loss receives them, arrays or shapes; one of each shape but for the rows.
      mesh: the mesh of this island.
      num_islands: number of islands.

    Raises:
      ValueError: rows are split, and draws depend on how; or a key is not that of the step.
    """
    traced = [find_draws(model, run.loss, batch, train) for batch in shapes for train in (True, False)]
    problems = list(dict.fromkeys(problem for found in traced for problem in found.problems))
    if problems and num_parts(run, mesh, num_islands) > 1:
        raise problems_error(
            "losses would not be those of one device, as random numbers would depend on how rows are split",
            problems,
        )
    # without a split they would still be the same in every step
    if foreign := [problem for problem in problems if problem.endswith(FOREIGN)]:
        raise problems_error("the rows of a batch would get the same random numbers in every step", foreign)
    # what is not known of one whole batch need not be known
    draws = None if problems else tuple(dict.fromkeys(draw for found in traced for draw in found.draws))
    return replace(model, draws=draws)
