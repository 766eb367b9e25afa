"""The table of known devices with peak flops, memory and bandwidth, by their `device_kind` in jax. No jax."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReachedRates:
    """Fractions of a data sheet's rates that programs are assumed to reach; a cluster file may set rates.

    The defaults are for devices that were not measured.

    Args:
      products: fraction of the peak of matrix products; in float32, the default is used for all devices.
      memory: fraction of the memory bandwidth, for fused elementwise operations and sums.
      kernel_seconds: seconds of a tiny kernel in a program of many.
      softmax_features: features that are added to each head for the time of flash attention, as it computes
        an exponential for each score in addition to its products.
    """

    products: float = 0.5
    memory: float = 0.8
    kernel_seconds: float = 5e-6
    softmax_features: float = 128.0


@dataclass(frozen=True)
class Device:
    """A device by its data sheet; "GB" is read as 10**9 bytes, so memory is a lower bound.

    Args:
      kind: the `device_kind` of jax.
      source: source of the figures.
      memory_bytes: device memory.
      memory_bytes_per_second: peak bandwidth of that memory.
      matrix_flops_per_second: peak of dense matrix products in bfloat16, without sparsity. None means that
        the device has none.
      float32_flops_per_second: peak in float32 outside matrix units. None means that it is not in this table.
      float16_flops_per_second: peak of dense matrix products in float16, for devices without bfloat16.
      compute_capability: compute capability of a GPU, from the CUDA programming guide.
      reached: fractions of these rates that programs reach.
    """

    kind: str
    source: str
    memory_bytes: int
    memory_bytes_per_second: float
    matrix_flops_per_second: float | None
    float32_flops_per_second: float | None = None
    float16_flops_per_second: float | None = None
    compute_capability: str | None = None
    reached: ReachedRates = ReachedRates()

    @property
    def platform(self) -> str:
        """The platform by jax: "tpu" or "gpu"."""
        return "tpu" if self.kind.startswith("TPU") else "gpu"


GB, GIB, TERA = 10**9, 2**30, 10**12


HOPPER = ReachedRates(products=0.77, memory=0.8, kernel_seconds=2e-6, softmax_features=128.0)
"""SXM boards of Hopper, measured by a step of GPT-2 124M on one H200 (docs/benchmarks/gpu.md): products at
730 to 780 of 989 Tflop/s, the optimizer's update at 0.81 of the bandwidth, cuDNN's attention (heads of 64
features, 1,024 positions) at a third of the rate of products. The time of a kernel is assumed."""


def _device(
    kind: str,
    source: str,
    matrix: float | None,
    memory: float,
    bandwidth: float,
    float32: float | None = None,
    compute_capability: str | None = None,
    *,
    float16: float | None = None,
    reached: ReachedRates = ReachedRates(),
) -> Device:
    """Build a device from figures in teraflops, GB and GB per second."""
    peaks = [None if peak is None else peak * TERA for peak in (matrix, float32, float16)]
    sizes = round(memory * GB), bandwidth * GB
    return Device(kind, source, *sizes, *peaks, compute_capability, reached)  # pyright: ignore


H100 = "NVIDIA H100 Tensor Core GPU datasheet"
A100 = "NVIDIA A100 Tensor Core GPU datasheet"
GA102 = "NVIDIA Ampere GA102 whitepaper"
LISTINGS = "public listings of specifications"

DEVICES = (
    # name, source, dense bfloat16 teraflops, GB, GB/s, float32 teraflops, compute capability
    # HGX, one of 8 GPUs: 4.5 petaflops in 16 bits with sparsity, half of that dense
    _device("NVIDIA B300 SXM6 AC", "NVIDIA Blackwell Ultra datasheet", 2250, 270, 7700, 75, "10.3"),
    # one of 72 GPUs: 360 petaflops in 16 bits with sparsity, 13.4 TB, 576 TB/s
    _device("NVIDIA GB200", "NVIDIA GB200 NVL72 datasheet", 2500, 186, 8000, 80, "10.0"),
    # 8 GPUs: 1,440 GB, 64 TB/s, 72 petaflops in 8 bits with sparsity; half of that
    # dense, a quarter dense in 16 bits
    _device("NVIDIA B200", "NVIDIA DGX B200 datasheet", 2250, 180, 8000, None, "10.0"),
    # 1,979 (SXM), 1,513 (PCIe), 1,671 (NVL) bfloat16 teraflops with sparsity, half of that dense
    _device("NVIDIA H100 80GB HBM3", H100, 989.5, 80, 3350, 67, "9.0", reached=HOPPER),
    _device("NVIDIA H100 PCIe", H100, 756.5, 80, 2000, 51, "9.0"),
    _device("NVIDIA H100 NVL", H100, 835.5, 94, 3900, 60, "9.0"),
    # SXM: 1,979 bfloat16 teraflops with sparsity
    _device(
        "NVIDIA H200", "NVIDIA H200 Tensor Core GPU datasheet", 989.5, 141, 4800, 67, "9.0", reached=HOPPER
    ),
    # named by the 480 GB of the processor's memory; 1,979 bfloat16 teraflops with sparsity
    _device("NVIDIA GH200 480GB", "NVIDIA GH200 datasheet", 989.5, 96, 4000, 67, "9.0"),
    _device("NVIDIA GH200 144G HBM3e", "NVIDIA GH200 datasheet", 989.5, 144, 4900, 67, "9.0"),
    # 312 bfloat16 teraflops, dense, in all four
    _device("NVIDIA A100-SXM4-40GB", A100, 312, 40, 1555, 19.5, "8.0"),
    _device("NVIDIA A100-PCIE-40GB", A100, 312, 40, 1555, 19.5, "8.0"),
    _device("NVIDIA A100-SXM4-80GB", A100, 312, 80, 2039, 19.5, "8.0"),
    _device("NVIDIA A100 80GB PCIe", A100, 312, 80, 1935, 19.5, "8.0"),
    _device("NVIDIA A40", "NVIDIA A40 datasheet", 149.7, 48, 696, 37.4, "8.6"),
    _device("NVIDIA A10", "NVIDIA A10 datasheet", 125, 24, 600, 31.2, "8.6"),
    _device("NVIDIA RTX A6000", GA102, 154.8, 48, 768, 38.7, "8.6"),
    # 733 bfloat16 teraflops with sparsity
    _device("NVIDIA L40S", "NVIDIA L40S datasheet", 362.05, 48, 864, 91.6, "8.9"),
    # 242 bfloat16 teraflops with sparsity
    _device("NVIDIA L4", "NVIDIA L4 Tensor Core GPU datasheet", 121, 24, 300, 30.3, "8.9"),
    # sums of products in float32, as XLA computes them, are at half the rate of those in float16
    _device("NVIDIA GeForce RTX 3090", GA102, 71, 24, 936, 35.6, "8.6"),
    _device("NVIDIA GeForce RTX 4090", "NVIDIA Ada whitepaper", 165.2, 24, 1008, 82.6, "8.9"),
    _device("NVIDIA GeForce RTX 5090", "NVIDIA RTX Blackwell whitepaper", 209.5, 32, 1792, 104.8, "12.0"),
    _device("AMD Instinct MI300X", "AMD Instinct MI300X data sheet", 1307.4, 192, 5300, 163.4),
    _device("AMD Instinct MI325X", "AMD Instinct MI325X data sheet", 1307.4, 256, 6000, 163.4),
    # by chip: jax shows one device for a chip in each of them; v5 is v5p
    _device("TPU v4", "Google Cloud documentation, TPU v4", 275, 32 * GIB / GB, 1200),
    _device("TPU v5 lite", "Google Cloud documentation, TPU v5e", 197, 16, 819),
    _device("TPU v5", "Google Cloud documentation, TPU v5p", 459, 95, 2765),
    _device("TPU v6 lite", "Google Cloud documentation, TPU v6e", 918, 32, 1638),
    # their matrix products are in float16, those of P100 without matrix units
    _device("Tesla V100-SXM2-16GB", "NVIDIA Tesla V100 datasheet", None, 16, 900, 15.7, "7.0", float16=125),
    _device("Tesla V100-SXM2-32GB", "NVIDIA Tesla V100 datasheet", None, 32, 900, 15.7, "7.0", float16=125),
    _device("Tesla V100-PCIE-16GB", "NVIDIA Tesla V100 datasheet", None, 16, 900, 14, "7.0", float16=112),
    _device("Tesla T4", "NVIDIA Tesla T4 datasheet", None, 16, 320, 8.1, "7.5", float16=65),
    _device("Tesla P100-PCIE-16GB", "NVIDIA Tesla P100 datasheet", None, 16, 732, 9.3, "6.0", float16=18.7),
    # cores and boost clock; the float32 peak is 2 flops a core and cycle:
    # 5120 x 1.455 GHz, 4608 x 1.77, 1920 x 1.68, 1792 x 1.48. The names were not seen on such a machine.
    _device("NVIDIA TITAN V", LISTINGS, None, 12, 652.8, 14.9, "7.0"),
    _device("NVIDIA TITAN RTX", LISTINGS, None, 24, 672, 16.3, "7.5"),
    _device("NVIDIA GeForce RTX 2060", LISTINGS, None, 6, 336, 6.45, "7.5"),
    _device("Quadro P4000", LISTINGS, None, 8, 243, 5.3, "6.1"),
)

OTHER_NAMES = {
    "NVIDIA B300": "NVIDIA B300 SXM6 AC",
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    # without the maker's name by older drivers
    "TITAN V": "NVIDIA TITAN V",
    "TITAN RTX": "NVIDIA TITAN RTX",
    "GeForce RTX 2060": "NVIDIA GeForce RTX 2060",
}
"""Other `device_kind` of the same device -> its name in `DEVICES`."""


def find_device(device_kind: str) -> Device | None:
    """Return the device of a name; None if it is unknown, as a guess would give a wrong MFU.

    >>> find_device("NVIDIA H200").memory_bytes
    141000000000
    >>> print(find_device("cpu"))
    None
    """
    kind = OTHER_NAMES.get(device_kind, device_kind)
    return next((device for device in DEVICES if device.kind == kind), None)
