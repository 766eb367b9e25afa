"""Read the measured steps of past runs, to which `shardtrain calibrate` fits a machine. No step is run.

Next: `calibrate.py`; `run_rows.py`, which reads rows for predictions without a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shardtrain import axes
from shardtrain.cli.checkpoint_path import MODEL, find_checkpoint_path, select_options
from shardtrain.cli.run_rows import find_devices, read_step_phases
from shardtrain.errors.messages import refuse
from shardtrain.errors.options import rewrite_texts
from shardtrain.plan.prediction import Choice
from shardtrain.sharding.axis_sizes import axis_sizes
from shardtrain.sharding.layout import Layout
from shardtrain.trainer.config import Run, describe

MESH = "strategy.layout.mesh."

NUMBERS = ("strategy.accumulate", "strategy.pipeline.virtual_stages")

LENGTHS = ("seq", "window")
"""Endings of the names of data options that set the length of a sample."""


class PastStep(NamedTuple):
    """A measured step.

    Args:
      choice: how it was run.
      seconds: time of the compiled step, without input, saves and evaluations.
    """

    choice: Choice
    seconds: float


def read_past_steps(run: Run, folders: Sequence[Path], kind: str, num_devices: int) -> list[PastStep]:
    """Read the steps of past runs of the same model and batch, on the same number and kind of devices.

    Args:
      run: the run to compare with.
      folders: folders of past runs.
      kind: kind of the devices of this machine.
      num_devices: number of these devices.

    Raises:
      ValueError: lists every folder whose step is unknown or different.
    """
    found, problems = [], []
    for folder in folders:
        try:
            found.append(_read_past_step(run, folder, kind, num_devices))
        except (ValueError, OSError) as error:
            problems.append(str(error) if str(folder) in str(error) else f"{folder}: {error}")
    refuse("past runs cannot be compared with this one", problems)
    return found


def _read_past_step(run: Run, folder: Path, kind: str, num_devices: int) -> PastStep:
    _, phases = read_step_phases(folder)
    if any(phases.seconds.get(phase) for phase in ("islands", "stages")):
        raise ValueError("it ran on several islands; give runs of one island")
    options = dict(find_checkpoint_path(str(folder)).reader().extra.get("run") or {})
    own_kind, own_devices = find_devices(folder)
    if (own_kind, own_devices) != (kind, num_devices):
        raise ValueError(
            f"it ran on {own_devices} devices of kind {own_kind}, and this machine has {num_devices} of kind"
            f" {kind}; calibrate there, or with as many devices (--cpu-devices)"
        )
    if other := _list_other_options(run, options):
        raise ValueError(f"it is another step: {'; '.join(other)}; give runs of this model and batch")
    return PastStep(_choice(options, num_devices), phases.seconds["step"])


def _list_other_options(run: Run, options: Mapping[str, Any]) -> list[str]:
    """List the options of batch, sample length, dtype and model that differ from a run's."""
    here: dict[str, Any] = {"batch": run.batch, "strategy.compute_dtype": run.strategy.compute_dtype}
    of_data = describe(run.data, "data")
    here |= {name: value for name, value in of_data.items() if name.endswith(LENGTHS)}
    if is_dataclass(run.model):
        here |= describe(run.model, "model")
        options = rewrite_texts(type(run.model), options, MODEL)
    return [
        f"{name} was {options[name]!r}, and is {value!r}"
        for name, value in here.items()
        if name in options and isinstance(value, int | float | str | None) and options[name] != value
    ]


def _choice(options: Mapping[str, Any], num_devices: int) -> Choice:
    """Return the choice of layout, microbatches and schedule that options describe.

    Raises:
      ValueError: a checkpoint, which others may have written, has a size that is no whole number.
    """
    sizes_of = [name for name in options if name.startswith(MESH) or name in NUMBERS]
    if odd := [f"{name} is {options[name]!r}" for name in sizes_of if type(options[name]) is not int]:
        raise ValueError(f"its checkpoint has no whole numbers: {', '.join(odd)}; give a run of this library")
    mesh = select_options(options, MESH)
    layout = {
        name: options[f"strategy.layout.{name}"]
        for name in ("zero", "sequence_sharded", "collective_matmul", "context_attention", "unnamed")
        if f"strategy.layout.{name}" in options
    }
    sizes = axis_sizes(mesh or {axes.DATA: -1}, num_devices)
    has_stages = sizes[axes.PIPELINE] > 1
    return Choice(
        layout=Layout(
            mesh={axis: size for axis, size in sizes.items() if size > 1} or {axes.DATA: 1}, **layout
        ),
        accumulate=options.get("strategy.accumulate", 1),
        remat=options.get("strategy.remat"),
        schedule=options.get("strategy.pipeline.schedule", "1f1b") if has_stages else "1f1b",
        virtual_stages=options.get("strategy.pipeline.virtual_stages", 1) if has_stages else 1,
    )
