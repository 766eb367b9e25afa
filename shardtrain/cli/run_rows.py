"""Rows of measurements from past run folders, for `shardtrain advise predict`; no device is used.

Next: `plan/advice/fit.py`, which fits them, and reads rows that somebody wrote down.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from shardtrain.checkpoints.reader import CheckpointReader
from shardtrain.cli.checkpoint_files import MODEL
from shardtrain.cli.checkpoint_path import find_checkpoint_path
from shardtrain.errors.messages import problems_error
from shardtrain.imported import option_problems
from shardtrain.plan.advice.bottleneck import step_phases
from shardtrain.plan.advice.fit import MeasuredRow, read_rows
from shardtrain.report.sinks.json_lines import METRICS, read_jsonl
from shardtrain.system.untrusted_data import parse_record
from shardtrain.system.untrusted_files import read_text

ENVIRONMENT = "environment.jsonl"
MOST_ENVIRONMENT_BYTES = 1 << 24
PARAMS = "params/"
GRADIENT_BYTES = 4
WITH_ALL_AGAIN = 4 / 3
"""Operations of a step that computes every forward again, over those of one that keeps everything."""


def read_measured_rows(paths: Sequence[Path]) -> tuple[list[MeasuredRow], list[str]]:
    """Return the rows of CSV files and of run folders, and what is not known of folders.

    Runs whose models have the same options are one model, named after the first of their folders.

    Args:
      paths: files, and folders of finished or running runs.

    Raises:
      ValueError: lists every path of which there is no row.
    """
    rows: list[MeasuredRow] = []
    names: dict[str, str] = {}
    problems: list[str] = []
    notes: list[str] = []
    for path in paths:
        try:
            if path.is_dir():
                row, more = row_of_run(path, names)
                rows.append(row)
                notes += more
            else:
                rows += read_rows(path)
        except (ValueError, OSError) as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        raise problems_error("rows cannot be read", problems)
    return rows, notes


def row_of_run(folder: Path, names: dict[str, str]) -> tuple[MeasuredRow, list[str]]:
    """Return the row of a run's folder, and a line for each column that is not known.

    A step is that of the metrics without saves and evaluations; a start ends with the first step that was
    logged, less the steps before.

    Args:
      folder: with metrics, environment and a checkpoint.
      names: options of a model -> its name; a new model is entered.

    Raises:
      ValueError: it has no metrics or no environment, or fewer than two measured lines.
    """
    if not (folder / METRICS).is_file():
        raise ValueError(f"there is no {folder / METRICS}; give the folder of a run, such as runs/gpt_text")
    lines = read_jsonl(folder / METRICS)
    phases = step_phases(lines)
    if phases is None:
        raise ValueError(
            f"{folder / METRICS} has fewer than two measured lines; train on, or use --log-every 1"
        )
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
    own = {name.removeprefix(MODEL): value for name, value in options.items() if name.startswith(MODEL)}
    model = names.setdefault(repr(sorted(own.items(), key=str)) if own else str(folder), folder.name)
    found["parameter_mb"] = _parameter_bytes(reader) / 1e6
    found["checkpoint_mb"] = reader.num_bytes / 1e6
    teraflops = _teraflops(own, options, lines)
    notes = []
    if teraflops is None:
        notes.append(f"{folder}: operations are not known, as its model is no decoder; steps are left out")
    else:
        found["teraflops"] = teraflops
    return MeasuredRow(model=model, device=device, devices=devices, **found), notes


def find_devices(folder: Path) -> tuple[str, int]:
    """Return the kinds of the devices of a run's newest start, and their number."""
    path = folder / ENVIRONMENT
    try:
        text = read_text(path, MOST_ENVIRONMENT_BYTES)
        newest = parse_record(text.strip().splitlines()[-1])
        every = [device for rank in newest["ranks"] for device in rank["devices"]]
        kinds = dict.fromkeys(str(device["kind"]) for device in every)
        return "+".join(kinds), sum(int(device["number"]) for device in every)
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} does not say on which devices the run ran ({error}); write a row to a CSV file instead"
        ) from error


def _parameter_bytes(reader: CheckpointReader) -> float:
    shapes = [leaf.shape for path, leaf in reader.leaves.items() if path.startswith(PARAMS)]
    return float(GRADIENT_BYTES * sum(math.prod(shape) for shape in shapes))


def _teraflops(
    own: Mapping[str, Any], options: Mapping[str, Any], lines: Sequence[Mapping[str, float]]
) -> float | None:
    """Return 10**12 operations of a step, of all devices; None for a model that is no decoder."""
    decoder = import_module("shardtrain.models.decoder").DecoderConfig
    if not own or option_problems(decoder, dict(own)):
        return None
    config = decoder(**own)
    # what the loss counts in a step: both rates are over the same steps
    rates = [
        (line["tokens_per_second"], line["updates_per_second"])
        for line in lines
        if line.get("tokens_per_second") and line.get("updates_per_second")
    ]
    if not rates:
        return None
    tokens = statistics.median(of_tokens / of_updates for of_tokens, of_updates in rates)
    of_token = import_module("shardtrain.models.decoder_flops").flops_per_token(config)
    again = (options.get("strategy.remat") or config.remat) == "full"
    return tokens * of_token * (WITH_ALL_AGAIN if again else 1.0) / 1e12
