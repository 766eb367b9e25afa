"""Options of the transfers between islands. Values only: no jax, no MPI."""

import math
from dataclasses import dataclass
from typing import Literal

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.islands.buckets import CAP_BYTES

REDUCE = ("all_reduce", "root", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class Across:
    """Options of what is transferred between islands, and how.

    Args:
      axis: "data": each island is a replica, with its share of every batch. "pipeline": each island is
        a stage of a pipeline; island i has stage i % partitions of replica i // partitions.
      partitions: number of islands that form one pipeline; None: all of them.
      shares: weights of the replicas, in proportion to which they get rows of a batch; "auto": by their
        devices at first, then by the speed that is measured; None: "auto" where the devices of islands
        differ and a split of the batch changes nothing but rounding, see `trainer.island_run`; else by them.
      share_limits: the most examples of a batch that each island gets (tokens, where the batch counts them),
        whatever the shares say; the others get the rest. "auto": as many as fit the memory of the island.
      reduce: how arrays are summed over islands: by one all-reduce; on island 0, which broadcasts the sum
        ("root"); or within each host first, then between hosts ("hierarchical").
      reduce_dtype: dtype of the gradients that islands exchange: "float32", or "bfloat16", half of the bytes.
        They are added in float32, and the sum is rounded again. A codec (bfloat16+mean) adds what it rounds
        off to the next step; this does not, and so keeps no copy of it.
      bucket_bytes: gradients are sent in buckets of about this size; 0: one bucket per array.
      first_bucket_bytes: size of the first bucket, smaller so that sending starts early; None: 1 MB, or
        `bucket_bytes` where a mean of gradients is sent from the memory of one process's CPU devices, which
        has nothing to copy first.
      gradient_parts: number of programs in which a mean of gradients is computed, at most, the last layers
        first: what one has computed is sent while the next ones compute. It pays over slow links. None: one,
        or the number that `shardtrain plan` finds to be the fastest.
      memory: the memory that MPI reads and writes: "device", "host", or "auto": device memory if a probe
        shows that this works.

    Raises:
      ValueError: lists every value of a wrong type or out of range.
    """

    axis: Literal["data", "pipeline"] = "data"
    partitions: int | None = None
    shares: tuple[float, ...] | Literal["auto"] | None = None
    share_limits: tuple[int, ...] | Literal["auto"] | None = None
    reduce: Literal["all_reduce", "root", "hierarchical"] = "all_reduce"
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    bucket_bytes: int = CAP_BYTES
    first_bucket_bytes: int | None = None
    gradient_parts: int | None = None
    memory: Literal["auto", "device", "host"] = "auto"

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        problems += [
            f"{name} is {value}; use 0 or more bytes"
            for name in ("bucket_bytes", "first_bucket_bytes")
            if (value := getattr(self, name)) is not None and value < 0
        ]
        if self.partitions is not None and self.partitions < 1:
            problems.append(f"partitions is {self.partitions}; use 1 or more")
        if self.partitions is not None and self.axis != "pipeline":
            problems.append(f"partitions is {self.partitions}, but islands are joined along {self.axis}")
        if self.num_gradient_programs < 1:
            problems.append(f"gradient_parts is {self.gradient_parts}; use 1 or more")
        if self.num_gradient_programs > 1 and self.axis == "pipeline":
            problems.append(
                f"gradient_parts is {self.gradient_parts}, and stages of a pipeline send gradients after all"
                " of their tasks; use 1"
            )
        if self.shares == "auto" and self.axis == "pipeline":
            problems.append(
                "shares is 'auto', and the stages of a pipeline are made for their rows; give weights"
            )
        if self.reduce_dtype != "float32" and self.axis == "pipeline":
            problems.append(
                f"reduce_dtype is {self.reduce_dtype!r}, and stages send float32; use a codec (bfloat16+mean)"
            )
        if isinstance(self.shares, tuple) and (
            any(not 0 <= share < math.inf for share in self.shares) or not sum(self.shares)
        ):
            problems.append(
                f"shares is {self.shares}; give each replica a number from 0, one of them above 0"
            )
        if self.share_limits is not None and self.axis == "pipeline":
            problems.append(
                "share_limits is given, and islands are stages of a pipeline; use --stage-memory, by which"
                " the model is cut"
            )
        if isinstance(self.share_limits, tuple) and any(most < 1 for most in self.share_limits):
            problems.append(f"share_limits is {self.share_limits}; give each island a number from 1")
        refuse("islands cannot be joined like this", problems)

    @property
    def num_gradient_programs(self) -> int:
        """Number of programs in which a mean of gradients is computed, at most."""
        return 1 if self.gradient_parts is None else self.gradient_parts
