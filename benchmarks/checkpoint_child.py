"""One save or one restore in a process of its own, with its time, its peak of memory and what it read.

`checkpoint.py` starts it: the arrays of a decoder and of its two moments, on simulated devices.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardtrain.checkpoints.checkpointer import Checkpoints
from shardtrain.checkpoints.differences import Allow
from shardtrain.checkpoints.manifest_entries import ArrayOrigin
from shardtrain.checkpoints.policy import CheckpointPolicy
from shardtrain.checkpoints.reader import visible_readers
from shardtrain.checkpoints.restore import restore_arrays

BY_HAND = "by_hand"


def shapes(embed: int, num_layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Parameters and Adam's two moments, blocks stacked."""
    one = {
        "embedding/table": (vocab, embed),
        "blocks/attention/qkv": (num_layers, embed, 3 * embed),
        "blocks/attention/out": (num_layers, embed, embed),
        "blocks/mlp/up": (num_layers, embed, 4 * embed),
        "blocks/mlp/down": (num_layers, 4 * embed, embed),
        "blocks/norm/scale": (num_layers, embed),
    }
    return {f"{tree}/{path}": shape for tree in ("params", "mu", "nu") for path, shape in one.items()}


def sharding(num_devices: int) -> NamedSharding:
    """All axes of one mesh on the second dim, as fsdp has them."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("fsdp",))
    return NamedSharding(mesh, PartitionSpec(None, "fsdp"))


def cut_otherwise(path: str, num_layers: int) -> ArrayOrigin | None:
    """Two stages of a pipeline with two blocks in turn: their rows, stage by stage."""
    rows = tuple(row for stage in (0, 1) for row in range(num_layers) if row // 2 % 2 == stage)
    return ArrayOrigin(rows=rows, num_rows=num_layers) if "/blocks/" in path else None


def save(options: dict[str, Any]) -> None:
    """Random arrays, by the toolkit and by hand."""
    folder, where = Path(options["folder"]), sharding(options["devices"])
    generator, layers = np.random.default_rng(0), options["layers"]
    state = {
        path: jax.device_put(generator.standard_normal(shape, np.float32), where)
        for path, shape in shapes(options["embed"], layers, options["vocab"]).items()
    }
    origins = (
        {path: origin for path in state if (origin := cut_otherwise(path, layers))} if options["rows"] else {}
    )
    with Checkpoints(folder, CheckpointPolicy()) as checkpoints:
        checkpoints.save(1, state, {}, origins)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / BY_HAND, state)


def restore(options: dict[str, Any]) -> dict[str, float]:
    """Seconds, peak of memory over the arrays' bytes, bytes read over the arrays' bytes."""
    folder, where = Path(options["folder"]), sharding(options["devices"])
    layers, wanted, origins = options["layers"], {}, {}
    for path, shape in shapes(options["embed"], layers, options["vocab"]).items():
        if options["third"] and "/blocks/" not in path:
            continue
        if options["third"]:
            rows = tuple(range(layers // 3))
            shape, origins[path] = (len(rows), *shape[1:]), ArrayOrigin(rows=rows, num_rows=layers)
        wanted[path] = jax.ShapeDtypeStruct(shape, np.float32, sharding=where)
    num_bytes = sum(4 * int(np.prod(like.shape)) for like in wanted.values())
    jax.block_until_ready(jax.device_put(np.zeros((8, 8)), where))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    resident, _, read = _process()
    start = time.perf_counter()
    if options["how"] == "orbax":
        with ocp.StandardCheckpointer() as checkpointer:
            arrays = checkpointer.restore(folder / BY_HAND, wanted)
    else:
        reader = visible_readers(folder)[-1]
        if options["how"] == "verified":
            assert not reader.problems()
        arrays = restore_arrays(
            reader, wanted, origins, Allow(unused=("*",)) if options["third"] else Allow()
        )
    jax.block_until_ready(arrays)
    seconds = time.perf_counter() - start
    _, peak, read_after = _process()
    assert set(arrays) == set(wanted)
    return {
        "seconds": seconds,
        "array_bytes": num_bytes,
        "peak": (peak - resident) / num_bytes,
        "read": (read_after - read) / num_bytes,
    }


def _process() -> tuple[int, int, int]:
    """Resident bytes, their peak, and bytes read of files: Linux tells."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    io = dict(line.split(":") for line in Path("/proc/self/io").read_text().splitlines())
    return (
        1024 * int(status["VmRSS"].split()[0]),
        1024 * int(status["VmHWM"].split()[0]),
        int(io["rchar"]),
    )


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    flag = f"--xla_force_host_platform_device_count={told['devices']}"
    if os.environ.get("XLA_FLAGS") != flag:
        sys.exit(f"start this with XLA_FLAGS={flag}")
    if told["how"] == "save":
        save(told)
    else:
        print(json.dumps(restore(told)))
