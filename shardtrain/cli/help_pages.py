"""Format the help of commands that take a run: a page of common options, and a page for each section.

Next: `run_options.py`, which makes the options.
"""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from shardtrain.cli.field_options import FieldOption
from shardtrain.errors.messages import near

LAYOUT, SYNCHRONISATION, ACROSS, PIPELINE = (
    f"strategy.{name}." for name in ("layout", "synchronisation", "across", "pipeline")
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the help.

    Args:
      about: its description.
      shown: paths of the options that `--help` shows.
      more: paths, or beginnings of paths that end with a dot, of further options, which `--help SECTION`
        shows.
      first: number of options that `--help` shows at least; it adds options of `more` to reach it.
    """

    about: str
    shown: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    first: int = 0


SECTIONS = {
    "mesh": Section(
        about="the devices, and how parameters and activations are sharded over them",
        shown=(
            *(f"{LAYOUT}mesh", "cpu_devices", f"{LAYOUT}zero", f"{LAYOUT}sequence_sharded", "strategy"),
            *("strategy.remat", "strategy.compute_dtype"),
        ),
        more=(LAYOUT, "strategy.accumulate_dtype", "strategy.offload", "check_layout", "xla_preset"),
    ),
    "batch": Section(
        about="the examples of a step",
        shown=("steps", "batch", "batch_unit", "strategy.accumulate", "seed"),
        more=("batch_growth", "gradient_noise_scale", "scaling."),
    ),
    "optimizer": Section(
        about="the update of the parameters",
        shown=(
            *(f"optimizer.learning_rate.{name}" for name in ("peak", "name", "warmup")),
            *(f"optimizer.{name}" for name in ("name", "weight_decay", "clip")),
        ),
        more=("optimizer.", "freeze"),
    ),
    "model": Section(
        about="the model of this run file",
        shown=tuple(f"model.{name}" for name in ("vocab", "seq", "embed", "num_layers", "num_heads")),
        more=("model.",),
        first=8,
    ),
    "data": Section(
        about="the data of this run file",
        shown=("data.paths", "loading.workers"),
        more=("data.", "loading."),
        first=5,
    ),
    "checkpoints": Section(
        about="the folder of the run, when it saves, and the checkpoint it starts from",
        shown=(
            *("run_dir", "start_from.checkpoint", "checkpoints.every_minutes", "checkpoints.every_steps"),
            *("checkpoints.keep", "time_limit"),
        ),
        more=("checkpoints.", "start_from.", "allow.", "time_margin"),
    ),
    "logging": Section(
        about="which metrics are logged and evaluated, and when",
        shown=("log_every", "evaluate_every", "evaluate_batches", "sinks", "profile"),
        more=("evaluate_with",),
    ),
    "islands": Section(
        about="how replicas, and islands (groups of processes, each with a mesh of its own), synchronise",
        shown=(
            *(f"{SYNCHRONISATION}by", f"{SYNCHRONISATION}every", "synchronisation", f"{ACROSS}shares"),
            *(f"{ACROSS}axis", "cluster"),
        ),
        more=(SYNCHRONISATION, ACROSS, "elastic.", "replay"),
    ),
    "pipeline": Section(
        about="how blocks are partitioned into stages, and the schedule of microbatches",
        shown=(f"{PIPELINE}schedule", f"{PIPELINE}stages", f"{PIPELINE}virtual_stages"),
        more=(PIPELINE,),
    ),
    "failures": Section(
        about="when a run rolls back, and when a hanging run is ended",
        shown=("nonfinite", "recovery.spike"),
        more=("recovery.", "watch."),
    ),
    "command": Section(about="options of this command"),
}  # fmt: skip
"""Name of a section -> its options; options that no section names are in "command"."""


SENTENCE_END = re.compile(r"(?<!al)\. |; None")


def help_page(command: str, options: Sequence[FieldOption], words: Sequence[str]) -> str | None:
    """Return the help page that the command line asks for; None if it asks for none.

    Args:
      command: the words of the command, as in "shardtrain train run.py".
      options: all options of the command.
      words: the command line. `--help` shows the options that most runs need, `--help SECTION` all options of
        a section, and `--help-all` all options.

    Raises:
      ValueError: there is no such section.
    """
    asked = [number for number, word in enumerate(words) if word in ("-h", "--help", "--help-all")]
    if not asked:
        return None
    word, *after = words[asked[0] :]
    section = after[0] if after and not after[0].startswith("-") and word != "--help-all" else None
    if section is not None and section not in SECTIONS:
        raise ValueError(f"there is no section {near(section, SECTIONS)} of the help")
    everything = section is not None or word == "--help-all"
    parser = argparse.ArgumentParser(
        prog=command,
        usage=f"{command} [options]",
        description="Each option sets the field of the run with its name, or with the path in brackets;"
        " its default is the value in the run file. The word None unsets an option."
        if everything
        else f"These are the options that most runs need; --help SECTION shows all options of a section"
        f" ({', '.join(SECTIONS)}), --help-all shows all.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        add_help=False,
    )
    sections = [_find_section(option.path) for option in options]
    for name, part in SECTIONS.items():
        members = [option for option, own in zip(options, sections, strict=True) if own == name]
        if not members or section not in (None, name):
            continue
        # first the options that most runs need, in their order
        first = part.shown
        members.sort(key=lambda option: first.index(option.path) if option.path in first else len(first))
        if not everything and name != "command":
            most = max(part.first, sum(option.path in first for option in members))
            members = members[:most]
        group = parser.add_argument_group(name, part.about)
        for option in members:
            _add(group, option, everything=everything)
    return parser.format_help()


def _find_section(path: str) -> str:
    for name, section in SECTIONS.items():
        if path in (*section.shown, *section.more):
            return name
    for name, section in SECTIONS.items():
        if any(beginning.endswith(".") and path.startswith(beginning) for beginning in section.more):
            return name
    return "command"


def _add(group: Any, option: FieldOption, *, everything: bool) -> None:
    default = "" if option.default in (None, "", ()) else f"{option.default}"
    path = option.path if everything and option.short else ""
    notes = "; ".join(filter(None, (default, path)))
    text = (option.help or "") if everything else SENTENCE_END.split(option.help or "")[0].removesuffix(".")
    text = f"{text} [{notes}]" if notes else text
    names, settings = [option.name], {"help": text.replace("%", "%%")}
    if option.kind is bool:
        scope, dot, last = option.name.removeprefix("--").rpartition(".")
        names.append(f"--{scope}{dot}no-{last}")
        settings["action"] = "store_true"
    else:
        settings["metavar"] = metavar(option.kind)
    group.add_argument(*names, **settings)


def metavar(kind: Any) -> str:
    """Return the placeholder for a value of a type in the help.

    >>> metavar(int | None), metavar(Literal["a", "b"]), metavar(tuple[str, ...])
    ('INT', '{a,b}', '[STR ...]')
    """
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return "|".join(metavar(each) for each in typing.get_args(kind) if each is not type(None))
    if typing.get_origin(kind) is Literal:
        return f"{{{','.join(str(each) for each in typing.get_args(kind) if each is not None)}}}"
    if typing.get_origin(kind) in (tuple, list):
        return f"[{metavar(typing.get_args(kind)[0])} ...]"
    return "PATH" if kind is Path else getattr(kind, "__name__", str(kind)).upper()
