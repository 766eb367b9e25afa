"""A way to run a step, and what is predicted for it: memory by component, seconds by part. Values only."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardtrain.plan.weights import Weight
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
