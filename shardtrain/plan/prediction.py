"""Types of a prediction: the choice, the costs it is made from, memory and seconds. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.traffic import Weight
from shardtrain.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A choice of layout, microbatches, remat policy and pipeline schedule for a step.

    Args:
      layout: axis sizes and rules.
      accumulate: number of microbatches.
      remat: remat policy. None means the model's own.
      schedule: schedule of a pipeline.
      virtual_stages: parts of the model on each stage.
      own_copies: number of float32 copies of the parameters that an island keeps to synchronise with others.
    """

    layout: Layout
    accumulate: int = 1
    remat: str | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1
    own_copies: int = 0


@dataclass(frozen=True, kw_only=True)
class StateFigures:
    """Figures of a state, which follow from its specs.

    Args:
      parameters: bytes of a device's parameters as they are stored.
      optimizer: bytes of its optimizer state.
      gradients: bytes of its sums of gradients over microbatches, float32.
      updated: bytes of the parameters that it updates.
      updated_float32: the same in float32.
      gathered: bytes of the weights that a device has gathered over fsdp: one block, and everything outside
        the blocks; 0 if the costs of the program count them, as for GPUs.
      weights: the parameters, for their traffic.
      num_blocks: number of blocks.
      item_bytes: bytes of an element in computations.
    """

    parameters: float
    optimizer: float
    gradients: float
    updated: float
    updated_float32: float
    gathered: float
    weights: tuple[Weight, ...]
    num_blocks: int
    item_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one device while a step runs.

    Args:
      parameters: as they are stored.
      optimizer: the optimizer's state.
      gradients: sums over microbatches.
      activations: kept and temporary arrays and gathered weights, at their peak.
      pipeline: activations and cotangents of the microbatches in flight.
      batch: this device's rows.
      local: changes of an island since it was synchronised, and the outer optimizer's state.
    """

    parameters: float
    optimizer: float
    gradients: float
    activations: float
    pipeline: float
    batch: float
    local: float = 0.0

    @property
    def total(self) -> float:
        """Bytes of all components."""
        of_state = self.parameters + self.optimizer + self.local
        return of_state + self.gradients + self.activations + self.pipeline + self.batch


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one step on one device.

    Args:
      compute: kernels of loss and gradient.
      bubble: waiting for other stages of the pipeline.
      collectives: mesh axes -> seconds of their collectives; "pipeline" counts what stages send.
      update: the optimizer.
    """

    compute: float
    bubble: float
    collectives: Mapping[tuple[str, ...], float]
    update: float

    @property
    def total(self) -> float:
        """Seconds of all parts, one after the other."""
        return self.compute + self.bubble + sum(self.collectives.values()) + self.update


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted memory, seconds and flops of a step on each device.

    Args:
      memory: bytes by component.
      seconds: seconds by part.
      flops: flops of a device in a step, with recomputation.
    """

    memory: Memory
    seconds: Seconds
    flops: float


@dataclass(frozen=True, kw_only=True)
class OperatorChange:
    """What operators that are not sharded by the rules of their layout change in its prediction.

    Args:
      state_ratio: bytes of parameters, gradients and optimizer state, over those of the layout.
      activations: further bytes of activations; as all below, less than 0 for fewer.
      compute, update: further seconds.
      flops: further flops of a device.
      sent_seconds: mesh axes -> further seconds of collectives.
      sent_bytes: mesh axes -> further bytes that a device sends.
    """

    state_ratio: float
    activations: float
    compute: float
    update: float
    flops: float
    sent_seconds: Mapping[tuple[str, ...], float]
    sent_bytes: Mapping[tuple[str, ...], float]

    def predict(self, layout: Prediction) -> Prediction:
        """Return the prediction of a step from that of its layout."""
        memory, seconds = layout.memory, layout.seconds
        return Prediction(
            memory=replace(
                memory,
                parameters=self.state_ratio * memory.parameters,
                optimizer=self.state_ratio * memory.optimizer,
                gradients=self.state_ratio * memory.gradients,
                activations=memory.activations + self.activations,
            ),
            seconds=replace(
                seconds,
                compute=seconds.compute + self.compute,
                update=seconds.update + self.update,
                collectives=_add_by_axes(seconds.collectives, self.sent_seconds),
            ),
            flops=layout.flops + self.flops,
        )

    def predict_sent(self, layout: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
        """Return the bytes that a device sends over mesh axes from those of its layout."""
        return _add_by_axes(layout, self.sent_bytes)


def _add_by_axes(
    one: Mapping[tuple[str, ...], float], other: Mapping[tuple[str, ...], float]
) -> dict[tuple[str, ...], float]:
    sums = {over: one.get(over, 0.0) + other.get(over, 0.0) for over in dict.fromkeys((*one, *other))}
    # what is taken away may be counted a little larger than before
    return {over: value for over, value in sums.items() if value > 0}


class SentCollective(NamedTuple):
    """Collectives of one kind over the same axes.

    Args:
      kind: as in `plan.hlo.collectives`.
      axes: mesh axes that they run over.
      num_bytes: bytes of all their arrays on one device.
      times: number of collectives.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    times: float


class Loop(NamedTuple):
    """A loop over a named dim, such as the blocks of a model.

    Args:
      over: the dim.
      seconds: seconds of all its trips, without `stacking_seconds`.
      carried_bytes: bytes that a trip passes to the next.
      stacking_seconds: seconds of copying parts of stacked arrays.
    """

    over: str
    seconds: float
    carried_bytes: float
    stacking_seconds: float = 0.0


class Segment(NamedTuple):
    """A part of a program: a loop over the blocks of a model, or a part before, between or after such loops.

    Args:
      flops: flops of matrix products and convolutions.
      seconds: seconds of its kernels, with stacking.
      sent: its collectives of activations.
    """

    flops: float
    seconds: float
    sent: tuple[SentCollective, ...]


class Cost(NamedTuple):
    """Costs of one run of a program on a device.

    Args:
      flops: flops of matrix products and convolutions.
      seconds: seconds of its kernels.
      peak_bytes: peak memory of results and temporary arrays, without inputs.
      sent: collectives of activations.
      loops: loops over a named dim, in order.
      segments: segments of the program; every second one is a loop over blocks.
    """

    flops: float
    seconds: float
    peak_bytes: float
    sent: tuple[SentCollective, ...]
    loops: tuple[Loop, ...]
    segments: tuple[Segment, ...] = ()


class Step(NamedTuple):
    """Inputs of the prediction of a choice.

    Args:
      cost: costs of loss and gradient of one microbatch of one chunk.
      layout: the layout, completed for the model.
      state: figures of its state.
      sizes: axis -> size.
      choice: the choice.
      batch_bytes: bytes of this island's rows.
      forward: in a pipeline, the costs of only the loss of one microbatch of one chunk.
    """

    cost: Cost
    layout: Layout
    state: StateFigures
    sizes: Mapping[str, int]
    choice: Choice
    batch_bytes: float
    forward: Cost | None = None

    @property
    def num_stages(self) -> int:
        """Number of stages of its pipeline; 1 without a pipeline."""
        return self.sizes[axes.PIPELINE]

    @property
    def num_parts(self) -> int:
        """Number of parts of the model on all stages."""
        return self.num_stages * self.choice.virtual_stages

    @property
    def stream_bytes(self) -> float:
        """Bytes that a block passes to the next, for one microbatch on one device."""
        return next((loop.carried_bytes for loop in self.cost.loops if loop.over == axes.LAYERS), 0.0)
