"""The data sheet of a device, and the fractions of its peak rates that programs reach. No jax.

Next: `devices.py`, the table.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What programs are taken to reach of a data sheet's rates; a cluster file may say other rates.

    The default is for devices of which nothing was measured.

    Args:
      products: the part of the peak of matrix products; in float32 the default's, for all devices.
      memory: the part of the bandwidth of the memory, of fused elementwise operations and sums.
      kernel_seconds: of a kernel that does next to nothing, in a program of many.
      softmax_features: flash attention takes as long as products of heads with so many features more, as it
        computes an exponential for each score beside its products.
    """

    products: float = 0.5
    memory: float = 0.8
    kernel_seconds: float = 5e-6
    softmax_features: float = 128.0


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device by its data sheet; "GB" is read as 10**9 bytes, so memory is a lower bound.

    Args:
      kind: the `device_kind` of jax.
      source: what its figures are from.
      matrix_flops_per_second: peak of dense matrix products in bfloat16, without sparsity; None: it has none.
      memory_bytes: device memory.
      memory_bytes_per_second: peak bandwidth of that memory.
      float32_flops_per_second: peak in float32 outside matrix units; None: not in this table.
      float16_flops_per_second: peak of dense matrix products in float16, where there are none in bfloat16.
      compute_capability: of a GPU, by NVIDIA's table in the CUDA programming guide.
      reached: what programs reach of these rates.
    """

    kind: str
    source: str
    matrix_flops_per_second: float | None
    memory_bytes: int
    memory_bytes_per_second: float
    float32_flops_per_second: float | None = None
    float16_flops_per_second: float | None = None
    compute_capability: str | None = None
    reached: Reached = Reached()

    @property
    def platform(self) -> str:
        """The platform by jax: "tpu" or "gpu"."""
        return "tpu" if self.kind.startswith("TPU") else "gpu"
