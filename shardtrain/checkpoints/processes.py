"""Agree on values between the processes of one JAX runtime.

All of them make these calls in the same order.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_primary() -> bool:
    """Return whether this process writes the files of its island."""
    return jax.process_index() == 0


def is_set_on_any_process(flag: bool) -> bool:
    """Return whether the flag is set on any process."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def gather_alone(name: str, look: Callable[[int], Any]) -> list[Any]:
    """All-gather over the islands of a run with one island: broadcast the result of its first process.

    Args:
        name: the name of the exchange, unused with one island.
        look: number of an island -> JSON value.
    """
    if jax.process_count() == 1:
        return [look(0)]
    text = json.dumps(look(0)).encode() if is_primary() else b""
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
    found = np.frombuffer(text, np.uint8) if is_primary() else np.zeros(size, np.uint8)
    return [json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(found))))]
