"""What a prediction and a task graph of some choices are made from: costs, state, axis sizes.

Next: `search.py`, which predicts many; `simulator/step_graph.py`, the tasks of one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardtrain import axes
from shardtrain.data.row_split import RowSplit
from shardtrain.plan.cost import Cost
from shardtrain.plan.machine import Machine
from shardtrain.plan.predict import sharding_of
from shardtrain.plan.prediction import Choice
from shardtrain.plan.splits import Sharding
from shardtrain.plan.step_times import StepTimes, step_times
from shardtrain.plan.subject import StateOf, Subject
from shardtrain.sharding.axis_sizes import axis_sizes


class Step(NamedTuple):
    """What a choice is predicted from.

    Args:
      cost: of one microbatch of one chunk.
      state: of the layout.
      sizes: axis -> size.
      choice: the choice.
      batch_bytes: of this island's rows.
      forward: of a pipeline, the cost of the loss alone of one microbatch of one chunk.
    """

    cost: Cost
    state: StateOf
    sizes: Mapping[str, int]
    choice: Choice
    batch_bytes: float
    forward: Cost | None = None

    def times(self, machine: Machine) -> StepTimes:
        """Return the durations of the step's parts."""
        return step_times(
            self.cost,
            self.state.figures,
            self.state.layout,
            self.sizes,
            self.choice,
            machine,
            self.forward,
        )


def steps(subject: Subject, machine: Machine, num_devices: int, choices: Sequence[Choice]) -> list[Step]:
    """Return what several choices are predicted from.

    Args:
      subject: the model, its loss, optimizer and batch.
      machine: the devices.
      num_devices: how many.
      choices: the choices.

    Raises:
      ValueError: a layout does not fit the model.
    """
    sizes = [axis_sizes(choice.layout.mesh, num_devices) for choice in choices]
    states = [subject.state(choice, num_devices) for choice in choices]
    rows = [
        subject.rows_of(RowSplit.of(each, choice.layout.batch_axes, choice.accumulate))
        for choice, each in zip(choices, sizes, strict=True)
    ]
    shardings = [
        sharding_of(
            state.layout, each, choice.accumulate, choice.virtual_stages, num_rows / subject.batch_rows
        )
        for choice, each, state, num_rows in zip(choices, sizes, states, rows, strict=True)
    ]
    found: dict[tuple[str | None, Sharding], Cost] = {}
    for remat in dict.fromkeys(choice.remat for choice in choices):
        alike = [each for each, choice in zip(shardings, choices, strict=True) if choice.remat == remat]
        of_all = subject.costs(remat, alike, machine.rates)
        found |= {(remat, each): one for each, one in zip(alike, of_all, strict=True)}
    # the forward tasks of a pipeline keep nothing for the backward, whatever that computes again
    # and attention over context is found in the program of the loss
    staged = [
        each
        for each, of in zip(shardings, sizes, strict=True)
        if max(of[axes.PIPELINE], of[axes.CONTEXT]) > 1
    ]
    alone = subject.costs(None, staged, machine.rates, gradient=False) if staged else []
    forward = dict(zip(staged, alone, strict=True))
    return [
        Step(
            found[choice.remat, sharding],
            state,
            each,
            choice,
            num_rows * subject.row_bytes,
            forward.get(sharding),
        )
        for choice, sharding, state, each, num_rows in zip(
            choices, shardings, states, sizes, rows, strict=True
        )
    ]
