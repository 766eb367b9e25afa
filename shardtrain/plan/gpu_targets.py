"""Descriptions of GPUs, from which XLA compiles for them in their absence.

The numbers are published by NVIDIA: data sheets of the SXM boards with 80 GB, and the table of compute
capabilities in the CUDA programming guide. Used by `compile.py`; no jax.
"""

from collections.abc import Mapping
from types import MappingProxyType

SAME: Mapping[str, int | float] = MappingProxyType(
    {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
        "shared_memory_per_block": 48 * 2**10,
        "device_memory_size": 80 * 10**9,
    }
)
"""Equal for all GPUs below; in bytes; a core of XLA is a streaming multiprocessor."""

GPU_TARGETS: Mapping[str, tuple[str, tuple[int, int], Mapping[str, int | float]]] = MappingProxyType(
    {
        "h100": (
            "NVIDIA H100 80GB HBM3",
            (9, 0),
            {
                "core_count": 132,
                "fpus_per_core": 128,
                "clock_rate_ghz": 1.98,
                "memory_bandwidth": 3_350_000_000_000,
                "l2_cache_size": 50 * 2**20,
                "shared_memory_per_core": 228 * 2**10,
                "shared_memory_per_block_optin": 227 * 2**10,
            },
        ),
        "a100": (
            "NVIDIA A100-SXM4-80GB",
            (8, 0),
            {
                "core_count": 108,
                "fpus_per_core": 64,
                "clock_rate_ghz": 1.41,
                "memory_bandwidth": 2_039_000_000_000,
                "l2_cache_size": 40 * 2**20,
                "shared_memory_per_core": 164 * 2**10,
                "shared_memory_per_block_optin": 163 * 2**10,
            },
        ),
    }
)
"""Kind -> name, compute capability, and the numbers of this GPU."""


def target_config(kind: str) -> str:
    """Format one GPU as the text of XLA's message GpuTargetConfigProto.

    >>> print(target_config("h100").splitlines()[-1])
    device_description_str: "NVIDIA H100 80GB HBM3"
    """
    name, (major, minor), numbers = GPU_TARGETS[kind]
    lines = [f"  {field}: {value}" for field, value in {**SAME, **numbers}.items()]
    return "\n".join(
        [
            "gpu_device_info {",
            *lines,
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}",
            "}",
            'platform_name: "CUDA"',
            "dnn_version_info { major: 9 minor: 8 }",
            f'device_description_str: "{name}"',
        ]
    )
