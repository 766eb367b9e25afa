"""Define the options of transfers between islands. Values only: no jax, no MPI."""

import math
from dataclasses import dataclass
from typing import Literal

from shardtrain.errors.field_types import wrong_types
from shardtrain.errors.messages import refuse
from shardtrain.islands.buckets import CAP_BYTES

REDUCE = ("all_reduce", "root", "hierarchical")


@dataclass(frozen=True, kw_only=True)
class Across:
    """Options of transfers between islands.

    Args:
      axis: "data" makes each island a replica, with its share of every batch. "pipeline" makes each island a
        stage of a pipeline; with P stages, island i has stage i % P of replica i // P.
      partitions: number of islands that form one pipeline; None means all islands.
      shares: weights of the replicas; each gets rows of a batch in proportion. "auto" starts with the numbers
        of devices, and then follows the measured speeds. None means "auto" if the devices of islands differ
        and a split of the batch changes only rounding, and else the numbers of devices.
      share_limits: largest number of examples of a batch (or of tokens, if the batch counts them) of each
        island; the others get the rest. "auto" means as many as fit the memory of the island.
      reduce: algorithm of sums over islands: one all-reduce; a sum on island 0, which is then broadcast
        ("root"); or sums within each host, and then between hosts ("hierarchical").
      reduce_dtype: dtype of the gradients that islands exchange: "float32", or "bfloat16", half of the bytes.
        They are added in float32, and the sum is rounded. Rounding errors are dropped; --combine
        bfloat16+mean adds them to the next step's gradients (error feedback), which takes memory.
      bucket_bytes: approximate size of the buckets in which gradients are sent; 0 means one bucket per array.
      first_bucket_bytes: size of the first bucket, which is smaller so that sending starts early. None means
        1 MB, or `bucket_bytes` if a mean of gradients is sent from CPU devices of one process, which needs
        no copies.
      gradient_parts: largest number of programs that compute a mean of gradients, the last layers first: the
        result of one is sent while the next ones compute, which pays over slow links. None means one, or
        the fastest number that `shardtrain plan` found.
      memory: memory that MPI reads and writes: "device", "host", or "auto", which means device memory if a
        test of it succeeds.

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
        """Largest number of programs that compute a mean of gradients."""
        return 1 if self.gradient_parts is None else self.gradient_parts
