"""cuDNN's flash attention, on NVIDIA GPUs."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shardtrain.models.attention.options import Attention, ScoreOptions


def has_flash(devices: Sequence[Any]) -> bool:
    """Return whether cuDNN's flash attention runs on these devices: NVIDIA GPUs of capability 8.0 or more.

    Without devices it does not: jax can trace it only in a process that has such a device.
    """
    capabilities = [re.fullmatch(r"(\d+)\.\d+", getattr(d, "compute_capability", "")) for d in devices]
    return bool(capabilities) and all(found and int(found[1]) >= 8 for found in capabilities)


def describe_device(devices: Sequence[Any]) -> str:
    """Return the kind and compute capability of the first device."""
    if not devices:
        return "devices that are not here"
    capability = getattr(devices[0], "compute_capability", None)
    return devices[0].device_kind + (f" ({capability})" if capability else "")


def find_obstacles(q_BTHK: Any, k_BSHK: Any, options: ScoreOptions, devices: Sequence[Any]) -> list[str]:
    """List the requirements of cuDNN's flash attention that are not met; see `Attention`.

    >>> queries = jax.ShapeDtypeStruct((1, 4, 2, 12), jnp.float32)
    >>> find_obstacles(queries, queries, ScoreOptions(soft_cap=30.0), [])[:2]
    ['16 bits, not float32', 'heads of a multiple of 8 features up to 128, not 12']
    """
    dtype, head_dim, found = q_BTHK.dtype, q_BTHK.shape[-1], []
    if dtype not in (jnp.bfloat16, jnp.float16):
        found.append(f"16 bits, not {jnp.dtype(dtype).name}")
    if head_dim % 8 or head_dim > 128:
        found.append(f"heads of a multiple of 8 features up to 128, not {head_dim}")
    if options.mask_BS is not None or options.segments_BT is not None:
        found.append("no mask and no segments")
    if options.soft_cap is not None:
        found.append("no soft cap")
    if options.bias_BHTS is not None:
        found.append("no relative positions")
    if not isinstance(options.window, int | None):
        found.append("a window that is the same in all blocks")
    if not has_flash(devices):
        found.append(f"NVIDIA GPUs here from compute capability 8.0, not {describe_device(devices)}")
    return found


def _attend(q_BTHK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, options: ScoreOptions) -> jax.Array:
    window = (options.window - 1, 0) if isinstance(options.window, int) else None
    return jax.nn.dot_product_attention(
        q_BTHK, k_BSHK, v_BSHK, is_causal=options.causal, local_window_size=window, implementation="cudnn"
    )


CUDNN = Attention(find_obstacles, _attend)
