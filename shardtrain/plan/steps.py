"""What a prediction and a task graph of some choices are made from: costs, state, axis sizes.

Next: `search.py`, which predicts many; `simulator/step_graph.py`, the tasks of one.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardtrain import axes
from shardtrain.data.row_split import RowSplit
from shardtrain.plan.cost import Cost
from shardtrain.plan.exchange import Exchange
from shardtrain.plan.machine import Machine
from shardtrain.plan.predict import sharding_of
from shardtrain.plan.prediction import Choice
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
    exchanges = [subject.exchange(choice.layout, each) for choice, each in zip(choices, sizes, strict=True)]
    # what is traced alike is costed together
    alike: dict[tuple[str | None, Exchange], list[int]] = {}
    for i, key in enumerate(zip((choice.remat for choice in choices), exchanges, strict=True)):
        alike.setdefault(key, []).append(i)
    found: dict[int, Cost] = {}
    for (remat, exchange), numbers in alike.items():
        of_all = subject.costs(remat, [shardings[i] for i in numbers], machine.rates, exchange=exchange)
        found.update(zip(numbers, of_all, strict=True))
    # the forward tasks of a pipeline keep nothing for the backward, whatever that computes again
    forward: dict[int, Cost] = {}
    for exchange in dict.fromkeys(exchanges):
        staged = [i for i, of in enumerate(sizes) if of[axes.PIPELINE] > 1 and exchanges[i] == exchange]
        if staged:
            alone = subject.costs(
                None, [shardings[i] for i in staged], machine.rates, exchange=exchange, gradient=False
            )
            forward.update(zip(staged, alone, strict=True))
    return [
        Step(found[i], state, sizes[i], choice, rows[i] * subject.row_bytes, forward.get(i))
        for i, (choice, state) in enumerate(zip(choices, states, strict=True))
    ]
