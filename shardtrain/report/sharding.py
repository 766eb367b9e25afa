"""Format the sharding of each parameter and the bytes of the state, for `train` and `inspect`."""

from collections.abc import Mapping

import jax
from jax.sharding import PartitionSpec

from shardtrain.report.quantities import bytes_text
from shardtrain.report.tables import mesh_line, table_text
from shardtrain.sharding.specs import Row, sharding_rows, spec_axes, spec_text, totals
from shardtrain.train_step.placement import Specs


def totals_text(specs: Specs, sizes: Mapping[str, int], offload: str = "none") -> str:
    """Format the mesh and the totals, and arrays that lack names or rules; see `sharding_text`."""
    rows = sharding_rows(specs.arrays, specs.abstract.params, specs.params, sizes)
    unplaced = [] if specs.unplaced is None else [specs.unplaced]
    return "\n".join([f"mesh: {mesh_line(sizes)}", *_totals(specs, rows, sizes, offload), *unplaced])


def sharding_text(specs: Specs, sizes: Mapping[str, int], offload: str = "none") -> str:
    """Format the mesh, the sharding of each parameter, the totals, and the replicated parameters.

    Args:
      specs: the PartitionSpecs of the state, see `train_step.placement`.
      sizes: axis -> size.
      offload: "optimizer" if the optimizer's state is in the memory of the host.

    Returns:
      Lines of text.
    """
    rows = sharding_rows(specs.arrays, specs.abstract.params, specs.params, sizes)
    lines = [
        (
            row.path,
            " x ".join(map(str, row.shape)) or "scalar",
            " ".join(name or "-" for name in row.dims or ("(no names)",)),
            spec_text(row.spec, sizes),
            bytes_text(row.device_bytes),
        )
        for row in rows
    ]
    header = ("parameter", "shape", "dims", "sharded over", "bytes/device")
    text = f"mesh: {mesh_line(sizes)}\n{table_text(header, lines)}"
    unplaced = [] if specs.unplaced is None else [specs.unplaced]
    return text + "\n".join(
        [*_totals(specs, rows, sizes, offload), *_list_replicated(rows, sizes), *unplaced]
    )


def _totals(specs: Specs, rows: tuple[Row, ...], sizes: Mapping[str, int], offload: str) -> list[str]:
    everything, per_device, _ = totals(rows)
    count = sum(leaf.size for leaf in jax.tree.leaves(specs.abstract.params))
    trained = sum(leaf.size for leaf in jax.tree.leaves(specs.trained))
    state, state_device = _state_bytes(specs.abstract.opt_state, specs.state.opt_state, sizes)
    return [
        f"parameters: {count:,}, {bytes_text(everything)}; {bytes_text(per_device)} per device",
        *([f"trained: {trained:,} of them ({trained / count:.2%})"] if specs.frozen else []),
        f"optimizer state: {bytes_text(state)}; {bytes_text(state_device)} per device"
        + (", in the memory of the host" if offload == "optimizer" else ""),
    ]


def _state_bytes(tree: object, specs: object, sizes: Mapping[str, int]) -> tuple[int, int]:
    total = device = 0
    spec_leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    for leaf, spec in zip(jax.tree.leaves(tree), spec_leaves, strict=True):
        num_bytes = leaf.size * leaf.dtype.itemsize
        shards = 1
        for axis in spec_axes(spec):
            shards *= sizes[axis]
        total, device = total + num_bytes, device + num_bytes // shards
    return total, device


def _list_replicated(rows: tuple[Row, ...], sizes: Mapping[str, int]) -> list[str]:
    """Format one line with the parameters that are replicated on every device."""
    replicated = [row for row in rows if row.device_bytes == row.num_bytes]
    if all(size == 1 for size in sizes.values()) or not replicated:
        return []
    if len(replicated) == len(rows):
        return ["replicated on every device: all parameters"]
    num_bytes = bytes_text(sum(row.num_bytes for row in replicated))
    return [f"replicated on every device ({num_bytes}): {', '.join(row.path for row in replicated)}"]
