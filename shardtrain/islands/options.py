"""Options of the transfers between islands. Values only: no jax, no MPI."""

import math
from dataclasses import dataclass
from typing import Literal

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import problems_error
from shardtrain.islands.buckets import CAP_BYTES, FIRST_BYTES

REDUCE = ("all_reduce", "root", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class Across:
    """Options of what is transferred between islands, and how.

    Args:
      axis: "data": each island is a replica, and has a share of every batch. "pipeline": each island holds
        stages of a pipeline; island i has stage i % partitions of replica i // partitions.
      partitions: islands that make up one pipeline; None: all of them.
      shares: replica -> its weight, in proportion to which rows are given out; None: by numbers of devices.
      reduce: how sums are made: in one all-reduce; at island 0 and from there ("root"); inside each
        host first, then across ("hierarchical").
      bucket_bytes: gradients cross in buckets of about this size; 0: each array for itself.
      first_bucket_bytes: of the first one, that something leaves early.
      memory: what MPI is given: "device" memory, "host" memory, or device where a probe shows that it works.

    Raises:
      ValueError: lists every value of a wrong kind or out of range.
    """

    axis: Literal["data", "pipeline"] = "data"
    partitions: int | None = None
    shares: tuple[float, ...] | None = None
    reduce: Literal["all_reduce", "root", "hierarchical"] = "all_reduce"
    bucket_bytes: int = CAP_BYTES
    first_bucket_bytes: int = FIRST_BYTES
    memory: Literal["auto", "device", "host"] = "auto"

    def __post_init__(self) -> None:
        problems = wrong_types(self)
        problems += [
            f"{name} is {value}; use 0 or more bytes"
            for name in ("bucket_bytes", "first_bucket_bytes")
            if (value := getattr(self, name)) < 0
        ]
        if self.partitions is not None and self.partitions < 1:
            problems.append(f"partitions is {self.partitions}; use 1 or more")
        if self.partitions is not None and self.axis != "pipeline":
            problems.append(f"partitions is {self.partitions}, but islands are joined along {self.axis}")
        if self.shares is not None and (
            any(not 0 <= share < math.inf for share in self.shares) or not sum(self.shares)
        ):
            problems.append(
                f"shares is {self.shares}; give each replica a number from 0, one of them above 0"
            )
        if problems:
            raise problems_error("islands cannot be joined like this", problems)
