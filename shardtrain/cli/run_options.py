"""Parse the command line of a run: load the run file, and change its fields by options.

Next: `field_options.py`, which makes an option of each field; `run_file.py`, which loads the run.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtrain.cli.field_options import (
    FieldOption,
    field_options,
    format_flag,
    parse_options,
    replace_fields,
)
from shardtrain.cli.help_pages import ACROSS, LAYOUT, PIPELINE, SYNCHRONISATION, help_page
from shardtrain.cli.run_file import (
    StrategyOptions,
    adopt_tokenizer,
    apply_files,
    is_layout_file,
    load_combiner,
    load_run,
)
from shardtrain.combine import CODECS, COMBINERS
from shardtrain.errors.messages import refuse
from shardtrain.report.sinks import SINKS
from shardtrain.sharding.axis_sizes import parse_mesh
from shardtrain.sharding.layout_file import read_layout
from shardtrain.sharding.shares import parse_weights
from shardtrain.system import terminal
from shardtrain.trainer.config import Run

NO_OPTION = (
    *("loss", "names", "sample", "hooks", "strategy.islands", "strategy.predicted"),
    *(f"{LAYOUT}parameters", f"{LAYOUT}activations", f"{LAYOUT}operators"),
)
"""Fields of a run whose values text cannot express; they are set in Python or in a strategy file."""

FIELDS_WITHOUT_OPTION = (
    *("unit", "hook_errors", "evaluate_with", "loading.heldout_workers", "loading.prefetch"),
    *("scaling.warmup", "optimizer.b1", "optimizer.b2", "optimizer.eps", "optimizer.decay_unused"),
    *("optimizer.rates", *(f"optimizer.learning_rate.{name}" for name in ("start", "power", "decay"))),
    *("checkpoints.keep_every", "watch.stall_seconds", "watch.long_seconds"),
    *("elastic.wait_minutes", "elastic.patience_seconds"),
    *(f"recovery.{name}" for name in ("window", "rollbacks", "straggler")),
    *(f"{ACROSS}first_bucket_bytes", f"{ACROSS}memory", f"{SYNCHRONISATION}outer.nesterov"),
)
"""Fields without an option because few runs change them; they are set in the run file or a strategy file."""

OF_TRAINING = (
    *("run_dir", "log_every", "evaluate_every", "evaluate_batches", "evaluate_with", "time_limit"),
    *("nonfinite", "sinks", "hook_errors", "replay", "loading.", "checkpoints.", "scaling.", "recovery."),
    *("elastic.", "watch.", "allow.", "start_from.step", "start_from.adapter", "start_from.upcycle"),
    "optimizer.learning_rate.",
)
"""Paths, or beginnings of paths, of options that change neither a plan nor an inspection of a run."""

SHORT = {
    "data.paths": "data",
    "optimizer.learning_rate.peak": "learning_rate",
    "start_from.checkpoint": "start_from",
    "elastic.islands": "elastic",
    f"{SYNCHRONISATION}by": "combine",
    f"{SYNCHRONISATION}on": "combine_on",
    f"{SYNCHRONISATION}every": "local_steps",
    f"{SYNCHRONISATION}when": "sync_when",
    f"{SYNCHRONISATION}distance": "clock_distance",
    f"{SYNCHRONISATION}outer.learning_rate": "outer_rate",
    f"{SYNCHRONISATION}outer.momentum": "outer_momentum",
    f"{SYNCHRONISATION}outer.nesterov": "outer_nesterov",
    f"{ACROSS}axis": "across",
    f"{ACROSS}memory": "bridge_memory",
} | {
    f"{prefix}{name}": name
    for prefix, names in {
        "strategy.": "accumulate remat compute_dtype accumulate_dtype offload",
        LAYOUT: "mesh zero sequence_sharded collective_matmul context_attention unnamed",
        SYNCHRONISATION: "inside fragments overlap synchronous_steps",
        ACROSS: "partitions shares share_limits reduce reduce_dtype bucket_bytes first_bucket_bytes"
        " gradient_parts",
        PIPELINE: "schedule virtual_stages stages stage_speeds stage_memory link_speed in_flight",
    }.items()
    for name in names.split()
}
"""Path of a field -> short name of its option; the path is accepted too."""

RENAMED = {"meet_when": "sync_when", "layers": "operators", "proposals": "operators"}
"""Earlier name of an option -> the one that does it now."""

OF_STRATEGY = {"model.dtype": "compute_dtype", "model.remat": "remat"}
"""Field of a model of this library without an option -> the option of a strategy that sets it."""

GIVEN_IN_PYTHON = "given in Python"
"""The default of --combine if the run file defines its own combiner."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Options that `cli.set_cpu_devices` reads before jax starts.

    Args:
      cpu_devices: number of devices to simulate on the CPU; with several islands, one number for each, such
        as 2,1.
    """

    cpu_devices: str | None = None


def parse_run(command: str, arguments: Sequence[str], extra: type | None = None) -> tuple[Run, Any]:
    """Load the run that the command line names, and apply its options.

    Args:
      command: the command's name, for the help.
      arguments: the command line after the command.
      extra: a dataclass of the command's own options.

    Returns:
      The run with the options applied, and an instance of `extra` (None without one).

    Raises:
      ValueError: RUN is missing or cannot be loaded, or a value is out of range.
      SystemExit: after --help, or if the options cannot be parsed.
    """
    usage = f"shardtrain {command}"
    if not arguments or arguments[0].startswith("-"):
        wants_help = bool(arguments) and arguments[0] in ("-h", "--help")
        text = (
            f"usage: {usage} RUN [--cpu-devices N] [options]\n\n"
            "RUN is path.py[:name] or module:name, a function that returns a Run.\n"
            f"Its options are shown by: {usage} RUN --help\n"
        )
        if wants_help:
            terminal.out(text)
            raise SystemExit(0)
        raise ValueError(f"RUN is missing\n{text}")
    source, *words = arguments
    run = apply_files(load_run(source), words)
    own = None if extra is None else extra()
    of_run = list(run_options(run))
    if command in ("plan", "inspect"):
        of_training = [option for option in of_run if option.path.startswith(OF_TRAINING)]
        _refuse_training(command, of_training, words)
        of_run = [option for option in of_run if option not in of_training]
    command_options = [] if own is None else list(field_options(own))
    own_paths = {option.path for option in command_options}
    options = [
        *field_options(DeviceOptions()),
        *field_options(StrategyOptions()),
        # an option of the command replaces the run's of that name
        *(option for option in of_run if option.path not in own_paths),
        *command_options,
    ]
    if (page := help_page(f"{usage} {source}", options, words)) is not None:
        terminal.out(page)
        raise SystemExit(0)
    refuse_options(words, run.model)
    changes = parse_options(options, words, f"{usage} {source}")
    for name in ("cpu_devices", "strategy", "synchronisation", "cluster"):  # these are applied already
        changes.pop(name, None)
    run_changes = {
        path: TEXTS[path].read(new) if path in TEXTS and new is not None else new
        for path, new in changes.items()
        if path not in own_paths
    }
    own_changes = {path: new for path, new in changes.items() if path in own_paths}
    run = adopt_tokenizer(replace_fields(run, run_changes), run_changes)
    return run, replace_fields(own, own_changes)


def _refuse_training(command: str, options: Sequence[FieldOption], words: Sequence[str]) -> None:
    """Refuse options that only training reads, by any of their names."""
    names = {name for option in options for name in (option.name, f"--{option.path.replace('_', '-')}")}
    given = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    given |= {word.replace("-no-", "-").replace(".no-", ".") for word in given}
    if found := sorted(names & given):
        raise ValueError(
            f"{', '.join(found)} cannot change what `shardtrain {command}` shows; leave it out, or give it"
            " to `shardtrain train`"
        )


def run_options(run: Run) -> Iterator[FieldOption]:
    """Yield the options of a run, with their short names and help texts."""
    writers = {path: form.write for path, form in TEXTS.items()}
    skipped = (
        *NO_OPTION,
        *FIELDS_WITHOUT_OPTION,
        *(f"model.{name}" for name in getattr(run.model, "FIELDS_WITHOUT_OPTION", ())),
    )
    for option in field_options(run, skip=skipped, texts=writers):
        text = TEXTS[option.path].help if option.path in TEXTS else option.help
        yield dataclasses.replace(option, short=SHORT.get(option.path), help=text)


def refuse_options(words: Sequence[str], config: Any) -> None:
    """Refuse renamed options, and options of fields that only the run file sets.

    Args:
      words: the command line after RUN.
      config: the model's configuration.

    Raises:
      ValueError: it has one of them.
    """
    rare = {
        *FIELDS_WITHOUT_OPTION,
        *(f"model.{name}" for name in getattr(config, "FIELDS_WITHOUT_OPTION", ())),
    }
    flags = {format_flag(name): path for path in rare for name in (path, SHORT.get(path, path))}
    renamed = {format_flag(old): format_flag(new) for old, new in RENAMED.items()}
    problems = []
    for word in words:
        name = re.sub(r"(?<=[-.])no-", "", word.partition("=")[0].replace("_", "-"))
        if name in renamed:
            problems.append(f"{name}: its name is {renamed[name]} now")
        if path := flags.get(name):
            section, _, field = path.removeprefix("strategy.").rpartition(".")
            file = f", or {field} in [{section}] of a strategy file" if path.startswith("strategy.") else ""
            use = f"use {format_flag(OF_STRATEGY[path])}, or " if path in OF_STRATEGY else ""
            problems.append(f"{word.partition('=')[0]}: {use}set {path} in the run file{file}")
    refuse("these options do not exist", problems)


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def _summaries(registry: Mapping[str, Callable[..., Any]]) -> str:
    """List the names of a registry, each with the first clause of its docstring.

    >>> _summaries({"parse_weights": parse_weights})
    'parse_weights (read weights such as `3,1`)'
    """
    texts = []
    for name, make in registry.items():
        line = (make.__doc__ or "").strip().partition("\n")[0]
        clause = line.partition(":")[0].partition(";")[0].removesuffix(".")
        texts.append(f"{name} ({clause[:1].lower()}{clause[1:]})" if clause else name)
    return ", ".join(texts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextForm:
    """How a field whose value is not a plain one is read from text and written as text.

    Args:
      write: value -> text.
      read: text -> value.
      help: the help text of the option.
    """

    write: Callable[[Any], str | None]
    read: Callable[[str], Any]
    help: str


def _read_shares(text: str) -> tuple[float, ...] | str:
    """Read `auto` or weights such as `3,1`."""
    if text == "auto":
        return text
    try:
        return parse_weights(text)
    except ValueError as error:
        raise ValueError(f"{error}\n  - auto is also allowed; it splits by measured speed") from None


def _read_share_limits(text: str) -> tuple[int, ...] | str:
    """Read `auto` or whole numbers such as `24,64`."""
    words = [word.strip() for word in text.split(",")]
    if text != "auto" and not all(word.isascii() and word.isdecimal() for word in words):
        raise ValueError(f"share limits {text!r} cannot be read; give whole numbers, as in 24,64, or auto")
    return text if text == "auto" else tuple(map(int, words))


TEXTS = {
    f"{LAYOUT}mesh": TextForm(
        write=_mesh_text,
        read=lambda text: read_layout(Path(text)).mesh if is_layout_file(text) else parse_mesh(text),
        help="sizes of the mesh axes, such as data=2,fsdp=-1 (-1 means all remaining devices), or a layout"
        " file, as in meshes/.",
    ),
    f"{SYNCHRONISATION}by": TextForm(
        write=lambda by: by if isinstance(by, str) else GIVEN_IN_PYTHON,
        read=load_combiner,
        help="combiner of replicas, after its codecs, as in int8+adasum; or your own, as path.py:name."
        f" Combiners: {_summaries(COMBINERS)}. Codecs: {_summaries(CODECS)}.",
    ),
    "sinks": TextForm(
        write=lambda sinks: ",".join(each if isinstance(each, str) else GIVEN_IN_PYTHON for each in sinks),
        read=lambda text: tuple(name.strip() for name in text.split(",")),
        help=f"sinks of metrics, such as jsonl,wandb: {', '.join(SINKS)}. jsonl is always written; wandb and"
        " mlflow need the extras of these names.",
    ),
    f"{ACROSS}shares": TextForm(
        write=lambda given: given if isinstance(given, str | None) else ",".join(f"{x:g}" for x in given),
        read=_read_shares,
        help="weights by which the rows of a batch are split over replicas, such as 3,1. None splits by the"
        " number of devices; auto splits by devices at first, then by measured speed.",
    ),
    f"{ACROSS}share_limits": TextForm(
        write=lambda given: given if isinstance(given, str | None) else ",".join(map(str, given)),
        read=_read_share_limits,
        help="largest number of examples of a batch for each island, such as 24,64 (of tokens, if the batch"
        " is counted in tokens); auto finds the number that fits its memory.",
    ),
}
"""Path of a field -> its text form."""
