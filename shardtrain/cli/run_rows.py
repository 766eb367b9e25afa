"""Read rows of measurements from folders of past runs, for `shardtrain advise predict`. No device is used.

Next: `plan/advice/fit.py`, which fits rows, and reads them from CSV files.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from shardtrain.cli.checkpoint_path import MODEL, find_checkpoint_path, select_options
from shardtrain.errors.messages import refuse
from shardtrain.functional.remat_counts import find_remat_part
from shardtrain.imported import option_problems
from shardtrain.plan.advice.bottleneck import StepPhases, step_phases
from shardtrain.plan.advice.fit import MeasuredRow, read_rows
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.system.untrusted_data import parse_record
from shardtrain.system.untrusted_files import read_text

ENVIRONMENT = "environment.jsonl"
MOST_ENVIRONMENT_BYTES = 1 << 24
PARAMS = "params/"
GRADIENT_BYTES = 4
WITH_ALL_AGAIN = 4 / 3
"""Operations of a step that recomputes every forward, relative to a step that recomputes nothing."""


def read_measured_rows(paths: Sequence[Path]) -> tuple[list[MeasuredRow], list[str]]:
    """Return the rows of CSV files and run folders, and notes on what is unknown.

    Runs whose models have the same options count as one model, named after the first of their folders.

    Args:
      paths: files, and folders of finished or running runs.

    Raises:
      ValueError: lists every path that has no row.
    """
    rows: list[MeasuredRow] = []
    names: dict[str, str] = {}
    problems: list[str] = []
    notes: list[str] = []
    for path in paths:
        try:
            if path.is_dir():
                row, more = read_row(path, names)
                rows.append(row)
                notes += more
            else:
                rows += read_rows(path)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise ValueError(problems[0])
    refuse("rows cannot be read", problems)
    return rows, notes


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Read the lines of metrics of a run's folder.

    Raises:
      ValueError: it has none.
    """
    if not (run / METRICS).is_file():
        raise ValueError(f"there is no {run / METRICS}; give the folder of a run, such as runs/gpt_text")
    return read_jsonl(run / METRICS)


def read_step_phases(run: Path) -> tuple[list[dict[str, float]], StepPhases]:
    """Read the lines of metrics of a run's folder, and return them with the phases of a step.

    Raises:
      ValueError: it has no metrics, or fewer than two measured lines.
    """
    lines = read_metrics(run)
    if (phases := step_phases(lines)) is None:
        raise ValueError(f"{run / METRICS} has fewer than two measured lines; train on, or use --log-every 1")
    return lines, phases


def read_row(folder: Path, names: dict[str, str]) -> tuple[MeasuredRow, list[str]]:
    """Read the row of a run's folder; also return a note for each unknown column.

    The time of a step excludes saves and evaluations. The time of a start ends with the first logged step,
    minus the steps before it.

    Args:
      folder: folder with metrics, environment and a checkpoint.
      names: options of a model -> its name; a new model is added.

    Raises:
      ValueError: it has no metrics or no environment, or fewer than two measured lines.
    """
    lines, phases = read_step_phases(folder)
    step_seconds = sum(seconds for phase, seconds in phases.seconds.items() if phase != "save")
    device, devices = find_devices(folder)
    found: dict[str, float] = {"step_seconds": step_seconds}
    saves = [line["seconds/save"] for line in lines if line.get("seconds/save", 0.0) > 0]
    if saves:
        found["checkpoint_seconds"] = statistics.median(saves)
    first = next((line for line in lines if "wall_seconds" in line), None)
    if first is not None and (start := first["wall_seconds"] - (first["step"] - 1) * step_seconds) > 0:
        found["startup_seconds"] = start
    try:
        reader = find_checkpoint_path(str(folder)).reader()
    except (ValueError, OSError) as error:
        return MeasuredRow(model=folder.name, device=device, devices=devices, **found), [
            f"{folder}: sizes and operations are not known: {error}"
        ]
    options = dict(reader.extra.get("run") or {})
    own = select_options(options, MODEL)
    model = names.setdefault(repr(sorted(own.items(), key=str)) if own else str(folder), folder.name)
    sizes = [math.prod(leaf.shape) for path, leaf in reader.leaves.items() if path.startswith(PARAMS)]
    found["parameter_mb"] = GRADIENT_BYTES * sum(sizes) / 1e6
    found["checkpoint_mb"] = reader.num_bytes / 1e6
    teraflops = _teraflops(own, options, lines)
    notes = []
    if teraflops is None:
        notes.append(f"{folder}: operations are not known, as its model is no decoder; steps are left out")
    else:
        found["teraflops"] = teraflops
    return MeasuredRow(model=model, device=device, devices=devices, **found), notes


def find_devices(folder: Path) -> tuple[str, int]:
    """Return the kind and the number of the devices on which a run was last started."""
    path = folder / ENVIRONMENT
    try:
        text = read_text(path, MOST_ENVIRONMENT_BYTES)
        newest = parse_record(text.strip().splitlines()[-1])
        every = [device for rank in newest["ranks"] for device in rank["devices"]]
        kinds = dict.fromkeys(str(device["kind"]) for device in every)
        return "+".join(kinds), sum(int(device["number"]) for device in every)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not name the devices of the run ({error}); write a row to a CSV file instead"
        ) from error


def _teraflops(
    own: Mapping[str, Any], options: Mapping[str, Any], lines: Sequence[Mapping[str, float]]
) -> float | None:
    """Return the 10**12 operations of a step on all devices; None for a model that is no decoder."""
    decoder = import_module("shardtrain.models.decoder").DecoderConfig
    if not own or option_problems(decoder, dict(own)):
        return None
    config = decoder(**own)
    # both rates are over the same steps, so their ratio is the tokens of a step
    rates = [
        (line["tokens_per_second"], line["updates_per_second"])
        for line in lines
        if line.get("tokens_per_second") and line.get("updates_per_second")
    ]
    if not rates:
        return None
    tokens = statistics.median(of_tokens / of_updates for of_tokens, of_updates in rates)
    of_token = import_module("shardtrain.models.decoder_flops").flops_per_token(config)
    again = find_remat_part(options.get("strategy.remat") or config.remat, "full")
    return tokens * of_token * (1 + again * (WITH_ALL_AGAIN - 1)) / 1e12
