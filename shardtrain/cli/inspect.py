"""`shardtrain inspect RUN`: how a run lies on a mesh, without compiling; the devices need not be here."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardtrain.cli.run_options import parse_run
from shardtrain.data import batch_problem
from shardtrain.layout import axis_sizes
from shardtrain.model import as_model
from shardtrain.optimizer import make_optimizer
from shardtrain.report.sharding import sharding_text
from shardtrain.state import state_specs


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Options of inspect alone.

    Args:
      devices: how many devices to lay it on; by default as many as --mesh names, or those here.
    """

    devices: int | None = None


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns 0."""
    run, options = parse_run("inspect", arguments, InspectOptions)
    if options.devices is not None and options.devices < 1:
        raise ValueError(f"--devices is {options.devices}; use 1 or more")
    layout = run.strategy.layout
    sizes = axis_sizes(layout, options.devices or _devices_named(layout.mesh))
    model = as_model(run.model)
    optimizer, _ = make_optimizer(run.optimizer, run.steps, model.dims)
    specs = state_specs(model, optimizer, layout, sizes, run.strategy.combine)
    sys.stdout.write(sharding_text(specs, sizes) + "\n")
    problem = batch_problem(run.batch, {a: sizes[a] for a in layout.batch_axes}, run.strategy.accumulate)
    if problem:
        raise ValueError(problem)
    return 0


def _devices_named(mesh: Mapping[str, int]) -> int:
    if -1 not in mesh.values():
        return math.prod(mesh.values())
    import jax

    return jax.device_count()
