"""Compile the step of a run ahead of time, for devices that this machine need not have."""

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from shardtrain.data import RowSplit
from shardtrain.plan.compile import Figures, compile_step, described_devices, figures
from shardtrain.sharding.mesh import make_mesh
from shardtrain.trainer.config import Run
from shardtrain.trainer.setup import make_setup, microbatch_of


def compiled_figures(run: Run, kind: str, sizes: Mapping[str, int], num_rows: int | None = None) -> Figures:
    """Compile the step of a run and read its figures; the data is prepared in a temporary folder.

    Args:
      run: the run; its strategy is that of one island.
      kind: of the devices, see `plan.compile.described_devices`.
      sizes: axis -> size.
      num_rows: rows of this island, with padding; None: the whole batch.

    Raises:
      ValueError: unknown or too few devices, or a layout or batch that does not fit.
      ImportError: an extra is not installed.
    """
    mesh = make_mesh(run.strategy.layout, described_devices(kind, math.prod(sizes.values())))
    with TemporaryDirectory() as folder:
        rows = microbatch_of(run, run.data.train(Path(folder)))
    parts = make_setup(run, microbatch=rows, mesh=mesh)
    accumulate = run.strategy.accumulate
    num_rows = run.batch if num_rows is None else num_rows
    if run.batch_unit == "tokens":
        # those of the first batch, with padding
        split = RowSplit.of(sizes, run.strategy.layout.batch_axes, accumulate)
        num_rows = split.padded(len(rows["weights"]) * accumulate)
    batch = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in rows.items()}
    compiled = compile_step(
        parts.model, run.loss, parts.optimizer, parts.placement, batch, microbatches=accumulate
    )
    return figures(compiled, sizes)
