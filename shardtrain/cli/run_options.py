"""RUN and its options: loads `path.py:name` or `module:name`, and puts a run's fields on the command line.

The options are the fields of `Run` and of the dataclasses in it, with the run's own values as
defaults; so they are the same in Python and here, typed, and unknown names are refused.
"""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import tyro

from shardtrain.combine import Combiner
from shardtrain.errors.messages import near
from shardtrain.functional.model import Model
from shardtrain.functional.nnx_model import is_module
from shardtrain.sharding.axis_sizes import parse_mesh
from shardtrain.sharding.layout_file import read_layout
from shardtrain.sharding.shares import parse_weights
from shardtrain.system import terminal
from shardtrain.trainer.config import Run, Strategy

PYTHON_ONLY = ("strategy", "loss", "sample")
"""Fields of a run that are no options as they stand; the strategy has options of its own."""

SHORT = {"--data": "--data.paths"}
"""Options that are worth a shorter name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """The options of a strategy; None keeps what the run says.

    Args:
      mesh: axis sizes such as data=2,fsdp=-1 (-1: the rest), or a file of meshes/.
      zero: what fsdp shards. 3: parameters, gradients, optimizer state; 2: the last two; 1: the last.
      sequence_sharded: shard activations between blocks over tensor, along the sequence.
      unnamed: on several devices, refuse or replicate arrays without names and names without a rule.
      accumulate: microbatches that add up to one step.
      combine: how replicas (islands, or the indices of data) become one: mean, sum, adasum, with codecs
        before it as in int8+adasum; or a file of your own, path.py:name.
      combine_on: gradients, or the deltas of each replica's own optimizer.
      local_steps: steps that a replica takes alone before its delta is combined.
      inside: what an island makes of its own devices' gradients before they cross: mean or sum.
      across: how islands are joined: data (each is a replica) or pipeline (each holds stages).
      partitions: islands that make up one pipeline; by default all.
      shares: weights of the replicas, such as 3,1, for their rows of a batch; by default their devices.
      reduce: how sums are made between islands: all_reduce, root, hierarchical.
      bucket_bytes: size of the buckets in which gradients cross.
      first_bucket_bytes: size of the first one.
      bridge_memory: what MPI is given: auto, device, host.
      schedule: of a pipeline: gpipe, 1f1b, interleaved, zero_bubble, or a table of your own (path.csv).
      virtual_stages: parts of the model on each stage of a pipeline.
      stages: how a pipeline cuts the blocks: equal, params, flops, or numbers such as 3,4,4,1.
    """

    mesh: str | None = None
    zero: int | None = None
    sequence_sharded: bool | None = None
    unnamed: str | None = None
    accumulate: int | None = None
    combine: str | None = None
    combine_on: str | None = None
    local_steps: int | None = None
    inside: str | None = None
    across: str | None = None
    partitions: int | None = None
    shares: str | None = None
    reduce: str | None = None
    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None
    bridge_memory: str | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    stages: str | None = None

    def applied_to(self, strategy: Strategy) -> Strategy:
        """The strategy with these changes."""
        layout = strategy.layout
        if self.mesh is not None and (self.mesh.endswith(".toml") or Path(self.mesh).is_file()):
            layout = read_layout(Path(self.mesh))
        elif self.mesh is not None:
            layout = dataclasses.replace(layout, mesh=parse_mesh(self.mesh))
        by = None if self.combine is None else _combiner(self.combine)
        shares = None if self.shares is None else parse_weights(self.shares)
        return Strategy(
            layout=_changed(
                layout, zero=self.zero, sequence_sharded=self.sequence_sharded, unnamed=self.unnamed
            ),
            accumulate=strategy.accumulate if self.accumulate is None else self.accumulate,
            combine=_changed(
                strategy.combine,
                by=by,
                on=self.combine_on,
                local_steps=self.local_steps,
                inside=self.inside,
            ),
            across=_changed(
                strategy.across,
                axis=self.across,
                partitions=self.partitions,
                shares=shares,
                reduce=self.reduce,
                bucket_bytes=self.bucket_bytes,
                first_bucket_bytes=self.first_bucket_bytes,
                memory=self.bridge_memory,
            ),
            pipeline=_changed(
                strategy.pipeline,
                schedule=self.schedule,
                virtual_stages=self.virtual_stages,
                stages=self.stages,
            ),
        )


def _changed(value: Any, **changes: Any) -> Any:
    return dataclasses.replace(value, **{name: v for name, v in changes.items() if v is not None})


def _combiner(text: str) -> Any:
    """A combiner by name; or from a file of the user's, which has it, or a function that makes it.

    Raises:
      ValueError: the file has no such name, or something else by it.
    """
    path, _, name = text.partition(":")
    if not path.endswith(".py"):
        return text
    module = _load_file(Path(path))
    found = getattr(module, name or "combiner", None)
    found = found() if callable(found) and not isinstance(found, Combiner) else found
    if not isinstance(found, Combiner):
        names = [n for n, value in vars(module).items() if not n.startswith("_")]
        raise ValueError(
            f"--combine {text}: {path} has no combiner by the name {near(name or 'combiner', names)};"
            " give it a shardtrain.combine.Combiner, or a function without arguments that returns one"
        )
    return found


def load_run(where: str) -> Run:
    """The run that a file or module makes.

    Args:
      where: `path.py`, `path.py:name`, or `module:name`; without a name, `run`.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no such name in it, or not a function that returns a `Run`.
    """
    source, _, name = where.partition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    make: Callable[[], Run] | None = getattr(module, name or "run", None)
    if make is None:
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ValueError(f"{source} has no {near(name or 'run', names)}; a run file defines def run() -> Run")
    if callable(make) and inspect.signature(make).parameters:
        raise ValueError(f"{where} is a function with arguments; a run file defines def run() -> Run")
    run = make() if callable(make) else make
    if not isinstance(run, Run):
        raise ValueError(f"{where} gave {type(run).__name__} {run!r}; it must return a shardtrain.Run")
    if run.run_dir is None:
        run = dataclasses.replace(run, run_dir=Path("runs") / re.sub(r"\W", "_", Path(source).stem))
    return run


def _load_module(name: str) -> Any:
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError(f"{name!r} is no name of a module; give a path.py[:name] or module:name")
    _importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {name!r}; give a path.py[:name] or module:name") from None


def _importable(folder: Path) -> None:
    """As for `python file.py`: what lies beside a run file can be imported by it."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no run file {path}; give a path.py[:name] or module:name")
    _importable(path.resolve().parent)
    # under its stem, so that what pickles or prints names of the file finds it again
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def parse_run(command: str, arguments: Sequence[str], extra: type | None = None) -> tuple[Run, Any]:
    """Read `RUN [options]`.

    Args:
      command: for the help.
      arguments: what stands behind the command.
      extra: a dataclass of the command's own options.

    Returns:
      The run with the options applied, and an instance of `extra`.
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
    run = load_run(arguments[0])
    words = [_long(word) for word in arguments[1:]]
    shown = {
        f.name: getattr(run, f.name)
        for f in dataclasses.fields(Run)
        if f.name not in PYTHON_ONLY and _is_option(getattr(run, f.name))
    }
    parsed: Any = tyro.cli(
        _options_class(shown, extra),
        args=words,
        config=(tyro.conf.AvoidSubcommands,),  # of a union the kind that the run has
        prog=f"{usage} {arguments[0]}",
        description="Options of the run, with its values as defaults. --data PATH... is short for"
        " --data.paths; --cpu-devices N simulates N devices on the CPU.",
    )
    changes = {name: _with_objects(getattr(parsed, name), value) for name, value in shown.items()}
    strategy = parsed.strategy.applied_to(run.strategy)
    return dataclasses.replace(run, **changes, strategy=strategy), getattr(parsed, "extra", None)


def _with_objects(parsed: Any, given: Any) -> Any:
    """A parsed dataclass with the given one's fields that no option can say, such as objects and arrays.

    The parser would make an object anew, from the defaults of its class.
    """
    if not dataclasses.is_dataclass(given) or type(parsed) is not type(given):
        return parsed
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(given):
        now, before = getattr(parsed, field.name), getattr(given, field.name)
        kept = _with_objects(now, before) if _can_be_said(before) else before
        if field.init and kept is not now:
            changes[field.name] = kept
    kept: Any = parsed
    return dataclasses.replace(kept, **changes) if changes else parsed


def _can_be_said(value: Any) -> bool:
    """Whether options can say a value: plain ones, lists and dicts of them, and dataclasses."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_can_be_said, value))
    if isinstance(value, Mapping):
        return all(map(_can_be_said, [*value.keys(), *value.values()]))
    return _is_option(value) or isinstance(value, Enum)


def _long(word: str) -> str:
    name, equals, value = word.partition("=")
    return SHORT.get(name, name) + equals + value


def _is_option(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return not isinstance(value, Model) and not is_module(value)
    return value is None or isinstance(value, bool | int | float | str | Path)


def _without_functions(hint: Any) -> Any:
    """A type hint without the functions that only Python can give."""
    kinds = [kind for kind in typing.get_args(hint) if typing.get_origin(kind) is not Callable]
    return functools.reduce(operator.or_, kinds) if isinstance(hint, types.UnionType) and kinds else hint


def _options_class(shown: dict[str, Any], extra: type | None) -> type:
    annotations = {f.name: f.type for f in dataclasses.fields(Run)}
    flat = tyro.conf.OmitArgPrefixes
    members: list[Any] = [("strategy", flat[StrategyOptions], dataclasses.field(default=StrategyOptions()))]
    if extra is not None:
        members.append(("extra", flat[extra], dataclasses.field(default=extra())))
    for name, value in shown.items():
        kind = type(value) if dataclasses.is_dataclass(value) else _without_functions(annotations[name])
        members.append((name, kind, dataclasses.field(default=value)))
    return dataclasses.make_dataclass("Options", members, frozen=True, kw_only=True)
