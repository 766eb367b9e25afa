"""A way to run a step, what it is predicted from, and what is predicted: memory, seconds. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shardtrain import axes
from shardtrain.plan.traffic import Weight
from shardtrain.sharding.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run a step.

    Args:
      layout: axis sizes and rules.
      accumulate: number of microbatches.
      remat: what the backward computes again; None: what the model says.
      schedule: of a pipeline.
      virtual_stages: parts of the model on each stage.
      own_copies: float32 arrays like the parameters that an island has because of how islands are joined.
    """

    layout: Layout
    accumulate: int = 1
    remat: str | None = None
    schedule: str = "1f1b"
    virtual_stages: int = 1
    own_copies: int = 0


@dataclass(frozen=True, kw_only=True)
class StateFigures:
    """What follows from the specs of a state alone.

    Args:
      parameters: bytes of a device's parameters as they are stored.
      optimizer: bytes of its optimizer state.
      gradients: bytes of its sums of gradients over microbatches, float32.
      updated: bytes of the parameters that it updates.
      updated_float32: the same in float32.
      gathered: bytes of weights that fsdp shards and a device has gathered: one block, and all others; 0
        where the costs of the program have them, as for GPUs.
      weights: the parameters, for the theory of their traffic.
      num_blocks: number of blocks.
      item_bytes: of an element in computations.
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
      activations: what lies between, at the worst moment: kept and temporary arrays, gathered weights.
      pipeline: activations and cotangents of the microbatches in flight.
      batch: this device's rows.
      local: what an island changed since it was joined with others, and the outer optimizer's state.
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
      collectives: mesh axes -> seconds of their collectives; "pipeline" has what stages send.
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
    """What a step needs on each device.

    Args:
      memory: bytes.
      seconds: seconds.
      flops: of a device in a step, recomputation included.
    """

    memory: Memory
    seconds: Seconds
    flops: float


class Sent(NamedTuple):
    """Collectives of one kind over the same axes.

    Args:
      kind: as in `plan.hlo.collectives`.
      axes: mesh axes that they run over.
      num_bytes: of the arrays of all of them together, on one device.
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
      seconds: of all its trips, without `stacking_seconds`.
      carried_bytes: what one trip hands to the next.
      stacking_seconds: to copy what its trips write to stacked arrays and read from them.
    """

    over: str
    seconds: float
    carried_bytes: float
    stacking_seconds: float = 0.0


class Segment(NamedTuple):
    """A part of a program: a loop over the blocks of a model, or what is before, between or behind them.

    Args:
      flops: of matrix products and convolutions.
      seconds: of its kernels, with what a loop stacks.
      sent: its collectives of activations.
    """

    flops: float
    seconds: float
    sent: tuple[Sent, ...]


class Cost(NamedTuple):
    """What one run of a program costs a device.

    Args:
      flops: of matrix products and convolutions.
      seconds: by the durations that it was found with.
      peak_bytes: the most memory for results and temporary arrays at any time, without inputs.
      sent: collectives of activations.
      loops: those over a named dim, in order.
      segments: of which the program consists; the loops over blocks are every second one.
    """

    flops: float
    seconds: float
    peak_bytes: float
    sent: tuple[Sent, ...]
    loops: tuple[Loop, ...]
    segments: tuple[Segment, ...] = ()


class Step(NamedTuple):
    """What a choice is predicted from.

    Args:
      cost: of one microbatch of one chunk.
      layout: completed for the model.
      state: what follows from its specs.
      sizes: axis -> size.
      choice: the choice.
      batch_bytes: of this island's rows.
      forward: of a pipeline, the cost of the loss alone of one microbatch of one chunk.
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
        """Stages of its pipeline; 1: there is none."""
        return self.sizes[axes.PIPELINE]

    @property
    def num_parts(self) -> int:
        """Parts of the model on all stages."""
        return self.num_stages * self.choice.virtual_stages

    @property
    def stream_bytes(self) -> float:
        """Bytes that one block hands to the next, of one microbatch on one device."""
        return next((loop.carried_bytes for loop in self.cost.loops if loop.over == axes.LAYERS), 0.0)
