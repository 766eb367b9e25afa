"""The table of known devices: peak flops, memory and bandwidth; and MFU, a fraction of that peak.

Keyed by the name that jax gives a device (`device_kind`). No jax.
"""

from shardtrain.plan.data_sheet import Device, Reached

GB, GIB, TERA = 10**9, 2**30, 10**12


HOPPER = Reached(products=0.77, memory=0.8, kernel_seconds=2e-6, softmax_features=128.0)
"""Of SXM boards of Hopper, by a step of GPT-2 124M on one H200 (docs/benchmarks/gpu.md): products at 730 to
780 of 989 Tflop/s, the optimizer's update at 0.81 of the bandwidth, cuDNN's attention (heads of 64 features,
1,024 positions) at a third of the rate of products. The time of a kernel is assumed."""


DEVICES = (
    # 8 GPUs: 1,440 GB, 64 TB/s, 72 petaflops in 8 bits with sparsity; half of that
    # dense, a quarter dense in 16 bits
    Device(
        kind="NVIDIA B200",
        source="NVIDIA DGX B200 datasheet",
        matrix_flops_per_second=2250 * TERA,
        memory_bytes=180 * GB,
        memory_bytes_per_second=8000 * GB,
        compute_capability="10.0",
    ),
    # 1,979 (SXM), 1,513 (PCIe), 1,671 (NVL) bfloat16 teraflops with sparsity, half of that dense
    Device(
        kind="NVIDIA H100 80GB HBM3",
        source="NVIDIA H100 Tensor Core GPU datasheet",
        matrix_flops_per_second=989.5 * TERA,
        memory_bytes=80 * GB,
        memory_bytes_per_second=3350 * GB,
        float32_flops_per_second=67 * TERA,
        compute_capability="9.0",
        reached=HOPPER,
    ),
    Device(
        kind="NVIDIA H100 PCIe",
        source="NVIDIA H100 Tensor Core GPU datasheet",
        matrix_flops_per_second=756.5 * TERA,
        memory_bytes=80 * GB,
        memory_bytes_per_second=2000 * GB,
        float32_flops_per_second=51 * TERA,
        compute_capability="9.0",
    ),
    Device(
        kind="NVIDIA H100 NVL",
        source="NVIDIA H100 Tensor Core GPU datasheet",
        matrix_flops_per_second=835.5 * TERA,
        memory_bytes=94 * GB,
        memory_bytes_per_second=3900 * GB,
        float32_flops_per_second=60 * TERA,
        compute_capability="9.0",
    ),
    # SXM: 1,979 bfloat16 teraflops with sparsity
    Device(
        kind="NVIDIA H200",
        source="NVIDIA H200 Tensor Core GPU datasheet",
        matrix_flops_per_second=989.5 * TERA,
        memory_bytes=141 * GB,
        memory_bytes_per_second=4800 * GB,
        float32_flops_per_second=67 * TERA,
        compute_capability="9.0",
        reached=HOPPER,
    ),
    # 312 bfloat16 teraflops, dense, in all four
    Device(
        kind="NVIDIA A100-SXM4-40GB",
        source="NVIDIA A100 Tensor Core GPU datasheet",
        matrix_flops_per_second=312 * TERA,
        memory_bytes=40 * GB,
        memory_bytes_per_second=1555 * GB,
        float32_flops_per_second=19.5 * TERA,
        compute_capability="8.0",
    ),
    Device(
        kind="NVIDIA A100-PCIE-40GB",
        source="NVIDIA A100 Tensor Core GPU datasheet",
        matrix_flops_per_second=312 * TERA,
        memory_bytes=40 * GB,
        memory_bytes_per_second=1555 * GB,
        float32_flops_per_second=19.5 * TERA,
        compute_capability="8.0",
    ),
    Device(
        kind="NVIDIA A100-SXM4-80GB",
        source="NVIDIA A100 Tensor Core GPU datasheet",
        matrix_flops_per_second=312 * TERA,
        memory_bytes=80 * GB,
        memory_bytes_per_second=2039 * GB,
        float32_flops_per_second=19.5 * TERA,
        compute_capability="8.0",
    ),
    Device(
        kind="NVIDIA A100 80GB PCIe",
        source="NVIDIA A100 Tensor Core GPU datasheet",
        matrix_flops_per_second=312 * TERA,
        memory_bytes=80 * GB,
        memory_bytes_per_second=1935 * GB,
        float32_flops_per_second=19.5 * TERA,
        compute_capability="8.0",
    ),
    # 242 bfloat16 teraflops with sparsity
    Device(
        kind="NVIDIA L4",
        source="NVIDIA L4 Tensor Core GPU datasheet",
        matrix_flops_per_second=121 * TERA,
        memory_bytes=24 * GB,
        memory_bytes_per_second=300 * GB,
        float32_flops_per_second=30.3 * TERA,
        compute_capability="8.9",
    ),
    # by chip: jax shows one device for a chip in each of them
    Device(
        kind="TPU v4",
        source="Google Cloud documentation, TPU v4",
        matrix_flops_per_second=275 * TERA,
        memory_bytes=32 * GIB,
        memory_bytes_per_second=1200 * GB,
    ),
    Device(
        kind="TPU v5 lite",
        source="Google Cloud documentation, TPU v5e",
        matrix_flops_per_second=197 * TERA,
        memory_bytes=16 * GB,
        memory_bytes_per_second=819 * GB,
    ),
    Device(
        kind="TPU v5",  # v5p
        source="Google Cloud documentation, TPU v5p",
        matrix_flops_per_second=459 * TERA,
        memory_bytes=95 * GB,
        memory_bytes_per_second=2765 * GB,
    ),
    Device(
        kind="TPU v6 lite",
        source="Google Cloud documentation, TPU v6e",
        matrix_flops_per_second=918 * TERA,
        memory_bytes=32 * GB,
        memory_bytes_per_second=1638 * GB,
    ),
    # their matrix products are in float16, those of P100 without matrix units
    Device(
        kind="Tesla V100-SXM2-16GB",
        source="NVIDIA Tesla V100 datasheet",
        matrix_flops_per_second=None,
        memory_bytes=16 * GB,
        memory_bytes_per_second=900 * GB,
        float32_flops_per_second=15.7 * TERA,
        float16_flops_per_second=125 * TERA,
        compute_capability="7.0",
    ),
    Device(
        kind="Tesla V100-SXM2-32GB",
        source="NVIDIA Tesla V100 datasheet",
        matrix_flops_per_second=None,
        memory_bytes=32 * GB,
        memory_bytes_per_second=900 * GB,
        float32_flops_per_second=15.7 * TERA,
        float16_flops_per_second=125 * TERA,
        compute_capability="7.0",
    ),
    Device(
        kind="Tesla V100-PCIE-16GB",
        source="NVIDIA Tesla V100 datasheet",
        matrix_flops_per_second=None,
        memory_bytes=16 * GB,
        memory_bytes_per_second=900 * GB,
        float32_flops_per_second=14 * TERA,
        float16_flops_per_second=112 * TERA,
        compute_capability="7.0",
    ),
    Device(
        kind="Tesla T4",
        source="NVIDIA Tesla T4 datasheet",
        matrix_flops_per_second=None,
        memory_bytes=16 * GB,
        memory_bytes_per_second=320 * GB,
        float32_flops_per_second=8.1 * TERA,
        float16_flops_per_second=65 * TERA,
        compute_capability="7.5",
    ),
    Device(
        kind="Tesla P100-PCIE-16GB",
        source="NVIDIA Tesla P100 datasheet",
        matrix_flops_per_second=None,
        memory_bytes=16 * GB,
        memory_bytes_per_second=732 * GB,
        float32_flops_per_second=9.3 * TERA,
        float16_flops_per_second=18.7 * TERA,
        compute_capability="6.0",
    ),
    # cores and boost clock; the float32 peak is 2 flops a core and cycle:
    # 5120 x 1.455 GHz, 4608 x 1.77, 1920 x 1.68, 1792 x 1.48. The names were not seen on such a machine.
    Device(
        kind="NVIDIA TITAN V",
        source="public listings of specifications",
        matrix_flops_per_second=None,
        memory_bytes=12 * GB,
        memory_bytes_per_second=652.8 * GB,
        float32_flops_per_second=14.9 * TERA,
        compute_capability="7.0",
    ),
    Device(
        kind="NVIDIA TITAN RTX",
        source="public listings of specifications",
        matrix_flops_per_second=None,
        memory_bytes=24 * GB,
        memory_bytes_per_second=672 * GB,
        float32_flops_per_second=16.3 * TERA,
        compute_capability="7.5",
    ),
    Device(
        kind="NVIDIA GeForce RTX 2060",
        source="public listings of specifications",
        matrix_flops_per_second=None,
        memory_bytes=6 * GB,
        memory_bytes_per_second=336 * GB,
        float32_flops_per_second=6.45 * TERA,
        compute_capability="7.5",
    ),
    Device(
        kind="Quadro P4000",
        source="public listings of specifications",
        matrix_flops_per_second=None,
        memory_bytes=8 * GB,
        memory_bytes_per_second=243 * GB,
        float32_flops_per_second=5.3 * TERA,
        compute_capability="6.1",
    ),
)

OTHER_NAMES = {
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    # without the maker's name by older drivers
    "TITAN V": "NVIDIA TITAN V",
    "TITAN RTX": "NVIDIA TITAN RTX",
    "GeForce RTX 2060": "NVIDIA GeForce RTX 2060",
}
"""Other `device_kind` of the same device -> its name in `DEVICES`."""


def known_device(device_kind: str) -> Device | None:
    """Return the device of this name; None if unknown, as a guess would give a wrong MFU.

    >>> known_device("NVIDIA H200").memory_bytes
    141000000000
    >>> print(known_device("cpu"))
    None
    """
    kind = OTHER_NAMES.get(device_kind, device_kind)
    return next((device for device in DEVICES if device.kind == kind), None)


def mfu(flops_per_second: float, device: Device, num_devices: int = 1) -> float:
    """Return the model flops utilization: model flops per second over the peak of all devices.

    Args:
      flops_per_second: model flops of the examples of one second, forward and backward, without
        recomputation; for a decoder tokens per second times
        `models.decoder.flops_per_token`.
      device: all devices are equal.
      num_devices: 1 or more.

    Returns:
      A fraction of the peak.

    Raises:
      ValueError: there is no device, or it has no matrix products in bfloat16.

    References:
      Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311, appendix B.

    >>> mfu(395.8e12, known_device("NVIDIA H100 80GB HBM3"))
    0.4
    """
    if num_devices < 1:
        raise ValueError(f"the MFU of {num_devices} devices was asked for. Use num_devices=1 or more.")
    if device.matrix_flops_per_second is None:
        raise ValueError(
            f"the MFU of {device.kind} was asked for, which has no matrix products in bfloat16; compare flops"
            " per second with its peak in the dtype of the run"
        )
    return flops_per_second / (num_devices * device.matrix_flops_per_second)
